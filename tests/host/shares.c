/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shares.c - one budget split unevenly over the layers: the solver against a known optimum, the host's sums of bytes, and the
 * comparison of stores that the split is measured with.
 *
 * usage: shares SCRATCH-FOLDER
 */
#include "common.h"
#include "tiny_models.h"

#include <math.h>
#include <string.h>

enum { DOCUMENT = 400, REST = 24, UBATCH = 64, MAX_LAYERS = 64 };

/* errors c * ratio^fall: the optimum is share ~ c^(1 / (1 + fall)) */
static void test_known_optimum(void)
{
    static const double ratios[] = {4, 8, 16, 32};
    static const double c[] = {1e-3, 1e-3, 4e-3, 2.5e-4, 8e-3};
    enum { L = 5, R = 4 };
    double errors[R * L], shares[L], mean = 0.0, best[L];
    for (int r = 0; r < R; r++)
        for (int l = 0; l < L; l++)
            errors[r * L + l] = c[l] * pow(ratios[r] / 10.0, 1.8);
    for (int l = 0; l < L; l++)
        mean += (best[l] = pow(c[l], 1.0 / 2.8)) / L;
    CHECK_OK(akv_llama_solve_shares(ratios, errors, R, L, 0.1, shares, diag));
    for (int l = 0; l < L; l++)
        CHECK(fabs(shares[l] / (best[l] / mean) - 1.0) < 0.03, "layer %d: share %g, the optimum is %g", l, shares[l],
              best[l] / mean);
    /* one ratio: the same fall is assumed */
    CHECK_OK(akv_llama_solve_shares(ratios + 1, errors + L, 1, L, 0.05, shares, diag));
    for (int l = 0; l < L; l++)
        CHECK(fabs(shares[l] / (best[l] / mean) - 1.0) < 0.03, "one ratio, layer %d: share %g", l, shares[l]);
    /* equal layers share alike; a layer without segments takes no part */
    double equal[2 * 3] = {1e-3, -1.0, 1e-3, 4e-3, -1.0, 4e-3};
    CHECK_OK(akv_llama_solve_shares(ratios, equal, 2, 3, 0.1, shares, diag));
    CHECK(shares[0] == 1.0 && shares[1] == 1.0 && shares[2] == 1.0, "equal layers: %g %g %g", shares[0], shares[1],
          shares[2]);
    /* extremes stay in bounds, zero errors are no logarithm of zero */
    double far[2 * 3] = {0.0, 1e-9, 0.5, 0.0, 1e-8, 0.9};
    CHECK_OK(akv_llama_solve_shares(ratios, far, 2, 3, 0.05, shares, diag));
    for (int l = 0; l < 3; l++)
        CHECK(isfinite(shares[l]) && shares[l] > 0.05, "extremes: %g", shares[l]);
    CHECK(fabs(shares[0] + shares[1] + shares[2] - 3.0) < 1e-9, "mean %g", (shares[0] + shares[1] + shares[2]) / 3);
}

static void test_solver_refusals(void)
{
    const double ratios[] = {4, 8}, falling[] = {8, 4}, errors[] = {0.1, 0.1, 0.2, 0.2}, mixed[] = {0.1, -1, 0.2, 0.2};
    const double wrong[] = {0.1, NAN, 0.2, 0.2};
    double shares[2];
    CHECK_FAILS(akv_llama_solve_shares(ratios, NULL, 2, 2, 0.1, shares, diag), AKV_E_INVALID_ARGUMENT, "NULL");
    CHECK_FAILS(akv_llama_solve_shares(ratios, errors, 0, 2, 0.1, shares, diag), AKV_E_INVALID_ARGUMENT, "empty");
    CHECK_FAILS(akv_llama_solve_shares(ratios, errors, 2, 2, 0.0, shares, diag), AKV_E_INVALID_ARGUMENT, "keep_ratio");
    CHECK_FAILS(akv_llama_solve_shares(falling, errors, 2, 2, 0.1, shares, diag), AKV_E_INVALID_ARGUMENT, "ascend");
    CHECK_FAILS(akv_llama_solve_shares(ratios, mixed, 2, 2, 0.1, shares, diag), AKV_E_INVALID_ARGUMENT, "layer 1");
    CHECK_FAILS(akv_llama_solve_shares(ratios, wrong, 2, 2, 0.1, shares, diag), AKV_E_INVALID_ARGUMENT, "layer 1");
}

