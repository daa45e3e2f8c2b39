/* The Centrifuge protocol in JSON, and servers that only send messages of this form.

   plain    a connection is open after its handshake
   greeted  it is open when the server has said {} */

#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "load.h"
#include "text.h"

enum { EPOCH_BYTES = 64, TAIL_BYTES = 128 };

static char epoch[EPOCH_BYTES];

/* Connect and all subscriptions in one frame, as SDKs send them. */
static void greet(struct connection *c)
{
    static char text[65536];
    unsigned index = (unsigned)(c - connections);
    int n = snprintf(text, sizeof text, "{\"id\":1,\"connect\":{\"token\":\"%s\",\"name\":\"load\"}}",
                     token_count ? tokens[index % token_count] : "");
    for (unsigned j = 0; j < each && n < (int)sizeof text; j++) {
        n += snprintf(text + n, sizeof text - (size_t)n, "\n{\"id\":%u,\"subscribe\":{\"channel\":\"%s%u\"",
                      j + 2, prefix, room_of(c, j));
        if (c->resuming && n < (int)sizeof text)
            n += snprintf(text + n, sizeof text - (size_t)n, ",\"recover\":true,\"offset\":%llu,\"epoch\":\"%s\"",
                          (unsigned long long)*offset_of(c, j), epoch);
        if (n < (int)sizeof text)
            n += snprintf(text + n, sizeof text - (size_t)n, "}}");
    }
    if (n >= (int)sizeof text)
        die("too many rooms for one frame");
    c->unanswered = each;
    transmit_frame(c, 1, text, (size_t)n);
}

static void await_greeting(struct connection *c)
{
    c->unanswered = 1;
}

void told_push(struct connection *c, const unsigned char *line, const unsigned char *end)
{
    static const char head[] = "{\"push\":{\"channel\":\"", middle[] = "\",\"pub\":{\"data\":{\"t\":";
    const unsigned char *p = line + sizeof head - 1, *tail = end - line > TAIL_BYTES ? end - TAIL_BYTES : line;
    uint64_t room = 0, sent_ns = 0, offset = 0;
    if (end - p < (ptrdiff_t)prefix_bytes || memcmp(p, prefix, prefix_bytes))
        goto odd;
    p = number_at(p + prefix_bytes, end, &room);
    if (end - p < (ptrdiff_t)sizeof middle || memcmp(p, middle, sizeof middle - 1))
        goto odd;
    number_at(p + sizeof middle - 1, end, &sent_ns);
    if (!number_after(tail, end, ",\"offset\":", &offset))
        goto odd;
    unsigned j = (unsigned)((room + rooms - room_of(c, 0)) % rooms);
    if (j >= each)
        goto odd;
    follow(offset_of(c, j), offset, line, (size_t)(end - line));
    came(sent_ns);
    return;
odd:
    if (find(line, end, "\"unsubscribe\":{")) {
        violations.evicted++;
        note("not expected", line, (size_t)(end - line));
    } else {
        not_expected(line, (size_t)(end - line));
    }
}

static void answered(struct connection *c)
{
    if (c->state == JOINING && !--c->unanswered)
        opened(c);
}

static void told_subscribed(struct connection *c, uint64_t id, const unsigned char *line, const unsigned char *end)
{
    const unsigned char *past = find(line, end, "\"publications\":["), *head_end = past ? past : end, *p, *value;
    uint64_t start = 0, offset, *last;
    if (id < 2 || id - 2 >= each || !find(line, head_end, "\"subscribe\":{")) {
        not_expected(line, (size_t)(end - line));
        return;
    }
    number_after(line, head_end, "\"offset\":", &start); /* Centrifugo leaves out a zero */
    last = offset_of(c, (unsigned)id - 2);
    value = find(line, end, "\"epoch\":\"");
    if (value) {
        const unsigned char *stop = memchr(value + 9, '"', (size_t)(end - value - 9));
        snprintf(epoch, sizeof epoch, "%.*s", stop ? (int)(stop - value - 9) : 0, value + 9);
    }
    if (c->resuming) {
        if (find(line, head_end, "\"recovered\":true") && start == *last) {
            violations.recovered++;
        } else {
            violations.unrecovered++;
            note("not recovered", line, (size_t)(end - line));
        }
    }
    *last = start;
    for (p = past; (p = number_after(p, end, ",\"offset\":", &offset));) {
        follow(last, offset, line, (size_t)(end - line));
        if (!since.first_ns)
            since.first_ns = now_ns;
        since.last_ns = now_ns;
        since.replayed++;
    }
    answered(c);
}

static void told_error(struct connection *c, uint64_t id, const unsigned char *line, const unsigned char *end)
{
    violations.errors++;
    note("refused", line, (size_t)(end - line));
    /* An answer it is: nobody waits for another. */
    if (id > 1)
        answered(c);
}

static void told_line(struct connection *c, const unsigned char *line, const unsigned char *end)
{
    uint64_t id = 0;
    if (end - line > 20 && !memcmp(line, "{\"push\":{", 9)) {
        told_push(c, line, end);
    } else if (end - line == 2) {
        if (protocol == &greeted && c->state == JOINING) {
            answered(c);
            return;
        }
        since.pings++;
        transmit_frame(c, 1, "{}", 2);
    } else if (!number_after(line, end, "{\"id\":", &id) || find(line, end, "\"error\":{")) {
        told_error(c, id, line, end);
    } else if (id != 1) {
        told_subscribed(c, id, line, end);
    }
}

static void told(struct connection *c, const unsigned char *line, size_t size)
{
    const unsigned char *last = line + size, *next;
    for (; line < last; line = next + 1) {
        next = memchr(line, '\n', (size_t)(last - line));
        if (!next)
            next = last;
        told_line(c, line, next);
    }
}

const struct protocol centrifuge = {"centrifuge", greet, told};
const struct protocol plain = {"plain", NULL, told};
const struct protocol greeted = {"greeted", await_greeting, told};
