/* SPDX-License-Identifier: Apache-2.0 */
/*
 * eval_parts.c - the parts of `akv eval` that need no model: the rotated-quantisation peer must be as good as its theory, and
 * the needles must stand where the questions say.
 */
#include "needles.h"
#include "random.h"
#include "rotated.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, "\n");                                                                                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* --------------------------------------------------------------------------------------------- rotated quantisation */

static float gaussian(uint64_t *state)
{
    const double u = 1.0 - cli_random_unit(state), v = cli_random_unit(state);
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

/*
 * The mean squared error of Lloyd-Max levels on a unit Gaussian, from the tables of Max (1960). A Gaussian vector stays one
 * under the rotation; a scale fitted to each vector and its codes gains a little on top, the more the shorter the vector.
 */
static void test_distortion(void)
{
    static const double theory[] = {0.11748, 0.03454, 0.009497};
    static const uint32_t dims[] = {64, 96, 128};
    uint64_t state = 1;
    for (size_t d = 0; d < 3; d++) {
        for (uint32_t bits = 2; bits <= 4; bits++) {
            const uint32_t dim = dims[d];
            float signs[128], x[128], y[128], scratch[128];
            double error = 0.0, energy = 0.0;
            for (uint32_t i = 0; i < dim; i++)
                signs[i] = cli_random(&state) & 1 ? 1.0f : -1.0f;
            for (int vector = 0; vector < 2000; vector++) {
                const float size = expf(2.0f * gaussian(&state)); /* the scale is per vector: sizes must not matter */
                for (uint32_t i = 0; i < dim; i++)
                    y[i] = x[i] = size * gaussian(&state);
                cli_rotated_vector(y, dim, bits, signs, scratch);
                double e = 0.0, n = 0.0;
                for (uint32_t i = 0; i < dim; i++) {
                    e += ((double)y[i] - x[i]) * ((double)y[i] - x[i]);
                    n += (double)x[i] * x[i];
                }
                error += e / n;
                energy += 1.0;
            }
            /* What the fitted scale leaves of the theory, as seen; 2000 vectors put the sampling error below 1 %. A single
             * wrong level, a scale by the norm alone or a rotation that is not orthonormal costs 3 % and more. */
            static const double seen[3][3] = {{0.943, 0.899, 0.874}, {0.968, 0.926, 0.903}, {0.973, 0.943, 0.923}};
            const double relative = error / energy / theory[bits - 2];
            CHECK(fabs(relative - seen[d][bits - 2]) < 0.015, "%u bits, dim %u: %.3f of the theory, %.3f was seen",
                  bits, dim, relative, seen[d][bits - 2]);
        }
    }
    float signs[128], spike[128] = {0}, scratch[128], zero[128] = {0};
    for (uint32_t i = 0; i < 128; i++)
        signs[i] = cli_random(&state) & 1 ? 1.0f : -1.0f;
    spike[17] =
        100.0f; /* without a rotation one scale a vector would serve this one too, so only finiteness and size */
    cli_rotated_vector(spike, 128, 4, signs, scratch);
    CHECK(fabsf(spike[17] - 100.0f) < 15.0f, "a spike came back as %g", spike[17]);
    cli_rotated_vector(zero, 128, 2, signs, scratch);
    for (uint32_t i = 0; i < 128; i++)
        CHECK(zero[i] == 0.0f, "zero came back as %g", zero[i]);
}

static void test_layer(void)
{
    enum { TOKENS = 300, HEADS = 2, DIM = 64 };
    static float keys[HEADS * TOKENS * DIM], values[HEADS * TOKENS * DIM], out[TOKENS * DIM];
    double inv_freq[DIM / 2] = {0.0};
    uint64_t state = 5;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        keys[i] = gaussian(&state);
        values[i] = gaussian(&state);
    }
    akv_layer layer;
    akv_layer_init(&layer);
    layer.shape.num_tokens = TOKENS;
    layer.shape.num_kv_heads = HEADS;
    layer.shape.gqa_group = 1;
    layer.shape.head_dim_k = layer.shape.head_dim_v = layer.shape.rotary_dim = DIM;
    layer.shape.num_queries = 1;
    layer.keys = akv_tensor_contiguous(keys, AKV_F32, TOKENS, DIM);
    layer.values = akv_tensor_contiguous(values, AKV_F32, TOKENS, DIM);
    layer.rope.rotary_dim = DIM;
    layer.rope.inv_freq = inv_freq;
    layer.sm_scale = 0.125;
    akv_config config;
    akv_config_init(&config);
    cli_rotated peer = {3, 9, 0};
    akv_segment *segment = NULL;
    akv_diag diag = {AKV_OK, ""};
    CHECK(cli_rotated_make(&peer, &layer, &config, &segment, &diag) == AKV_OK, "%s", diag.message);
    const uint64_t coded = TOKENS - CLI_ROTATED_WINDOW;
    /* 3 bits of 64 coordinates are 24 bytes, a scale 2; keys and values; the window in 16 bits */
    CHECK(peer.bytes == HEADS * 2 * (coded * 26 + CLI_ROTATED_WINDOW * DIM * 2ull), "%llu bytes",
          (unsigned long long)peer.bytes);
    CHECK(cli_rotated_bytes(100, 1, 64, 64, 2) == 100 * 256, "a short cache is all window");
    for (int side = 0; side < 2; side++) {
        for (uint32_t h = 0; h < HEADS; h++) {
            const float *from = (side == 0 ? keys : values) + (size_t)h * TOKENS * DIM;
            CHECK(akv_segment_decode(segment, h, 0, TOKENS, side == 0 ? out : NULL, side == 1 ? out : NULL, &diag) ==
                      AKV_OK,
                  "%s", diag.message);
            CHECK(memcmp(out + coded * DIM, from + coded * DIM, CLI_ROTATED_WINDOW * DIM * sizeof(float)) == 0,
                  "the window is not exact");
            double error = 0.0, energy = 0.0;
            for (size_t i = 0; i < coded * DIM; i++) {
                error += ((double)out[i] - from[i]) * ((double)out[i] - from[i]);
                energy += (double)from[i] * from[i];
            }
            CHECK(error / energy > 0.025 && error / energy < 0.040, "3 bits: %g", error / energy);
        }
    }
    akv_segment_release(segment);
}

