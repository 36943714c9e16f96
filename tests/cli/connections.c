/* SPDX-License-Identifier: Apache-2.0 */
/*
 * connections.c - which connection of akv serve is closed when there are too many, above real sockets: the one that has been
 * silent longest, never one that is being answered or has sent something that nobody has read yet; and a request that
 * comes at the very moment of closing still gets its answer.
 */
#include "cli/serve/http.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int failures;

#define CHECK(condition)                                                          \
    do {                                                                          \
        if (!(condition)) {                                                       \
            printf("FAILED, line %d: %s\n", __LINE__, #condition);                \
            failures++;                                                           \
        }                                                                         \
    } while (0)

typedef struct pair {
    int client, server;
    serve_connection *one;
} pair;

static pair open_pair(int listener, serve_connections *c)
{
    struct sockaddr_in at;
    socklen_t bytes = sizeof at;
    pair p = {socket(AF_INET, SOCK_STREAM, 0), -1, NULL};
    struct timeval patience = {20, 0};
    if (getsockname(listener, (struct sockaddr *)&at, &bytes) != 0 || connect(p.client, (struct sockaddr *)&at, sizeof at) != 0)
        exit(1);
    p.server = accept(listener, NULL, NULL);
    setsockopt(p.client, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    p.one = serve_connections_add(c, p.server);
    return p;
}

static void close_pair(serve_connections *c, pair *p)
{
    serve_connections_remove(c, p->one);
    close(p->server);
    close(p->client);
}

/* What the server reads now: bytes, 0 when it was told to close, -1 when there is nothing yet. */
static long arrived(const pair *p)
{
    char text[64];
    return (long)recv(p->server, text, sizeof text, MSG_DONTWAIT);
}

static void say(const pair *p, const char *text)
{
    char seen;
    CHECK(send(p->client, text, strlen(text), MSG_NOSIGNAL) == (long)strlen(text));
    CHECK(recv(p->server, &seen, 1, MSG_PEEK) == 1); /* it is there */
}

int main(void)
{
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    serve_connections c;
    pair p[6];
    char answer[8] = "";
    if (listener < 0 || bind(listener, (struct sockaddr *)&at, sizeof at) != 0 || listen(listener, 8) != 0)
        return 1;
    serve_connections_init(&c, 3);
    for (int i = 0; i < 3; i++)
        p[i] = open_pair(listener, &c);
    serve_connections_alive(&c, p[0].one, true); /* being answered, and so the youngest sign of life */
    serve_connections_alive(&c, p[1].one, false);
    serve_connections_alive(&c, p[2].one, false);
    say(&p[1], "GET"); /* the longest silent one but for what has just come */

    p[3] = open_pair(listener, &c);
    CHECK(arrived(&p[2]) == 0); /* so it is this one's turn */
    CHECK(arrived(&p[0]) == -1 && arrived(&p[1]) == 3 && arrived(&p[3]) == -1);

    CHECK(serve_connections_closing(&c, p[2].one) && !serve_connections_closing(&c, p[1].one));

    /* its request comes now: it is read and answered all the same */
    say(&p[2], "GET /");
    CHECK(arrived(&p[2]) == 5);
    serve_connections_alive(&c, p[2].one, true);
    CHECK(send(p[2].server, "200 OK", 6, MSG_NOSIGNAL) == 6);
    CHECK(recv(p[2].client, answer, sizeof answer, 0) == 6 && memcmp(answer, "200 OK", 6) == 0);
    serve_connections_alive(&c, p[2].one, false);
    CHECK(arrived(&p[2]) == 0);

    p[4] = open_pair(listener, &c); /* now 1, which has been read */
    CHECK(arrived(&p[1]) == 0 && arrived(&p[3]) == -1 && arrived(&p[4]) == -1);
    close_pair(&c, &p[1]);
    close_pair(&c, &p[2]);
    p[5] = open_pair(listener, &c); /* four again: 0 is being answered, 3 goes */
    CHECK(arrived(&p[0]) == -1 && arrived(&p[3]) == 0 && arrived(&p[4]) == -1 && arrived(&p[5]) == -1);
    close_pair(&c, &p[0]);
    for (int i = 3; i < 6; i++)
        close_pair(&c, &p[i]);
    CHECK(c.count == 0 && c.first == NULL && c.last == NULL);
    serve_connections_destroy(&c);
    close(listener);
    puts(failures == 0 ? "connections: as they should be" : "connections: failed");
    return failures != 0;
}
