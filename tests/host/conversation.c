/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conversation.c - a long conversation on a real model: old tokens are compressed as it grows, the budget holds at every
 * step, going back to any token leads to the same logits, a snapshot goes on where the conversation was, older segments
 * keep less than newer ones. How far rolling is from compressing once: rolling.c.
 *
 * usage: conversation MODEL.gguf TEXT
 */
#include "common.h"

#include <string.h>

enum { OPENING = 40, CELLS = 256, BATCH = 256, SPOKEN = 1000, REST = 64, FULL = 600 };

static akv_llama *g_host;
static size_t g_vocab;
static int32_t *g_tokens;
static float *g_rolled; /* logits behind SPOKEN tokens that were spoken step by step */
static size_t g_num_tokens;

static akv_llama_memory memory_of(void)
{
    akv_llama_memory m;
    akv_llama_memory_init(&m);
    CHECK_OK(akv_llama_get_memory(g_host, &m, diag));
    return m;
}

/* Attach the opening, kept exactly, and roll from there on; `full` tokens' bytes are always allowed. */
static void begin(double keep, uint32_t full, uint64_t budget)
{
    akv_llama_store *store = host_exactly(g_host, g_tokens, OPENING);
    akv_llama_store_release(store);
    akv_llama_rolling r;
    akv_llama_rolling_init(&r);
    r.config.keep_ratio = keep;
    r.segment_tokens = 256;
    r.keep_tokens = 64;
    r.full_tokens = full;
    r.budget_bytes = budget;
    CHECK_OK(akv_llama_set_rolling(g_host, &r, diag));
}

/* Tokens [from, to) of the text, 100 at a time as a conversation would. */
static void speak(size_t from, size_t to, uint64_t budget) /* checks the budget at every step, 0 = none */
{
    for (size_t at = from; at < to;) {
        const size_t n = to - at < 100 ? to - at : 100;
        CHECK_OK(akv_llama_decode(g_host, g_tokens + at, n, AKV_LLAMA_LOGITS_LAST, diag));
        at += n;
        const akv_llama_memory m = memory_of();
        CHECK(budget == 0 || m.segments.total + m.cell_bytes <= budget,
              "%llu + %llu bytes after %zu tokens, the budget is %llu", (unsigned long long)m.segments.total,
              (unsigned long long)m.cell_bytes, at, (unsigned long long)budget);
        CHECK(akv_llama_next_position(g_host) == (int32_t)at &&
                  memcmp(akv_llama_history(g_host), g_tokens, at * sizeof *g_tokens) == 0,
              "the history is not what was said");
    }
}

static float *copy_logits(size_t rows)
{
    float *copy = malloc(rows * g_vocab * sizeof *copy);
    CHECK(copy && akv_llama_logits(g_host, 0), "no logits");
    memcpy(copy, akv_llama_logits(g_host, 0), rows * g_vocab * sizeof *copy);
    return copy;
}

/* Logits of n tokens from a position on; the conversation is cut back to it first. */
static float *logits_from(int32_t position, size_t n)
{
    CHECK_OK(akv_llama_truncate(g_host, position, diag));
    CHECK(akv_llama_next_position(g_host) == position && !akv_llama_logits(g_host, -1), "not back at %d", position);
    CHECK_OK(akv_llama_decode(g_host, g_tokens + position, n, AKV_LLAMA_LOGITS_ALL, diag));
    return copy_logits(n);
}

