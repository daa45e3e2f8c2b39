/* A load client: many WebSocket connections in one thread on epoll, far cheaper than any server.

   Usage: load NAME=VALUE …
     port       TCP port on 127.0.0.1
     path       of the WebSocket endpoint
     protocol   centrifuge: connect and subscribe; plain: frames begin after the handshake
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
   CLOCK_MONOTONIC, at which it was sent. Offsets of each subscription must follow each other. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "histogram.h"

enum {
    READ_BYTES = 256 * 1024,
    BUFFER_BYTES = 8 * 1024 * 1024,
    NARROW_BYTES = 4096,
    EVENTS = 64,
    TICK_MS = 2,
    EPOCH_BYTES = 64,
    TEXT_BYTES = 300,
};

#define INPUT UINT64_MAX /* in place of a connection's number */

enum state { CLOSED, UPGRADING, JOINING, OPEN };

struct connection {
    int fd;
    enum state state;
    bool resuming;
    unsigned unanswered; /* subscribe commands */
    uint64_t began_ns;
    unsigned char *carry; /* the beginning of a frame that is not complete */
    size_t carry_bytes;
};

/* What it is told to do. */
static int port;
static const char *path = "/", *prefix = "room:";
static bool centrifuge = true;
static unsigned rooms = 1, each = 1, narrow, opening_max = 64;
static uint64_t stall_ns = 5000000;
static unsigned look_us;
static char **tokens;
static unsigned token_count;

static struct connection *connections;
static uint64_t *offsets; /* of each subscription, the last that came */
static unsigned count, wanted, opening, open_count, paused;
static bool answer_ready, resuming;
static char epoch[EPOCH_BYTES];
static int poller;
static unsigned char buffer[BUFFER_BYTES];
static uint64_t now_ns;
static size_t prefix_bytes;

/* Since the mark. */
static struct {
    uint64_t deliveries, replayed, bytes, frames, reads, pings;
    uint64_t mark_ns, first_ns, last_ns, awaited;
    uint64_t stalls, longest_stall_ns, stall_sum_ns, cpu_ns, waited_ns;
} since;
static struct histogram latency, latency_in_stall, joins;
static uint64_t stall_end_ns;

/* For ever. */
static uint64_t holes, duplicates, strange, errors, closed, evicted, recovered, unrecovered;
static char trouble[TEXT_BYTES];

static void die(const char *what)
{
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t clock_ns(clockid_t which)
{
    struct timespec t;
    clock_gettime(which, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Time that this process was ready to run and did not: the cores were taken. */
static uint64_t runqueue_wait_ns(void)
{
    unsigned long long ran = 0, waited = 0;
    FILE *file = fopen("/proc/self/schedstat", "r");
    if (file) {
        if (fscanf(file, "%llu %llu", &ran, &waited) != 2)
            waited = 0;
        fclose(file);
    }
    return waited;
}

/* Keeps the first text that tells of a violation, made fit for JSON. */
static void note(const char *what, const unsigned char *text, size_t bytes)
{
    if (trouble[0])
        return;
    snprintf(trouble, sizeof trouble, "%s: %.*s", what, bytes > 200 ? 200 : (int)bytes, text);
    for (char *c = trouble; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ' || (unsigned char)*c > '~')
            *c = '\'';
}

static const unsigned char *find(const unsigned char *from, const unsigned char *end, const char *text)
{
    return from && from < end ? memmem(from, (size_t)(end - from), text, strlen(text)) : NULL;
}

/* How many bytes stand before `stop`. */
static int length_until(const unsigned char *from, const unsigned char *end, char stop)
{
    const unsigned char *found = memchr(from, stop, (size_t)(end - from));
    return found ? (int)(found - from) : 0;
}

/* The number after `text`, found at or after `from`. */
static bool number_after(const unsigned char *from, const unsigned char *end, const char *text,
                         uint64_t *number, const unsigned char **rest)
{
    const unsigned char *p = find(from, end, text);
    if (!p)
        return false;
    p += strlen(text);
    *number = 0;
    while (p < end && *p >= '0' && *p <= '9')
        *number = *number * 10 + (*p++ - '0');
    if (rest)
        *rest = p;
    return true;
}

/* Connections */

static void transmit(struct connection *c, const void *bytes, size_t size)
{
    if (send(c->fd, bytes, size, MSG_NOSIGNAL) != (ssize_t)size) {
        errors++;
        note("send failed", (const unsigned char *)strerror(errno), strlen(strerror(errno)));
    }
}

/* A masked frame; a mask of zeros leaves the bytes as they are. */
static void transmit_frame(struct connection *c, unsigned opcode, const void *bytes, size_t size)
{
    unsigned char frame[65536 + 8] = {(unsigned char)(0x80 | opcode)};
    size_t head = 2;
    if (size > 65535)
        die("a command is too long");
    if (size < 126) {
        frame[1] = (unsigned char)(0x80 | size);
    } else {
        frame[1] = 0x80 | 126;
        frame[2] = (unsigned char)(size >> 8);
        frame[3] = (unsigned char)size;
        head = 4;
    }
    memset(frame + head, 0, 4);
    memcpy(frame + head + 4, bytes, size);
    transmit(c, frame, head + 4 + size);
}

static void hang_up(struct connection *c)
{
    struct linger now = {1, 0};
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &now, sizeof now); /* leaves no TIME_WAIT */
    close(c->fd);
    c->state = CLOSED;
    c->carry_bytes = 0;
}

static void lost(struct connection *c, const char *why)
{
    if (c->state == OPEN)
        open_count--;
    else
        opening--;
    closed++;
    note("closed", (const unsigned char *)why, strlen(why));
    hang_up(c);
}

static void watch(const struct connection *c)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = (uint64_t)(c - connections)};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event))
        die("epoll_ctl");
}