/* --------------------------------------------------------------------------------------------------------- needles */

static bool count_words(void *opaque, const char *text, size_t bytes, uint64_t *tokens)
{
    (void)opaque;
    *tokens = 0;
    for (size_t i = 0; i < bytes; i++)
        *tokens += text[i] != ' ' && text[i] != '\n' && (i == 0 || text[i - 1] == ' ' || text[i - 1] == '\n');
    return true;
}

static unsigned occurrences(const char *text, const char *part)
{
    unsigned n = 0;
    for (const char *at = text; (at = strstr(at, part)) != NULL; at++)
        n++;
    return n;
}

static void test_needles(void)
{
    static char prose[64000];
    size_t bytes = 0;
    for (int i = 0; i < 1500; i++)
        bytes += (size_t)snprintf(prose + bytes, sizeof prose - bytes, "Sentence %d is about the %s sea. ", i,
                                  i % 2 ? "grey" : "blue");
    needle_request r = {.tasks = 0x3f,
                        .seed = 3,
                        .num_samples = 4,
                        .prose = prose,
                        .prose_bytes = bytes,
                        .room = 1000,
                        .part = count_words,
                        .whole = count_words};
    double least = 1.0, most = 0.0;
    for (r.sample = 0; r.sample < 4; r.sample++) {
        needle_context c, again;
        uint64_t tokens = 0;
        CHECK(needle_build(&r, &c) == CLI_OK && needle_build(&r, &again) == CLI_OK, "sample %d", (int)r.sample);
        CHECK(c.text.bytes == again.text.bytes && memcmp(c.text.data, again.text.data, c.text.bytes) == 0,
              "not repeatable");
        CHECK(c.num_questions == NEEDLE_TASKS, "%u questions", c.num_questions);
        count_words(NULL, c.text.data, c.text.bytes, &tokens);
        CHECK(tokens <= 1000 && tokens > 950, "%llu tokens in a room of 1000", (unsigned long long)tokens);
        for (unsigned q = 0; q < c.num_questions; q++) {
            const needle_question *one = &c.questions[q];
            bool hit[NEEDLE_VALUES];
            char answer[256] = "";
            CHECK(one->task == q && one->num_values == (q < 4 ? 1 : 4), "task %u has %u values", one->task,
                  one->num_values);
            for (unsigned v = 0; v < one->num_values; v++) {
                CHECK(occurrences(c.text.data, one->values[v]) == 1, "\"%s\" is not once in the text", one->values[v]);
                const double stands =
                    (double)(strstr(c.text.data, one->values[v]) - c.text.data) / (double)c.text.bytes;
                CHECK(fabs(stands - one->depth[v]) < 0.12, "at %.2f, said to be at %.2f", stands, one->depth[v]);
                least = fmin(least, one->depth[v]);
                most = fmax(most, one->depth[v]);
                strcat(strcat(answer, v ? " AND " : ""), one->values[v]);
            }
            CHECK(needle_found(one, answer, hit) == 1.0 && hit[0], "a right answer scored less");
            CHECK(needle_found(one, "It is 1234567.", hit) == 0.0 && !hit[0], "a wrong answer scored");
            answer[strlen(answer) - 1] = '\0'; /* the last value lacks its end */
            CHECK(fabs(needle_found(one, answer, hit) - (one->num_values - 1.0) / one->num_values) < 1e-12,
                  "a cut value counts");
        }
        cli_buffer_free(&c.text);
        cli_buffer_free(&again.text);
    }
    CHECK(least < 0.2 && most > 0.8, "depths from %.2f to %.2f", least, most);
    needle_context c;
    r.sample = 0;
    r.tasks = 1u << 1 | 1u << 4;
    CHECK(
        needle_build(&r, &c) == CLI_OK && c.num_questions == 2 && c.questions[0].task == 1 && c.questions[1].task == 4,
        "a choice");
    cli_buffer_free(&c.text);
    r.tasks = 0x3f;
    r.room = 100;
    CHECK(needle_build(&r, &c) == CLI_BAD_INPUT, "15 facts in 100 tokens");
    cli_buffer_free(&c.text);
}

