/* SPDX-License-Identifier: Apache-2.0 */
/*
 * connections.c - who is connected, so that clients which say nothing cannot shut others out: when there are too many
 * connections, the one that has been waiting longest without a request being answered is closed.
 */
#include "http.h"

#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

enum { FEW_LEAVING = 8 }; /* of http.c's LEAVING_CONNECTIONS */

struct serve_connection {
    serve_connection *earlier, *later; /* in the order of their last sign of life */
    int fd;
    bool answering; /* from the end of a request to the end of its answer: not to be closed */
    bool closing;
};

void serve_connections_init(serve_connections *c, unsigned most)
{
    pthread_mutex_init(&c->lock, NULL);
    c->first = c->last = NULL;
    c->count = 0;
    c->most = most;
}

void serve_connections_destroy(serve_connections *c)
{
    pthread_mutex_destroy(&c->lock);
}

static void take_out(serve_connections *c, serve_connection *one)
{
    *(one->earlier != NULL ? &one->earlier->later : &c->first) = one->later;
    *(one->later != NULL ? &one->later->earlier : &c->last) = one->earlier;
}

static void put_last(serve_connections *c, serve_connection *one)
{
    one->earlier = c->last;
    one->later = NULL;
    *(c->last != NULL ? &c->last->later : &c->first) = one;
    c->last = one;
}

/* Whether something has come that its thread has not read yet. */
static bool has_sent(const serve_connection *one)
{
    char first;
    return recv(one->fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

serve_connection *serve_connections_add(serve_connections *c, int fd)
{
    serve_connection *one = calloc(1, sizeof *one);
    if (one == NULL)
        return NULL;
    one->fd = fd;
    pthread_mutex_lock(&c->lock);
    put_last(c, one);
    if (++c->count > c->most) {
        serve_connection *victim = c->first;
        while (victim != NULL && (victim->answering || victim->closing || has_sent(victim)))
            victim = victim->later;
        if (victim != NULL && victim != one) { /* its own thread sees the end of it, and takes it out */
            victim->closing = true;
            shutdown(victim->fd, SHUT_RD); /* reading only: a request that comes at this moment still gets its answer */
        }
    }
    const unsigned leaving = c->count > c->most ? c->count - c->most : 0;
    pthread_mutex_unlock(&c->lock);
    /*
     * This is the thread that accepts, and those that leave need a moment each: beyond a few of them the next client waits in
     * the listening socket's queue, instead of being refused because too many have not left yet.
     */
    if (leaving > FEW_LEAVING)
        usleep(leaving * 1000);
    return one;
}

void serve_connections_alive(serve_connections *c, serve_connection *one, bool answering)
{
    if (one == NULL)
        return;
    pthread_mutex_lock(&c->lock);
    one->answering = answering;
    take_out(c, one);
    put_last(c, one);
    pthread_mutex_unlock(&c->lock);
}

bool serve_connections_closing(serve_connections *c, const serve_connection *one)
{
    if (one == NULL)
        return false;
    pthread_mutex_lock(&c->lock);
    const bool closing = one->closing;
    pthread_mutex_unlock(&c->lock);
    return closing;
}

void serve_connections_remove(serve_connections *c, serve_connection *one)
{
    if (one == NULL)
        return;
    pthread_mutex_lock(&c->lock); /* until here nobody else has got its number */
    take_out(c, one);
    c->count--;
    pthread_mutex_unlock(&c->lock);
    free(one);
}