static void begin(struct connection *c)
{
    static const char form[] = "GET %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUpgrade: websocket\r\n"
                               "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                               "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    char request[1024];
    int one = 1, small = NARROW_BYTES;
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0)
        die("socket");
    if ((unsigned)(c - connections) < narrow)
        setsockopt(c->fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    c->began_ns = clock_ns(CLOCK_MONOTONIC);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address))
        die("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->state = UPGRADING;
    c->resuming = resuming;
    opening++;
    watch(c);
    transmit(c, request, (size_t)snprintf(request, sizeof request, form, path, port));
}

static void begin_more(void)
{
    for (; wanted && opening < opening_max; count++, wanted--)
        begin(&connections[count]);
    if (answer_ready && !wanted && !opening) {
        answer_ready = false;
        printf("{\"event\":\"ready\",\"open\":%u}\n", open_count);
    }
}

static void opened(struct connection *c)
{
    c->state = OPEN;
    opening--;
    open_count++;
    count_in(&joins, now_ns - c->began_ns);
}

static unsigned room_of(const struct connection *c, unsigned j)
{
    return (unsigned)(((uint64_t)(c - connections) * each + j) % rooms);
}

/* Connect and all subscriptions in one frame, as SDKs send them. */
static void greet(struct connection *c)
{
    static char text[65536];
    unsigned index = (unsigned)(c - connections);
    const uint64_t *mine = offsets + (size_t)index * each;
    int n = snprintf(text, sizeof text, "{\"id\":1,\"connect\":{\"token\":\"%s\",\"name\":\"load\"}}",
                     token_count ? tokens[index % token_count] : "");
    for (unsigned j = 0; j < each && n < (int)sizeof text; j++) {
        n += snprintf(text + n, sizeof text - (size_t)n, "\n{\"id\":%u,\"subscribe\":{\"channel\":\"%s%u\"",
                      j + 2, prefix, room_of(c, j));
        if (c->resuming && n < (int)sizeof text)
            n += snprintf(text + n, sizeof text - (size_t)n, ",\"recover\":true,\"offset\":%llu,\"epoch\":\"%s\"",
                          (unsigned long long)mine[j], epoch);
        if (n < (int)sizeof text)
            n += snprintf(text + n, sizeof text - (size_t)n, "}}");
    }
    if (n >= (int)sizeof text)
        die("too many rooms for one frame");
    c->state = JOINING;
    c->unanswered = each;
    transmit_frame(c, 1, text, (size_t)n);
}

/* What the server says */

static void follow(uint64_t *last, uint64_t offset, const unsigned char *line, size_t bytes)
{
    if (offset == *last + 1) {
        *last = offset;
    } else if (offset <= *last) {
        duplicates++;
        note("an offset came again", line, bytes);
    } else {
        holes += offset - *last - 1;
        note("offsets are missing", line, bytes);
        *last = offset;
    }
}

