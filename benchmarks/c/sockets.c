/* The connections: opening and closing them, the WebSocket handshake, frames. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "load.h"
#include "text.h"

enum {
    READ_BYTES = 256 * 1024,
    BUFFER_BYTES = 8 * 1024 * 1024,
    NARROW_BYTES = 4096,
    EVENTS = 512,
    TICK_MS = 2,
};

#define INPUT UINT64_MAX /* in place of a connection's number */

struct connection *connections;
unsigned count, wanted, opening, open_count, paused;
bool resuming;
uint64_t now_ns;

static uint64_t *offsets; /* of each subscription, the last that came */
static int poller;
static unsigned char buffer[BUFFER_BYTES];

unsigned room_of(const struct connection *c, unsigned j)
{
    return (unsigned)(((uint64_t)(c - connections) * each + j) % rooms);
}

uint64_t *offset_of(const struct connection *c, unsigned j)
{
    return &offsets[(size_t)(c - connections) * each + j];
}

void make_room_for(unsigned more)
{
    size_t all = (size_t)count + more;
    connections = realloc(connections, all * sizeof *connections);
    offsets = realloc(offsets, all * each * sizeof *offsets);
    if (!connections || !offsets)
        die("realloc");
    memset(connections + count, 0, more * sizeof *connections);
    memset(offsets + (size_t)count * each, 0, (size_t)more * each * sizeof *offsets);
}

void keep(struct carry *carry, const unsigned char *bytes, size_t size)
{
    carry->size = size;
    if (size) {
        carry->bytes = realloc(carry->bytes, size);
        if (!carry->bytes)
            die("realloc");
        memcpy(carry->bytes, bytes, size);
    } else if (carry->bytes) {
        free(carry->bytes);
        carry->bytes = NULL;
    }
}

/* Sending */

static void transmit(struct connection *c, const void *bytes, size_t size)
{
    if (send(c->fd, bytes, size, MSG_NOSIGNAL) != (ssize_t)size) {
        violations.errors++;
        note("send failed", (const unsigned char *)strerror(errno), strlen(strerror(errno)));
    }
}

/* A masked frame; a mask of zeros leaves the bytes as they are. */
void transmit_frame(struct connection *c, unsigned opcode, const void *bytes, size_t size)
{
    static unsigned char frame[65536 + 8];
    size_t head = 2;
    if (size > 65535)
        die("a command is too long");
    frame[0] = (unsigned char)(0x80 | opcode);
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

/* Opening and closing */

/* An arrival is told once, not until all is read: the kernel need not look again at each wait. What
   a full read left behind is asked for by watching anew. */
static void watch(const struct connection *c, int how)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET, .data.u64 = (uint64_t)(c - connections)};
    if (epoll_ctl(poller, how, c->fd, &event))
        die("epoll_ctl");
}

static void hang_up(struct connection *c)
{
    struct linger now = {1, 0};
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &now, sizeof now); /* leaves no TIME_WAIT */
    close(c->fd);
    c->state = CLOSED;
    keep(&c->frame, NULL, 0);
    keep(&c->stream, NULL, 0);
}

void lost(struct connection *c, const char *why)
{
    if (c->state == OPEN)
        open_count--;
    else
        opening--;
    violations.closed++;
    note("closed", (const unsigned char *)why, strlen(why));
    hang_up(c);
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
    c->began_ns = monotonic_ns();
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address))
        die("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->state = UPGRADING;
    c->resuming = resuming;
    opening++;
    watch(c, EPOLL_CTL_ADD);
    transmit(c, request, (size_t)snprintf(request, sizeof request, form, path, port));
}

void begin_more(void)
{
    for (; wanted && opening < opening_max; count++, wanted--)
        begin(&connections[count]);
}

void opened(struct connection *c)
{
    c->state = OPEN;
    opening--;
    open_count++;
    joined(now_ns - c->began_ns);
}

void pause_first(unsigned n)
{
    for (paused = 0; paused < n && paused < count; paused++)
        epoll_ctl(poller, EPOLL_CTL_DEL, connections[paused].fd, NULL);
}

void unpause(void)
{
    while (paused)
        if (connections[--paused].state != CLOSED)
            watch(&connections[paused], EPOLL_CTL_ADD);
}

