/* A load client: many WebSocket connections in one thread on epoll, far cheaper than any server.

   Usage: load NAME=VALUE …
     port       TCP port on 127.0.0.1
     path       of the WebSocket endpoint
     protocol   centrifuge: connect and subscribe; plain: frames begin after the handshake; greeted:
                with a frame {}, which all get who will get what follows; socketio; nats
     rooms      number of rooms in all
     each       rooms of one connection: connection i joins rooms (i * each + j) mod rooms
     prefix     room names are PREFIX and the room's number
     tokens     file with a token per line, used in turn; none: anonymous
     narrow     the first so many connections have a small receive buffer
     opening    most connections that are being opened at one time
     stall_ms   a pause of this process that is longer than this is noted as a stall

   Commands, one a line on standard input; each is answered by one line of JSON:
     open N     open N more connections and join their rooms
     mark       begin to count anew (not the violations: those are for ever)
     await N    answer when N messages have come since the mark
     report     all figures since the mark
     look N     look for arrivals every N us, instead of being woken by each (0)
     pause N    stop reading from the first N connections
     unpause    read on
     drop       cut all connections; positions are kept
     resume     open them again and resume from these positions

   A message is a push of the Centrifuge protocol whose data begins with {"t":NS: the moment, in ns of
   CLOCK_MONOTONIC, at which it was sent. With socket.io it is the argument of the event "news", with
   NATS the payload. Offsets of each subscription must follow each other. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "load.h"

int port;
const char *path = "/", *prefix = "room:";
size_t prefix_bytes;
unsigned rooms = 1, each = 1, narrow, opening_max = 64;
const struct protocol *protocol = &centrifuge;
char **tokens;
unsigned token_count;
uint64_t stall_ns = 5000000;

static unsigned look_us;
static bool answer_ready;

/* Commands */

static void open_more(unsigned more)
{
    wanted = more;
    answer_ready = true;
}

static void obey(const char *line)
{
    unsigned long long n = 0;
    if (sscanf(line, "open %llu", &n) == 1) {
        make_room_for((unsigned)n);
        resuming = false;
        open_more((unsigned)n);
        return;
    }
    if (!strcmp(line, "resume")) {
        resuming = true;
        n = count;
        count = 0;
        open_more((unsigned)n);
        return;
    }
    if (sscanf(line, "await %llu", &n) == 1) {
        since.awaited = n;
        return;
    }
    if (!strcmp(line, "report")) {
        report();
        return;
    }
    if (!strcmp(line, "mark")) {
        mark();
    } else if (sscanf(line, "look %llu", &n) == 1) {
        look_us = (unsigned)n;
    } else if (sscanf(line, "pause %llu", &n) == 1) {
        pause_first((unsigned)n);
    } else if (!strcmp(line, "unpause")) {
        unpause();
    } else if (!strcmp(line, "drop")) {
        drop();
    } else {
        fprintf(stderr, "load: unknown command: %s\n", line);
        exit(2);
    }
    printf("{\"event\":\"done\"}\n");
}

static void obey_input(void)
{
    static char text[4096];
    static size_t held;
    ssize_t got = read(0, text + held, sizeof text - held - 1);
    if (got <= 0)
        exit(0);
    text[held + (size_t)got] = 0;
    char *line = text, *end;
    for (; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        obey(line);
    }
    held = strlen(line);
    memmove(text, line, held);
}

/* What was waited for. */
static void tell(void)
{
    if (answer_ready && !wanted && !opening) {
        answer_ready = false;
        printf("{\"event\":\"ready\",\"open\":%u}\n", open_count);
    }
    if (since.awaited && since.deliveries + since.replayed >= since.awaited) {
        since.awaited = 0;
        printf("{\"event\":\"reached\",\"messages\":%llu}\n", (unsigned long long)(since.deliveries + since.replayed));
    }
    fflush(stdout);
}

/* Settings */

static void read_tokens(const char *name)
{
    char *line = NULL;
    size_t room = 0;
    ssize_t n;
    FILE *file = fopen(name, "r");
    if (!file)
        die(name);
    while ((n = getline(&line, &room, file)) > 0) {
        line[strcspn(line, "\n")] = 0;
        tokens = realloc(tokens, (token_count + 1) * sizeof *tokens);
        tokens[token_count++] = strdup(line);
    }
    fclose(file);
}

static const struct protocol *protocol_of(const char *name)
{
    static const struct protocol *const all[] = {&centrifuge, &plain, &greeted, &socketio, &nats};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!strcmp(all[i]->name, name))
            return all[i];
    fprintf(stderr, "load: unknown protocol: %s\n", name);
    exit(2);
}

static void configure(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (!value) {
            fprintf(stderr, "load: not NAME=VALUE: %s\n", argv[i]);
            exit(2);
        }
        *value++ = 0;
        if (!strcmp(argv[i], "port"))
            port = atoi(value);
        else if (!strcmp(argv[i], "path"))
            path = value;
        else if (!strcmp(argv[i], "protocol"))
            protocol = protocol_of(value);
        else if (!strcmp(argv[i], "rooms"))
            rooms = (unsigned)atoi(value);
        else if (!strcmp(argv[i], "each"))
            each = (unsigned)atoi(value);
        else if (!strcmp(argv[i], "prefix"))
            prefix = value;
        else if (!strcmp(argv[i], "tokens"))
            read_tokens(value);
        else if (!strcmp(argv[i], "narrow"))
            narrow = (unsigned)atoi(value);
        else if (!strcmp(argv[i], "opening"))
            opening_max = (unsigned)atoi(value);
        else if (!strcmp(argv[i], "stall_ms"))
            stall_ns = (uint64_t)(atof(value) * 1e6);
        else {
            fprintf(stderr, "load: unknown setting: %s\n", argv[i]);
            exit(2);
        }
    }
    prefix_bytes = strlen(prefix);
}

int main(int argc, char **argv)
{
    struct rlimit files;
    setvbuf(stdout, NULL, _IOFBF, 1 << 20);
    configure(argc, argv);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    open_poller();
    mark();
    for (;;) {
        if (take_arrivals(look_us))
            obey_input();
        begin_more();
        tell();
    }
}
