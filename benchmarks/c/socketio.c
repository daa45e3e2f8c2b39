/* socket.io 4 on engine.io 4, over WebSocket from the start.

   Facts: engine.io-protocol and socket.io-protocol, both of the repository socketio/socket.io. A
   frame is an engine.io packet, its type the first character: 0 open, 2 ping, 3 pong, 4 message. A
   message is a socket.io packet: 0 connect, 1 disconnect, 2 event, 4 connect error. */

#define _GNU_SOURCE
#include "load.h"
#include "text.h"

static void greet(struct connection *c)
{
    c->unanswered = 1; /* what the server says first */
}

static void told(struct connection *c, const unsigned char *data, size_t size)
{
    static const char event[] = "42[\"news\",";
    const unsigned char *end = data + size;
    if (begins(data, end, event) && end[-1] == ']') {
        told_push(c, data + sizeof event - 1, end - 1);
    } else if (begins(data, end, "0{") && c->state == JOINING) {
        transmit_frame(c, 1, "40", 2);
    } else if (begins(data, end, "40") && c->state == JOINING) {
        opened(c);
    } else if (size == 1 && *data == '2') {
        since.pings++;
        transmit_frame(c, 1, "3", 1);
    } else {
        not_expected(data, size);
    }
}

const struct protocol socketio = {"socketio", greet, told};