static akv_llama_store *compressed(akv_llama *host, akv_llama_method method, double keep, akv_llama_stats *stats)
{
    akv_llama_store *store = NULL;
    akv_config config;
    akv_config_init(&config);
    config.keep_ratio = keep;
    CHECK_OK(akv_llama_compress(host, method, &config, &store, diag));
    akv_llama_stats_init(stats);
    CHECK_OK(akv_llama_get_stats(host, stats, diag));
    return store;
}

static void test_budgets(const char *path, const int32_t *tokens)
{
    akv_llama *host = open_host(path, 256, UBATCH);
    akv_llama_stats stats;
    double shares[MAX_LAYERS];
    CHECK_OK(akv_llama_prefill(host, tokens, DOCUMENT, REST, diag));
    akv_llama_store_release(compressed(host, AKV_LLAMA_ANCHOR, 0.25, &stats));
    const uint32_t L = stats.num_layers;
    const uint64_t equal = stats.compressed_bytes, one = stats.layers[0].segment.budget_bytes;
    CHECK(L >= 2 && L <= MAX_LAYERS && stats.share_strength == 0.0, "%u layers, strength %g", L, stats.share_strength);

    CHECK_FAILS(akv_llama_set_layer_shares(host, shares, L + 1, diag), AKV_E_MISMATCH, "for a model of");
    for (uint32_t l = 0; l < L; l++)
        shares[l] = l == 0 ? 3.0 : 2.0;
    shares[1] = NAN;
    CHECK_FAILS(akv_llama_set_layer_shares(host, shares, L, diag), AKV_E_INVALID_ARGUMENT, "layer 1");
    shares[1] = 2.0;
    CHECK_OK(akv_llama_set_layer_shares(host, shares, L, diag));
    akv_llama_store_release(compressed(host, AKV_LLAMA_ANCHOR, 0.25, &stats));
    CHECK(stats.share_strength == 1.0, "strength %g", stats.share_strength);
    CHECK(stats.compressed_bytes <= stats.dense_cache_bytes / 4, "%llu bytes of %llu",
          (unsigned long long)stats.compressed_bytes, (unsigned long long)stats.dense_cache_bytes);
    const double first = (double)stats.layers[0].segment.budget_bytes / (double)one;
    const double second = (double)stats.layers[1].segment.budget_bytes / (double)one;
    CHECK(fabs(first / second - 1.5) < 0.01 && fabs(first + second * (L - 1) - L) < 0.01, "budgets %g and %g", first,
          second);
    akv_llama_store_release(compressed(host, AKV_LLAMA_SNAPKV, 0.5, &stats));
    CHECK(stats.layers[0].segment.budget_bytes == stats.layers[1].segment.budget_bytes, "shares reached another method");

    /* a share that cannot hold a segment's fixed part: nearer to equal, never an error, never more bytes */
    for (uint32_t l = 0; l < L; l++)
        shares[l] = l == 0 ? 1e-3 : 1.0;
    CHECK_OK(akv_llama_set_layer_shares(host, shares, L, diag));
    akv_llama_store_release(compressed(host, AKV_LLAMA_ANCHOR, 0.25, &stats));
    CHECK(stats.share_strength > 0.0 && stats.share_strength < 1.0, "strength %g", stats.share_strength);
    CHECK(stats.compressed_bytes <= stats.dense_cache_bytes / 4, "%llu bytes", (unsigned long long)stats.compressed_bytes);

    CHECK_OK(akv_llama_set_layer_shares(host, NULL, 0, diag));
    akv_llama_store_release(compressed(host, AKV_LLAMA_ANCHOR, 0.25, &stats));
    CHECK(stats.compressed_bytes == equal && stats.share_strength == 0.0, "equal shares again: %llu bytes, were %llu",
          (unsigned long long)stats.compressed_bytes, (unsigned long long)equal);
    akv_llama_close(host);
}