/* In every layer an older compressed segment keeps less of its bytes than a newer one. */
static void check_ages(void)
{
    akv_llama_store *store = NULL;
    akv_llama_store_parts parts;
    akv_llama_store_parts_init(&parts);
    CHECK_OK(akv_llama_snapshot(g_host, &store, diag));
    CHECK_OK(akv_llama_store_get_parts(store, &parts, diag));
    for (uint32_t i = 0; i < parts.num_layers; i++) {
        double before = 0.0;
        for (uint32_t s = 0; s < parts.layers[i].num_segments; s++) {
            akv_segment_info info;
            akv_segment_info_init(&info);
            CHECK_OK(akv_segment_get_info(parts.segments[parts.layers[i].first_segment + s], &info, diag));
            if (info.kind != AKV_SEGMENT_COMPRESSED)
                continue;
            const double keep = (double)info.bytes.total / (double)info.dense_bytes;
            CHECK(keep > before, "layer %u, segment %u keeps %.3f, the one before %.3f", i, s, keep, before);
            before = keep;
        }
        CHECK(before > 0.0, "nothing is compressed in layer %u", i);
    }
    akv_llama_store_release(store);
}

static void test_rolling(void)
{
    begin(0.2, FULL, 0);
    const uint64_t limit = memory_of().segments.total + memory_of().dense_bytes / OPENING * FULL;
    /* exact as long as it fits: the opening, which is no part of the conversation, cells and one move */
    speak(OPENING, OPENING + CELLS + 1, limit);
    CHECK(memory_of().rolls == 0 && memory_of().segments.residuals == 0, "compressed without need");
    speak(OPENING + CELLS + 1, SPOKEN, limit);
    const akv_llama_memory m = memory_of();
    CHECK(m.rolls >= 2 && m.retargets >= 1, "%u rolls, %u retargets", m.rolls, m.retargets);
    CHECK(m.segments.residuals > 0 && m.segments.dense > 0, "nothing compressed, or nothing exact");
    printf("rolling: %d tokens, %.2f MiB dense, %.2f MiB in %u segments, %.2f MiB in cells\n", SPOKEN,
           (double)m.dense_bytes / 1048576, (double)m.segments.total / 1048576, m.num_segments,
           (double)m.cell_bytes / 1048576);
    check_ages();
    CHECK_OK(akv_llama_decode(g_host, g_tokens + SPOKEN, REST, AKV_LLAMA_LOGITS_ALL, diag));
    g_rolled = copy_logits(REST);
}

/* Back and forth again, in the cells, in exact segments, in compressed ones: the same logits as the first time. */
static void test_truncate(void)
{
    akv_llama_memory before = memory_of();
    float *first = logits_from(SPOKEN - 10, 8), *again = logits_from(SPOKEN - 10, 8);
    CHECK(memcmp(first, again, 8 * g_vocab * sizeof *first) == 0, "going back inside the cells changed the logits");
    free(first);
    free(again);
    static const int32_t where[] = {SPOKEN - 300, 600, 333, OPENING + 3, OPENING, 7};
    for (size_t i = 0; i < sizeof where / sizeof *where; i++) {
        first = logits_from(where[i], 8);
        again = logits_from(where[i], 8);
        CHECK(memcmp(first, again, 8 * g_vocab * sizeof *first) == 0, "going back to %d twice gave other logits",
              where[i]);
        free(first);
        free(again);
        const akv_llama_memory m = memory_of();
        CHECK(m.segments.total <= before.segments.total, "going back to %d took more bytes", where[i]);
        before = m;
    }
    CHECK_FAILS(akv_llama_truncate(g_host, 0, diag), AKV_E_INVALID_ARGUMENT, "position is 0");
    CHECK_FAILS(akv_llama_truncate(g_host, 16, diag), AKV_E_INVALID_ARGUMENT, "1 to 15");
    CHECK_OK(akv_llama_rewind(g_host, diag)); /* the whole opening is there again */
    CHECK(akv_llama_next_position(g_host) == OPENING, "rewound to %d", akv_llama_next_position(g_host));
}

