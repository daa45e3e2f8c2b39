/* NATS over WebSocket: the bytes of its TCP protocol, in frames that end anywhere.

   Facts: "Client Protocol" and "WebSocket support" of the documentation of NATS. A line ends with
   CR LF; the payload of MSG follows its line, with CR LF behind. */

#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "load.h"
#include "text.h"

enum { BINARY = 2 };

/* A PONG comes when all before it are in force. */
static void greet(struct connection *c)
{
    static char text[65536];
    int n = snprintf(text, sizeof text, "CONNECT {\"verbose\":false,\"pedantic\":false,\"name\":\"load\"}\r\n");
    for (unsigned j = 0; j < each && n < (int)sizeof text; j++)
        n += snprintf(text + n, sizeof text - (size_t)n, "SUB %s%u %u\r\n", prefix, room_of(c, j), j + 1);
    if (n < (int)sizeof text)
        n += snprintf(text + n, sizeof text - (size_t)n, "PING\r\n");
    if (n >= (int)sizeof text)
        die("too many rooms for one frame");
    transmit_frame(c, BINARY, text, (size_t)n);
}

/* The size at the end of `MSG subject sid size`. */
static bool payload_size(const unsigned char *line, const unsigned char *end, uint64_t *size)
{
    const unsigned char *space = memrchr(line, ' ', (size_t)(end - line));
    return space && number_at(space + 1, end, size) == end;
}

static void told_line(struct connection *c, const unsigned char *line, const unsigned char *end)
{
    if (begins(line, end, "PING")) {
        since.pings++;
        transmit_frame(c, BINARY, "PONG\r\n", 6);
    } else if (begins(line, end, "PONG")) {
        if (c->state == JOINING)
            opened(c);
    } else if (begins(line, end, "-ERR")) {
        violations.errors++;
        note("refused", line, (size_t)(end - line));
    } else if (!begins(line, end, "INFO ")) {
        not_expected(line, (size_t)(end - line));
    }
}

/* Takes what is complete; gives the number of bytes that it had. */
static size_t take(struct connection *c, const unsigned char *p, size_t size)
{
    const unsigned char *start = p, *end = p + size;
    while (p < end) {
        const unsigned char *line = p, *feed = memchr(p, '\n', (size_t)(end - p));
        uint64_t bytes = 0;
        if (!feed)
            break;
        if (!begins(line, feed, "MSG ")) {
            told_line(c, line, feed - 1);
            p = feed + 1;
            continue;
        }
        if (!payload_size(line, feed - 1, &bytes)) {
            not_expected(line, (size_t)(feed - line));
            p = feed + 1;
            continue;
        }
        if ((uint64_t)(end - feed - 1) < bytes + 2)
            break;
        told_push(c, feed + 1, feed + 1 + bytes);
        p = feed + 1 + bytes + 2;
    }
    return (size_t)(p - start);
}

static void told(struct connection *c, const unsigned char *data, size_t size)
{
    if (!c->stream.size) {
        size_t used = take(c, data, size);
        keep(&c->stream, data + used, size - used);
        return;
    }
    static unsigned char joined[1 << 24];
    size_t have = c->stream.size;
    if (have + size > sizeof joined) {
        lost(c, "a message is too large");
        return;
    }
    memcpy(joined, c->stream.bytes, have);
    memcpy(joined + have, data, size);
    size_t used = take(c, joined, have + size);
    keep(&c->stream, joined + used, have + size - used);
}

const struct protocol nats = {"nats", greet, told};