static void test_sentences(void)
{
    static const char text[] = "  One. Two is 3.5 long!\nNo stop here\n\nLast";
    static const char *const wanted[] = {"One.", "Two is 3.5 long!", "No stop here", "Last"};
    size_t at = 0;
    for (size_t i = 0; i < 4; i++) {
        const size_t n = needle_sentence(text, sizeof text - 1, &at);
        CHECK(n == strlen(wanted[i]) && memcmp(text + at, wanted[i], n) == 0, "sentence %zu: %.*s", i, (int)n,
              text + at);
        at += n;
    }
    CHECK(needle_sentence(text, sizeof text - 1, &at) == 0, "a sentence behind the end");
    char *wall = malloc(3000); /* no stop, no space, three-byte characters: cut, and never inside one */
    for (size_t i = 0; i < 3000; i += 3)
        memcpy(wall + i, "\xe2\x82\xac", 3);
    at = 0;
    size_t n, total = 0;
    while ((n = needle_sentence(wall, 3000, &at)) != 0) {
        CHECK(n % 3 == 0 && cli_utf8_prefix(wall + at, n) == n, "cut inside a character after %zu bytes", n);
        at += n;
        total += n;
    }
    CHECK(total == 3000, "%zu of 3000 bytes", total);
    free(wall);
}

int main(void)
{
    test_distortion();
    test_layer();
    test_sentences();
    test_needles();
    puts("eval parts: ok");
    return 0;
}