/* Kept and attached again: the cells' tokens sit in a dense segment then, in other parts of the same sum. */
static void test_snapshot(void)
{
    akv_llama_store *store = NULL;
    begin(0.2, FULL, 0);
    speak(OPENING, 760, 0); /* the next 32 stay in the cells: nothing rolls */
    CHECK_OK(akv_llama_snapshot(g_host, &store, diag));
    CHECK_OK(akv_llama_decode(g_host, g_tokens + 760, 32, AKV_LLAMA_LOGITS_ALL, diag));
    float *on = copy_logits(32);
    CHECK_OK(akv_llama_attach(g_host, store, diag));
    CHECK(akv_llama_next_position(g_host) == 760, "goes on at %d", akv_llama_next_position(g_host));
    CHECK_OK(akv_llama_decode(g_host, g_tokens + 760, 32, AKV_LLAMA_LOGITS_ALL, diag));
    float *kept = copy_logits(32);
    const divergence d = compare_logits(on, kept, 32, g_vocab);
    print_divergence("snapshot", &d);
    /* f16 both times, but in another order of sums: 1.2e-7 with the weights in f32. A 4-bit model rounds activations to 8 bits and
     * makes 2e-3 of it. */
    CHECK(d.mean_kl < 1e-2 && d.same_top >= 28, "the snapshot answers differently");
    free(on);
    free(kept);
    akv_llama_store_release(store);
}

static void test_budget(void)
{
    const akv_llama_memory m = memory_of();
    const uint64_t token = m.dense_bytes / (uint64_t)akv_llama_next_position(g_host);
    /* exact at most: the opening, cells 256, staying 64, and a move of 256 */
    const uint64_t budget = token * (OPENING + 256 + 64 + 256) + token * 72;
    begin(0.2, 2048, budget);
    speak(OPENING, SPOKEN, budget);
    const akv_llama_memory after = memory_of();
    CHECK(after.rolls >= 2 && after.retargets >= 1, "%u rolls, %u retargets: the budget was never in the way",
          after.rolls, after.retargets);
    akv_llama_rolling r;
    akv_llama_rolling_init(&r);
    r.budget_bytes = token * 100;
    CHECK_FAILS(akv_llama_set_rolling(g_host, &r, diag), AKV_E_INFEASIBLE, "is below");
    r.struct_size = 3;
    CHECK_FAILS(akv_llama_set_rolling(g_host, &r, diag), AKV_E_INVALID_ARGUMENT, "akv_llama_rolling_init");
}

/* Opening, user, answer, user: piece by piece the text that the template gives for the whole. */
static void test_turns(void)
{
    static const char want[] =
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello <|im_end|><|im_end|>\n<|im_start|>assistant\n"
        "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n";
    int32_t *piece[3];
    size_t n[3], length = 0;
    char text[1024] = "";
    CHECK_OK(akv_llama_render_opening(g_host, "Be brief.", &piece[0], &n[0], diag));
    CHECK_OK(akv_llama_render_turn(g_host, AKV_LLAMA_TURN_FIRST, "Be brief.", "Hello <|im_end|>", 16, &piece[1], &n[1],
                                   diag));
    CHECK_OK(akv_llama_render_turn(g_host, AKV_LLAMA_TURN_LATER, "Be brief.", "More", 4, &piece[2], &n[2], diag));
    for (int p = 0; p < 3; p++) {
        for (size_t i = 0; i < n[p]; i++) {
            size_t bytes = 0;
            CHECK_OK(
                akv_llama_token_text(g_host, piece[p][i], 1, text + length, sizeof text - length - 1, &bytes, diag));
            length += bytes;
        }
        akv_llama_free_tokens(piece[p]);
    }
    text[length] = 0;
    CHECK(strcmp(text, want) == 0, "rendered: %s", text);
    CHECK_FAILS(akv_llama_render_turn(g_host, AKV_LLAMA_TURN_LATER, NULL, "", 0, &piece[0], &n[0], diag),
                AKV_E_INVALID_ARGUMENT, "empty");
}