static void told_push(struct connection *c, const unsigned char *line, const unsigned char *end)
{
    static const char head[] = "{\"push\":{\"channel\":\"", middle[] = "\",\"pub\":{\"data\":{\"t\":";
    const unsigned char *p = line + sizeof head - 1, *tail = end - line > 128 ? end - 128 : line;
    uint64_t room = 0, sent_ns = 0, offset = 0;
    if (end - p < (ptrdiff_t)prefix_bytes || memcmp(p, prefix, prefix_bytes))
        goto odd;
    for (p += prefix_bytes; p < end && *p >= '0' && *p <= '9'; p++)
        room = room * 10 + (*p - '0');
    if (end - p < (ptrdiff_t)sizeof middle || memcmp(p, middle, sizeof middle - 1))
        goto odd;
    for (p += sizeof middle - 1; p < end && *p >= '0' && *p <= '9'; p++)
        sent_ns = sent_ns * 10 + (*p - '0');
    if (!number_after(tail, end, ",\"offset\":", &offset, NULL))
        goto odd;
    unsigned j = (unsigned)((room + rooms - room_of(c, 0)) % rooms);
    if (j >= each)
        goto odd;
    follow(&offsets[(size_t)(c - connections) * each + j], offset, line, (size_t)(end - line));
    since.deliveries++;
    count_in(sent_ns < stall_end_ns ? &latency_in_stall : &latency, now_ns > sent_ns ? now_ns - sent_ns : 0);
    return;
odd:
    if (find(line, end, "\"unsubscribe\":{"))
        evicted++;
    else
        strange++;
    note("not expected", line, (size_t)(end - line));
}

static void told_subscribed(struct connection *c, uint64_t id, const unsigned char *line, const unsigned char *end)
{
    const unsigned char *past = find(line, end, "\"publications\":["), *p, *value;
    uint64_t start = 0, offset, *last;
    if (id < 2 || id - 2 >= each || !number_after(line, past ? past : end, "\"offset\":", &start, NULL))
        goto odd;
    last = &offsets[(size_t)(c - connections) * each + (id - 2)];
    value = find(line, end, "\"epoch\":\"");
    if (value)
        snprintf(epoch, sizeof epoch, "%.*s", length_until(value + 9, end, '"'), value + 9);
    if (c->resuming) {
        if (find(line, past ? past : end, "\"recovered\":true") && start == *last) {
            recovered++;
        } else {
            unrecovered++;
            note("not recovered", line, (size_t)(end - line));
        }
    }
    *last = start;
    for (p = past; number_after(p, end, ",\"offset\":", &offset, &p);) {
        follow(last, offset, line, (size_t)(end - line));
        since.replayed++;
    }
    if (!--c->unanswered)
        opened(c);
    return;
odd:
    strange++;
    note("not expected", line, (size_t)(end - line));
}

static void told_error(struct connection *c, uint64_t id, const unsigned char *line, const unsigned char *end)
{
    errors++;
    note("refused", line, (size_t)(end - line));
    /* An answer it is: nobody waits for another. */
    if (c->state == JOINING && id > 1 && !--c->unanswered)
        opened(c);
}

static void told(struct connection *c, const unsigned char *line, const unsigned char *end)
{
    uint64_t id = 0;
    if (end - line == 2) {
        since.pings++;
        transmit_frame(c, 1, "{}", 2);
    } else if (end - line > 20 && !memcmp(line, "{\"push\":{", 9)) {
        told_push(c, line, end);
    } else if (!number_after(line, end, "{\"id\":", &id, NULL) || find(line, end, "\"error\":{")) {
        told_error(c, id, line, end);
    } else if (id != 1) {
        told_subscribed(c, id, line, end);
    }
}

