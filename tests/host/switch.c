/* SPDX-License-Identifier: Apache-2.0 */
/*
 * switch.c - several conversations in turn in one context B answer as each does alone; hosts beside each other share a
 * model.
 *
 * usage: switch SCRATCH-FOLDER
 */
#include "common.h"
#include "tiny_models.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

enum { CONVERSATIONS = 3, ROUNDS = 9, DOCUMENT = 300, REST = 160, CELLS = 64, BATCH = 64 };
static const size_t g_chunks[ROUNDS] = {20, 1, 1, 33, 1, 50, 1, 7, 40}; /* tails move into segments on the way */

typedef struct setting {
    akv_llama *host;
    akv_llama_store *stores[2];
    int32_t *rest[CONVERSATIONS];
    float *expected[CONVERSATIONS][ROUNDS];
} setting;

/* Conversations 0 and 1 are about document 0. */
static akv_llama_store *document_of(const setting *s, int c)
{
    return s->stores[c / 2];
}

static float *copy_logits(const akv_llama *host)
{
    float *copy = malloc(TINY_VOCAB * sizeof *copy);
    CHECK(copy && akv_llama_logits(host, -1), "no logits");
    return memcpy(copy, akv_llama_logits(host, -1), TINY_VOCAB * sizeof *copy);
}

static double distance(const float *a, const float *b)
{
    double most = 0.0;
    for (int i = 0; i < TINY_VOCAB; i++)
        most = fmax(most, fabs((double)a[i] - b[i]));
    return most;
}

static size_t chunk_start(int round)
{
    size_t at = 0;
    for (int r = 0; r < round; r++)
        at += g_chunks[r];
    return at;
}

static void say(akv_llama *host, const int32_t *rest, int round)
{
    CHECK_OK(akv_llama_decode(host, rest + chunk_start(round), g_chunks[round], AKV_LLAMA_LOGITS_LAST, diag));
}

static void prepare(setting *s, const char *path)
{
    memset(s, 0, sizeof *s);
    s->host = open_host(path, CELLS, BATCH);
    akv_llama_options options;
    akv_llama_options_init(&options);
    options.num_threads = 2;
    options.tail_cells = CELLS;
    options.batch_tokens = BATCH;
    akv_llama *reader = NULL;
    CHECK_OK(akv_llama_open_beside(s->host, &options, &reader, diag));
    for (uint64_t d = 0; d < 2; d++) {
        int32_t *document = random_tokens(DOCUMENT + 37 * d, TINY_VOCAB, 100 + d);
        s->stores[d] = host_exactly(reader, document, DOCUMENT + 37 * d);
        free(document);
    }
    akv_llama_close(reader); /* the model stays for the other host */
    for (int c = 0; c < CONVERSATIONS; c++) {
        s->rest[c] = random_tokens(REST, TINY_VOCAB, 7 + (uint64_t)c);
        CHECK_OK(akv_llama_attach(s->host, document_of(s, c), diag));
        for (int r = 0; r < ROUNDS; r++) {
            say(s->host, s->rest[c], r);
            s->expected[c][r] = copy_logits(s->host);
        }
    }
}

static void finish(setting *s)
{
    for (int c = 0; c < CONVERSATIONS; c++) {
        free(s->rest[c]);
        for (int r = 0; r < ROUNDS; r++)
            free(s->expected[c][r]);
    }
    akv_llama_close(s->host);
    akv_llama_store_release(s->stores[0]);
    akv_llama_store_release(s->stores[1]);
}

static void test_in_turn(setting *s, const char *name)
{
    akv_llama_conversation *c[CONVERSATIONS];
    double most = 0.0, least_other = INFINITY;
    for (int i = 0; i < CONVERSATIONS; i++)
        CHECK_OK(akv_llama_conversation_create(s->host, document_of(s, i), &c[i], diag));
    for (int r = 0; r < ROUNDS; r++)
        for (int k = 0; k < CONVERSATIONS; k++) {
            const int i =
                (k + r) % CONVERSATIONS; /* the one that comes last comes first in the next round: no switch there */
            CHECK_OK(akv_llama_switch(s->host, c[i], diag));
            CHECK(!akv_llama_logits(s->host, -1) || (r > 0 && k == 0), "logits of another conversation");
            say(s->host, s->rest[i], r);
            float *logits = copy_logits(s->host);
            most = fmax(most, distance(logits, s->expected[i][r]));
            least_other = fmin(least_other, distance(logits, s->expected[(i + 1) % CONVERSATIONS][r]));
            free(logits);
            CHECK(akv_llama_conversation_bytes(c[i]) == 0, "the conversation in B counts as set aside");
        }
    printf("%s: largest difference of a logit to the same conversation alone %.3g, to another one at least %.3g\n",
           name, most, least_other);
    CHECK(most < 1e-4, "%g", most);
    CHECK(least_other > 1e-2, "%g: the control does not differ", least_other);

    /* something else is attached in between; then all go on, and give the same again after a rewind */
    CHECK_OK(akv_llama_attach(s->host, s->stores[1], diag));
    say(s->host, s->rest[0], 0);
    for (int i = 0; i < CONVERSATIONS; i++) {
        CHECK(akv_llama_conversation_bytes(c[i]) > 0, "nothing set aside");
        CHECK(akv_llama_conversation_segment_bytes(c[i]) > 0, "no segments of its own after %d tokens", REST);
        CHECK_OK(akv_llama_switch(s->host, c[i], diag));
        CHECK(akv_llama_next_position(s->host) == DOCUMENT + 37 * (i / 2) + (int32_t)chunk_start(ROUNDS), "position %d",
              akv_llama_next_position(s->host));
        CHECK_OK(akv_llama_rewind(s->host, diag));
        say(s->host, s->rest[i], 0);
        CHECK(distance(akv_llama_logits(s->host, -1), s->expected[i][0]) < 1e-4, "after a rewind");
    }
    akv_llama_conversation_free(c[2]); /* the one in B */
    CHECK(akv_llama_next_position(s->host) == -1, "something is left in B");
    CHECK_FAILS(akv_llama_decode(s->host, s->rest[0], 1, AKV_LLAMA_LOGITS_LAST, diag), AKV_E_BAD_STATE, "no document");
    akv_llama_conversation_free(c[0]);
    CHECK_OK(akv_llama_switch(s->host, c[1], diag));
    say(s->host, s->rest[1], 1);
    CHECK(distance(akv_llama_logits(s->host, -1), s->expected[1][1]) < 1e-4, "after the others were freed");
    CHECK_OK(akv_llama_detach(s->host, diag));
    akv_llama_conversation_free(c[1]);
}