static void test_compare(const char *path, const int32_t *tokens)
{
    akv_llama *host = open_host(path, 256, UBATCH);
    akv_llama_stats stats;
    CHECK_OK(akv_llama_prefill(host, tokens, DOCUMENT, REST, diag));
    akv_llama_store *stores[3] = {compressed(host, AKV_LLAMA_EXACT, 1.0, &stats),
                                  compressed(host, AKV_LLAMA_ANCHOR, 0.5, &stats),
                                  compressed(host, AKV_LLAMA_ANCHOR, 0.2, &stats)};
    const uint32_t L = stats.num_layers;
    double errors[3 * MAX_LAYERS] = {0}, energy[MAX_LAYERS] = {0};
    CHECK_FAILS(akv_llama_compare(host, stores, 3, tokens + DOCUMENT, REST, errors, energy, diag), AKV_E_BAD_STATE,
                "akv_llama_attach");
    CHECK_OK(akv_llama_attach(host, stores[0], diag));
    CHECK_FAILS(akv_llama_compare(host, stores, 0, tokens + DOCUMENT, REST, errors, energy, diag),
                AKV_E_INVALID_ARGUMENT, "at least one store");
    CHECK_OK(akv_llama_compare(host, stores, 3, tokens + DOCUMENT, REST, errors, energy, diag));
    for (uint32_t l = 0; l < L; l++) {
        CHECK(energy[l] > 0.0, "layer %u has no output", l);
        CHECK(errors[l] == 0.0, "layer %u differs from itself: %g", l, errors[l]);
        CHECK(errors[L + l] > 0.0 && errors[2 * L + l] > errors[L + l] && errors[2 * L + l] < energy[l],
              "layer %u: %g at 2x, %g at 5x, energy %g", l, errors[L + l], errors[2 * L + l], energy[l]);
    }
    /* the conversation went on as it would have: the same logits */
    float first[TINY_VOCAB];
    memcpy(first, akv_llama_logits(host, -1), sizeof first);
    CHECK_OK(akv_llama_rewind(host, diag));
    CHECK_OK(akv_llama_decode(host, tokens + DOCUMENT, REST, AKV_LLAMA_LOGITS_LAST, diag));
    CHECK(memcmp(first, akv_llama_logits(host, -1), sizeof first) == 0, "comparing changed the answer");
    CHECK_FAILS(akv_llama_compare(host, stores, 3, tokens, 300, errors, energy, diag), AKV_E_NO_SPACE, "tail");
    CHECK_OK(akv_llama_detach(host, diag));
    /* another document's store */
    CHECK_OK(akv_llama_prefill(host, tokens, DOCUMENT - 8, REST, diag));
    akv_llama_store *other = compressed(host, AKV_LLAMA_EXACT, 1.0, &stats);
    CHECK_OK(akv_llama_attach(host, other, diag));
    CHECK_FAILS(akv_llama_compare(host, stores, 1, tokens, REST, errors, energy, diag), AKV_E_MISMATCH, "another document");
    akv_llama_store_release(other);
    for (int i = 0; i < 3; i++)
        akv_llama_store_release(stores[i]);
    akv_llama_close(host);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2, "usage: shares SCRATCH-FOLDER");
    char path[512];
    const tiny_model *model = tiny_model_find("llama");
    CHECK(model, "no tiny model");
    snprintf(path, sizeof path, "%s/shares.gguf", argv[1]);
    tiny_model_write(model, path);
    int32_t *tokens = random_tokens(DOCUMENT + REST, TINY_VOCAB, 7);
    test_known_optimum();
    test_solver_refusals();
    test_budgets(path, tokens);
    test_compare(path, tokens);
    free(tokens);
    puts("shares: ok");
    return 0;
}