/* Takes the frames that are complete; gives the number of bytes that they had. */
static size_t take_frames(struct connection *c, unsigned char *p, size_t bytes)
{
    unsigned char *start = p, *end = p + bytes;
    while (end - p >= 2) {
        size_t size = p[1] & 0x7f, head = 2;
        if (size == 126) {
            if (end - p < 4)
                break;
            size = (size_t)p[2] << 8 | p[3];
            head = 4;
        } else if (size == 127) {
            if (end - p < 10)
                break;
            size = 0;
            for (int i = 2; i < 10; i++)
                size = size << 8 | p[i];
            head = 10;
        }
        if (size > BUFFER_BYTES - 16) {
            lost(c, "a frame is too large");
            return bytes;
        }
        if ((size_t)(end - p) < head + size)
            break;
        unsigned char *line = p + head, *last = line + size, *next;
        since.frames++;
        switch (p[0]) {
        case 0x81:
            for (; line < last; line = next + 1) {
                next = memchr(line, '\n', (size_t)(last - line));
                if (!next)
                    next = last;
                told(c, line, next);
            }
            break;
        case 0x88: {
            char why[160];
            snprintf(why, sizeof why, "close frame %u %.*s", size >= 2 ? (unsigned)line[0] << 8 | line[1] : 0,
                     size > 2 ? (int)size - 2 : 0, (const char *)line + 2);
            lost(c, why);
            return bytes;
        }
        case 0x89:
            transmit_frame(c, 10, line, size);
            break;
        default:
            strange++;
            note("not expected: a frame", p, head);
        }
        p += head + size;
    }
    return (size_t)(p - start);
}

