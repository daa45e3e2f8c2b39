/* The floor: one thread that calls send() with the same bytes for each of its sockets.

   Prints {"port":N} and listens there. On standard input:
     accept N      take N WebSocket connections; answered by {"event":"accepted"}
     send BYTES    so many bytes follow the line; they are sent to every socket */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

static const char UPGRADED[] = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n"
                               "Connection: Upgrade\r\n"
                               "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static int accept_one(int listener)
{
    char request[4096];
    size_t held = 0;
    int one = 1, fd = accept(listener, NULL, NULL);
    if (fd < 0)
        die("accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    do {
        ssize_t got = recv(fd, request + held, sizeof request - held, 0);
        if (got <= 0)
            die("handshake");
        held += (size_t)got;
    } while (!memmem(request, held, "\r\n\r\n", 4));
    if (send(fd, UPGRADED, sizeof UPGRADED - 1, MSG_NOSIGNAL) < 0)
        die("send");
    return fd;
}

static void send_to_all(const int *sockets, size_t count, const char *bytes, size_t size)
{
    for (size_t i = 0; i < count; i++) {
        size_t sent = 0;
        while (sent < size) {
            ssize_t n = send(sockets[i], bytes + sent, size - sent, MSG_NOSIGNAL);
            if (n < 0)
                die("send");
            sent += (size_t)n;
        }
    }
}

int main(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, length) || listen(listener, 1024) ||
        getsockname(listener, (struct sockaddr *)&address, &length))
        die("listen");
    printf("{\"port\":%d}\n", ntohs(address.sin_port));
    fflush(stdout);

    int *sockets = NULL;
    char line[64], *bytes = NULL;
    size_t count = 0, n;
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "accept %zu", &n) == 1) {
            sockets = realloc(sockets, (count + n) * sizeof *sockets);
            if (!sockets)
                die("realloc");
            while (n--)
                sockets[count++] = accept_one(listener);
            printf("{\"event\":\"accepted\"}\n");
            fflush(stdout);
        } else if (sscanf(line, "send %zu", &n) == 1) {
            bytes = realloc(bytes, n);
            if (!bytes || fread(bytes, 1, n, stdin) != n)
                die("standard input");
            send_to_all(sockets, count, bytes, n);
        } else {
            fprintf(stderr, "floor: unknown command: %s", line);
            return 2;
        }
    }
    return 0;
}
