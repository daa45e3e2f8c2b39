/* What the parts of the load client share.

   load.c        settings, commands, the loop
   sockets.c     connections: opening, the handshake, frames
   centrifuge.c  what clients of Tidegate and Centrifugo say and are told
   socketio.c    the same of socket.io
   nats.c        the same of NATS
   tally.c       what is counted and what must hold */

#ifndef LOAD_H
#define LOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum state { CLOSED, UPGRADING, JOINING, OPEN };

/* Bytes that wait for the rest of what they begin. */
struct carry {
    unsigned char *bytes;
    size_t size;
};

struct connection {
    int fd;
    enum state state;
    bool resuming;
    unsigned unanswered; /* subscribe commands */
    uint64_t began_ns;
    struct carry frame, stream; /* of a frame; of a protocol that runs across frames */
};

/* What is spoken after the handshake. */
struct protocol {
    const char *name;
    /* The handshake is done; NULL: the connection is open. */
    void (*greet)(struct connection *c);
    /* The data of a text or binary frame came. */
    void (*told)(struct connection *c, const unsigned char *data, size_t size);
};

extern const struct protocol centrifuge, plain, greeted, socketio, nats;

/* load.c: what it was told to do. */
extern int port;
extern const char *path, *prefix;
extern size_t prefix_bytes;
extern unsigned rooms, each, narrow, opening_max;
extern const struct protocol *protocol;
extern char **tokens;
extern unsigned token_count;
extern uint64_t stall_ns;

/* sockets.c */
extern struct connection *connections;
extern unsigned count, wanted, opening, open_count, paused;
extern bool resuming;
extern uint64_t now_ns; /* of what is being read */

void open_poller(void);
bool take_arrivals(unsigned look_us);
void make_room_for(unsigned more);
void begin_more(void);
void opened(struct connection *c);
void lost(struct connection *c, const char *why);
void transmit_frame(struct connection *c, unsigned opcode, const void *bytes, size_t size);
void keep(struct carry *carry, const unsigned char *bytes, size_t size);
void pause_first(unsigned n);
void unpause(void);
void drop(void);
/* The number of the connection's subscription j. */
unsigned room_of(const struct connection *c, unsigned j);
uint64_t *offset_of(const struct connection *c, unsigned j);

/* centrifuge.c: a message as it stands in each protocol. */
void told_push(struct connection *c, const unsigned char *line, const unsigned char *end);

/* tally.c */
struct since {
    uint64_t deliveries, replayed, bytes, frames, reads, pings;
    uint64_t mark_ns, first_ns, last_ns, awaited;
    uint64_t stalls, longest_stall_ns, stall_sum_ns, cpu_ns, waited_ns;
};
struct violations {
    uint64_t holes, duplicates, strange, errors, closed, evicted, recovered, unrecovered;
};
extern struct since since;           /* the mark */
extern struct violations violations; /* and what is counted beside them, for ever */

void mark(void);
void report(void);
void came(uint64_t sent_ns);
void joined(uint64_t took_ns);
void follow(uint64_t *last, uint64_t offset, const unsigned char *line, size_t bytes);
void not_expected(const unsigned char *what, size_t bytes);
void note(const char *what, const unsigned char *text, size_t bytes);
void look_for_stall(uint64_t from_ns, uint64_t to_ns, uint64_t allowed_ns);
uint64_t monotonic_ns(void);
void die(const char *what) __attribute__((noreturn));

#endif