static size_t take_upgrade(struct connection *c, unsigned char *p, size_t bytes)
{
    const unsigned char *end = find(p, p + bytes, "\r\n\r\n");
    if (!end)
        return 0;
    if (memcmp(p, "HTTP/1.1 101 ", 13) || !find(p, end + 2, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n")) {
        note("no handshake", p, (size_t)(end - p));
        lost(c, "no handshake");
        return bytes;
    }
    if (centrifuge)
        greet(c);
    else
        opened(c);
    size_t head = (size_t)(end + 4 - p);
    return head + take_frames(c, p + head, bytes - head);
}

static void readable(struct connection *c)
{
    size_t have = c->carry_bytes, used;
    memcpy(buffer, c->carry, have);
    size_t limit = BUFFER_BYTES - have < READ_BYTES ? BUFFER_BYTES - have : READ_BYTES;
    ssize_t got = recv(c->fd, buffer + have, limit, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got <= 0) {
        lost(c, got ? strerror(errno) : "end of stream");
        return;
    }
    uint64_t before = since.deliveries + since.replayed;
    now_ns = clock_ns(CLOCK_MONOTONIC);
    since.bytes += (uint64_t)got;
    since.reads++;
    have += (size_t)got;
    used = c->state == UPGRADING ? take_upgrade(c, buffer, have) : take_frames(c, buffer, have);
    c->carry_bytes = have - used;
    if (c->carry_bytes) {
        c->carry = realloc(c->carry, c->carry_bytes);
        if (!c->carry)
            die("realloc");
        memcpy(c->carry, buffer + used, c->carry_bytes);
    } else if (c->carry) {
        free(c->carry);
        c->carry = NULL;
    }
    if (since.deliveries + since.replayed > before) {
        if (!since.first_ns)
            since.first_ns = now_ns;
        since.last_ns = now_ns;
    }
}

/* Commands */

static void mark(void)
{
    memset(&since, 0, sizeof since);
    memset(&latency, 0, sizeof latency);
    memset(&latency_in_stall, 0, sizeof latency_in_stall);
    memset(&joins, 0, sizeof joins);
    since.mark_ns = clock_ns(CLOCK_MONOTONIC);
    since.cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    since.waited_ns = runqueue_wait_ns();
}

static void print(const char *name, uint64_t value)
{
    printf(",\"%s\":%llu", name, (unsigned long long)value);
}

static void report(void)
{
    uint64_t lowest = UINT64_MAX, highest = 0;
    for (size_t i = 0; i < (size_t)count * each; i++) {
        lowest = offsets[i] < lowest ? offsets[i] : lowest;
        highest = offsets[i] > highest ? offsets[i] : highest;
    }
    printf("{\"event\":\"report\",\"trouble\":\"%s\"", trouble);
    print("elapsed_ns", clock_ns(CLOCK_MONOTONIC) - since.mark_ns);
    print("deliveries", since.deliveries);
    print("replayed", since.replayed);
    print("bytes", since.bytes);
    print("frames", since.frames);
    print("reads", since.reads);
    print("pings", since.pings);
    print("first_ns", since.first_ns);
    print("last_ns", since.last_ns);
    print("stalls", since.stalls);
    print("longest_stall_ns", since.longest_stall_ns);
    print("stall_sum_ns", since.stall_sum_ns);
    print("cpu_ns", clock_ns(CLOCK_PROCESS_CPUTIME_ID) - since.cpu_ns);
    print("waited_ns", runqueue_wait_ns() - since.waited_ns);
    print("open", open_count);
    print("closed", closed);
    print("errors", errors);
    print("strange", strange);
    print("holes", holes);
    print("duplicates", duplicates);
    print("evicted", evicted);
    print("recovered", recovered);
    print("unrecovered", unrecovered);
    print("lowest", count ? lowest : 0);
    print("highest", highest);
    print_histogram("latency", &latency);
    print_histogram("latency_in_stall", &latency_in_stall);
    print_histogram("joins", &joins);
    printf("}\n");
}

static void obey(const char *line)
{
    unsigned long long n = 0;
    if (sscanf(line, "open %llu", &n) == 1) {
        connections = realloc(connections, (count + n) * sizeof *connections);
        offsets = realloc(offsets, (count + n) * each * sizeof *offsets);
        if (!connections || !offsets)
            die("realloc");
        memset(connections + count, 0, n * sizeof *connections);
        memset(offsets + (size_t)count * each, 0, n * each * sizeof *offsets);
        resuming = false;
        wanted = (unsigned)n;
        answer_ready = true;
    } else if (!strcmp(line, "resume")) {
        resuming = true;
        wanted = count;
        count = 0;
        answer_ready = true;
    } else if (sscanf(line, "await %llu", &n) == 1) {
        since.awaited = n;
    } else if (!strcmp(line, "report")) {
        report();
    } else {
        if (!strcmp(line, "mark")) {
            mark();
        } else if (sscanf(line, "look %llu", &n) == 1) {
            look_us = (unsigned)n;
        } else if (sscanf(line, "pause %llu", &n) == 1) {
            for (paused = 0; paused < n && paused < count; paused++)
                epoll_ctl(poller, EPOLL_CTL_DEL, connections[paused].fd, NULL);
        } else if (!strcmp(line, "unpause")) {
            while (paused)
                if (connections[--paused].state != CLOSED)
                    watch(&connections[paused]);
        } else if (!strcmp(line, "drop")) {
            for (unsigned i = 0; i < count; i++)
                if (connections[i].state != CLOSED)
                    hang_up(&connections[i]);
            open_count = opening = wanted = 0;
        } else {
            fprintf(stderr, "load: unknown command: %s\n", line);
            exit(2);
        }
        printf("{\"event\":\"done\"}\n");
    }
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
            centrifuge = !strcmp(value, "centrifuge");
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

/* A loop that was away for longer than its work or its wait explain was stalled. */
static void look_for_stall(uint64_t from_ns, uint64_t to_ns, uint64_t allowed_ns)
{
    uint64_t gap_ns = to_ns - from_ns;
    if (gap_ns <= allowed_ns + stall_ns)
        return;
    since.stalls++;
    since.stall_sum_ns += gap_ns;
    since.longest_stall_ns = gap_ns > since.longest_stall_ns ? gap_ns : since.longest_stall_ns;
    stall_end_ns = to_ns;
}

int main(int argc, char **argv)
{
    struct epoll_event events[EVENTS];
    struct epoll_event input = {.events = EPOLLIN, .data.u64 = INPUT};
    setvbuf(stdout, NULL, _IOFBF, 1 << 20);
    configure(argc, argv);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(0);
    if (poller < 0 || epoll_ctl(poller, EPOLL_CTL_ADD, 0, &input))
        die("epoll");
    mark();
    for (;;) {
        uint64_t before_ns = clock_ns(CLOCK_MONOTONIC);
        int n = epoll_wait(poller, events, EVENTS, look_us ? 0 : TICK_MS);
        if (!n && look_us)
            usleep(look_us);
        uint64_t woken_ns = clock_ns(CLOCK_MONOTONIC);
        if (n < 0 && errno != EINTR)
            die("epoll_wait");
        look_for_stall(before_ns, woken_ns, look_us ? look_us * 1000ull : TICK_MS * 1000000ull);
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 == INPUT)
                obey_input();
            else if (connections[events[i].data.u64].state != CLOSED)
                readable(&connections[events[i].data.u64]);
        }
        look_for_stall(woken_ns, clock_ns(CLOCK_MONOTONIC), 0);
        begin_more();
        if (since.awaited && since.deliveries + since.replayed >= since.awaited) {
            since.awaited = 0;
            printf("{\"event\":\"reached\",\"messages\":%llu}\n",
                   (unsigned long long)(since.deliveries + since.replayed));
        }
        fflush(stdout);
    }
}