typedef struct beside {
    const setting *s;
    akv_llama *host;
    int number;
    double most;
} beside;

static void *talk(void *opaque)
{
    beside *b = opaque;
    for (int r = 0; r < ROUNDS; r++) {
        say(b->host, b->s->rest[b->number], r);
        b->most = fmax(b->most, distance(akv_llama_logits(b->host, -1), b->s->expected[b->number][r]));
    }
    return NULL;
}

static void test_beside(setting *s)
{
    akv_llama_options options;
    akv_llama_options_init(&options);
    options.num_threads = 1;
    options.tail_cells = CELLS;
    options.batch_tokens = BATCH;
    beside b[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        b[i] = (beside){.s = s, .number = i};
        CHECK_OK(akv_llama_open_beside(s->host, &options, &b[i].host, diag));
        CHECK_OK(akv_llama_attach(b[i].host, document_of(s, i), diag));
    }
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, talk, &b[i]) == 0, "no thread");
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        CHECK(b[i].most < 1e-4, "host %d at the same time as another: %g", i, b[i].most);
    }
    akv_llama_conversation *c = NULL;
    CHECK_OK(akv_llama_conversation_create(b[0].host, s->stores[0], &c, diag));
    CHECK_OK(akv_llama_switch(b[0].host, c, diag));
    CHECK_FAILS(akv_llama_switch(b[1].host, c, diag), AKV_E_BAD_STATE, "another host");
    akv_llama_close(b[0].host); /* sets it aside */
    CHECK_OK(akv_llama_switch(b[1].host, c, diag));
    say(b[1].host, s->rest[0], 0);
    CHECK(distance(akv_llama_logits(b[1].host, -1), s->expected[0][0]) < 1e-4, "in another host");
    akv_llama_conversation_free(c);
    akv_llama_close(b[1].host);
}

static void test_refusals(setting *s, const char *folder)
{
    akv_llama_conversation *c = NULL;
    char path[4096];
    CHECK_FAILS(akv_llama_conversation_create(s->host, NULL, &c, diag), AKV_E_INVALID_ARGUMENT, "NULL");
    CHECK_FAILS(akv_llama_switch(s->host, NULL, diag), AKV_E_INVALID_ARGUMENT, "NULL");
    CHECK_FAILS(akv_llama_open_beside(NULL, NULL, NULL, diag), AKV_E_INVALID_ARGUMENT, "NULL");
    snprintf(path, sizeof path, "%s/switch-other.gguf", folder);
    tiny_model_write(tiny_model_find("qwen2"), path);
    akv_llama *other = open_host(path, CELLS, BATCH);
    CHECK_FAILS(akv_llama_conversation_create(other, s->stores[0], &c, diag), AKV_E_MISMATCH, "");
    CHECK_OK(akv_llama_conversation_create(s->host, s->stores[0], &c, diag));
    CHECK_FAILS(akv_llama_switch(other, c, diag), AKV_E_MISMATCH, "");
    akv_llama_conversation_free(c);
    akv_llama_conversation_free(NULL);
    akv_llama_close(other);
    remove(path);
}

int main(int argc, char **argv)
{
    static const char *const models[] = {"llama", "gemma3", "hybrid"};
    CHECK(argc == 2, "usage: switch SCRATCH-FOLDER");
    for (size_t m = 0; m < sizeof models / sizeof models[0]; m++) {
        char path[4096];
        setting s;
        snprintf(path, sizeof path, "%s/switch-%s.gguf", argv[1], models[m]);
        tiny_model_write(tiny_model_find(models[m]), path);
        prepare(&s, path);
        test_in_turn(&s, models[m]);
        if (m == 0)
            test_beside(&s);
        if (m == 0)
            test_refusals(&s, argv[1]);
        finish(&s);
        remove(path);
    }
    return 0;
}