void drop(void)
{
    for (unsigned i = 0; i < count; i++)
        if (connections[i].state != CLOSED)
            hang_up(&connections[i]);
    open_count = opening = wanted = 0;
}

/* Receiving */

static void told_close(struct connection *c, const unsigned char *data, size_t size)
{
    char why[160];
    snprintf(why, sizeof why, "close frame %u %.*s", size >= 2 ? (unsigned)data[0] << 8 | data[1] : 0,
             size > 2 ? (int)size - 2 : 0, (const char *)data + 2);
    lost(c, why);
}

/* Takes the frames that are complete; gives the number of bytes that they had. */
static size_t take_frames(struct connection *c, const unsigned char *p, size_t bytes)
{
    const unsigned char *start = p, *end = p + bytes;
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
        since.frames++;
        switch (p[0]) {
        case 0x81:
        case 0x82:
            protocol->told(c, p + head, size);
            break;
        case 0x88:
            told_close(c, p + head, size);
            break;
        case 0x89:
            transmit_frame(c, 10, p + head, size);
            break;
        default:
            violations.strange++;
            note("not expected: a frame", p, head);
        }
        if (c->state == CLOSED)
            return bytes;
        p += head + size;
    }
    return (size_t)(p - start);
}

static size_t take_upgrade(struct connection *c, const unsigned char *p, size_t bytes)
{
    const unsigned char *end = find(p, p + bytes, "\r\n\r\n");
    if (!end)
        return 0;
    if (memcmp(p, "HTTP/1.1 101 ", 13) || !find(p, end + 2, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n")) {
        note("no handshake", p, (size_t)(end - p));
        lost(c, "no handshake");
        return bytes;
    }
    c->state = JOINING;
    if (protocol->greet)
        protocol->greet(c);
    else
        opened(c);
    size_t head = (size_t)(end + 4 - p);
    return head + take_frames(c, p + head, bytes - head);
}

/* One read. Whether there may be more. */
static bool take(struct connection *c)
{
    size_t have = c->frame.size;
    if (have)
        memcpy(buffer, c->frame.bytes, have);
    size_t limit = BUFFER_BYTES - have < READ_BYTES ? BUFFER_BYTES - have : READ_BYTES;
    ssize_t got = recv(c->fd, buffer + have, limit, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return errno == EINTR;
    if (got <= 0) {
        lost(c, got ? strerror(errno) : "end of stream");
        return false;
    }
    now_ns = monotonic_ns();
    since.bytes += (uint64_t)got;
    since.reads++;
    size_t all = have + (size_t)got;
    size_t used = c->state == UPGRADING ? take_upgrade(c, buffer, all) : take_frames(c, buffer, all);
    if (c->state == CLOSED)
        return false;
    if (used < all || have)
        keep(&c->frame, buffer + used, all - used);
    return (size_t)got == limit;
}

/* Takes what has come, of each connection one read at a time: none waits for a busy one. Whether
   there is something on standard input. */
bool take_arrivals(unsigned look_us)
{
    bool input = false;
    static struct epoll_event events[EVENTS];
    uint64_t before_ns = monotonic_ns();
    int n = epoll_wait(poller, events, EVENTS, look_us ? 0 : TICK_MS);
    if (!n && look_us)
        usleep(look_us);
    uint64_t woken_ns = monotonic_ns();
    if (n < 0 && errno != EINTR)
        die("epoll_wait");
    look_for_stall(before_ns, woken_ns, look_us ? look_us * 1000ull : TICK_MS * 1000000ull);
    for (int i = 0; i < n; i++) {
        if (events[i].data.u64 == INPUT) {
            input = true;
            continue;
        }
        struct connection *c = &connections[events[i].data.u64];
        if (c->state == CLOSED)
            continue;
        bool more = take(c);
        /* The end has come with the data, and is not told again. */
        if (c->state != CLOSED && (more || events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)))
            watch(c, EPOLL_CTL_MOD);
    }
    look_for_stall(woken_ns, monotonic_ns(), 0);
    return input;
}

void open_poller(void)
{
    struct epoll_event input = {.events = EPOLLIN, .data.u64 = INPUT};
    poller = epoll_create1(0);
    if (poller < 0 || epoll_ctl(poller, EPOLL_CTL_ADD, 0, &input))
        die("epoll");
}