/* Compressed at *from of the bytes, then made smaller to the config's. */
static akv_status compress_and_shrink(void *from, const akv_layer *layer, const akv_config *config, akv_segment **out,
                                      akv_diag *diag)
{
    akv_config large = *config;
    akv_segment *segment = NULL;
    akv_segment_info info;
    large.keep_ratio = *(double *)from;
    akv_status status = akv_compress(layer, &large, &segment, diag);
    if (status != AKV_OK)
        return status;
    akv_segment_info_init(&info);
    akv_segment_get_info(segment, &info, NULL);
    status = akv_segment_retarget(segment, (uint64_t)(config->keep_ratio * (double)info.dense_bytes), config, out, NULL,
                                  diag);
    akv_segment_release(segment);
    return status;
}

/* Made smaller later against compressed so at once. */
static void compare_retargeted(void)
{
    CHECK_OK(akv_llama_detach(g_host, diag));
    CHECK_OK(akv_llama_prefill(g_host, g_tokens, SPOKEN, REST, diag));
    CHECK_OK(akv_llama_decode(g_host, g_tokens + SPOKEN, REST, AKV_LLAMA_LOGITS_ALL, diag));
    float *dense = copy_logits(REST);
    const divergence spoken = compare_logits(dense, g_rolled, REST, g_vocab);
    print_divergence("rolling", &spoken);
    CHECK(spoken.mean_kl < 0.3, "rolling compression lost the thread");
    static const double steps[][2] = {{0.1, 0.1}, {0.2, 0.1}};
    double anew = 0.0;
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        akv_llama_store *store = NULL;
        akv_config config;
        double from = steps[i][0];
        akv_config_init(&config);
        config.keep_ratio = steps[i][1];
        CHECK_OK(akv_llama_rewind(g_host, diag));
        CHECK_OK(akv_llama_compress_with(g_host, compress_and_shrink, &from, &config, &store, diag));
        CHECK_OK(akv_llama_attach(g_host, store, diag));
        CHECK_OK(akv_llama_decode(g_host, g_tokens + SPOKEN, REST, AKV_LLAMA_LOGITS_ALL, diag));
        float *logits = copy_logits(REST);
        const divergence d = compare_logits(dense, logits, REST, g_vocab);
        printf("%gx, then %gx: mean divergence %.5f, top %zu of %d\n", 1 / steps[i][0], 1 / steps[i][1], d.mean_kl,
               d.same_top, REST);
        if (i == 0)
            anew = d.mean_kl;
        else
            CHECK(d.mean_kl < 4 * anew, "far from %.5f", anew); /* measured: see docs/sessions.md */
        free(logits);
        CHECK_OK(akv_llama_detach(g_host, diag));
        akv_llama_store_release(store);
    }
    free(dense);
}

int main(int argc, char **argv)
{
    CHECK(argc == 3, "usage: %s MODEL.gguf TEXT", argv[0]);
    size_t bytes;
    char *text = read_file(argv[2], &bytes);
    g_host = open_host(argv[1], CELLS, BATCH);
    akv_llama_model_info info;
    akv_llama_model_info_init(&info);
    CHECK_OK(akv_llama_get_model_info(g_host, &info, diag));
    g_vocab = info.vocab_tokens;
    CHECK_OK(akv_llama_tokenize(g_host, text, bytes, 1, 0, &g_tokens, &g_num_tokens, diag));
    CHECK(g_num_tokens >= SPOKEN + REST, "the text has only %zu tokens", g_num_tokens);
    akv_llama_memory m;
    akv_llama_memory_init(&m);
    CHECK_FAILS(akv_llama_truncate(g_host, 3, diag), AKV_E_BAD_STATE, "attach");
    CHECK_FAILS(akv_llama_get_memory(g_host, &m, diag), AKV_E_BAD_STATE, "attach");
    test_turns();
    test_rolling();
    test_truncate();
    test_snapshot();
    test_budget();
    compare_retargeted();
    free(g_rolled);
    akv_llama_free_tokens(g_tokens);
    akv_llama_close(g_host);
    free(text);
    printf("conversation: ok\n");
    return 0;
}
