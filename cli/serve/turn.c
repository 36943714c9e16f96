/* SPDX-License-Identifier: Apache-2.0 */
/* turn.c - one computation at a time, in the order of asking. */
#include "serve.h"

void serve_turn_init(serve_turn *turn)
{
    pthread_mutex_init(&turn->lock, NULL);
    pthread_cond_init(&turn->changed, NULL);
    turn->next = turn->now = 0;
}

void serve_turn_destroy(serve_turn *turn)
{
    pthread_cond_destroy(&turn->changed);
    pthread_mutex_destroy(&turn->lock);
}

void serve_turn_take(serve_turn *turn)
{
    pthread_mutex_lock(&turn->lock);
    const uint64_t mine = turn->next++;
    while (turn->now != mine)
        pthread_cond_wait(&turn->changed, &turn->lock);
    pthread_mutex_unlock(&turn->lock);
}

void serve_turn_give(serve_turn *turn)
{
    pthread_mutex_lock(&turn->lock);
    turn->now++;
    pthread_cond_broadcast(&turn->changed);
    pthread_mutex_unlock(&turn->lock);
}

void serve_turn_yield(serve_turn *turn)
{
    pthread_mutex_lock(&turn->lock);
    const bool wanted = turn->next > turn->now + 1; /* besides the caller, whose turn it is */
    pthread_mutex_unlock(&turn->lock);
    if (wanted) {
        serve_turn_give(turn);
        serve_turn_take(turn);
    }
}
