/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shares.c - one budget, spent unevenly over the layers.
 *
 * Layers differ in what their errors do to the model's output, by a factor of hundreds (docs/quality.md). Measured once per
 * model (akv calibrate), that says how the bytes of all layers are best split; docs/method.md derives the rule.
 */
#include "host.h"

#include <math.h>
#include <string.h>

akv_status akv_llama_set_layer_shares(akv_llama *host, const double *shares, uint32_t num_layers, akv_diag *diag)
{
    if (!host)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host must not be NULL");
    if (!shares) {
        free(host->shares);
        host->shares = NULL;
        return AKV_OK;
    }
    if (num_layers != host->num_layers)
        return akvl_fail(diag, AKV_E_MISMATCH, "shares of %u layers for a model of %u", num_layers, host->num_layers);
    for (uint32_t i = 0; i < num_layers; i++)
        if (!(shares[i] > 0.0) || !isfinite(shares[i]))
            return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "the share of layer %u is %g; it must be above zero", i,
                             shares[i]);
    double *copy = akvl_new(num_layers, sizeof *copy);
    if (!copy)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the shares of %u layers", num_layers);
    memcpy(copy, shares, num_layers * sizeof *copy);
    free(host->shares);
    host->shares = copy;
    return AKV_OK;
}

static uint64_t dense_bytes_of(const akv_llama *host, uint32_t layer)
{
    const akvl_layer *l = &host->dense_graph->layers[layer];
    return host->num_tokens * l->num_kv_heads * ((uint64_t)l->head_dim_k + l->head_dim_v) * 2;
}

void akvl_share_config(const akv_config *whole, double factor, akv_config *one)
{
    *one = *whole;
    if (one->budget_bytes)
        one->budget_bytes = (uint64_t)((double)one->budget_bytes * factor);
    one->keep_ratio = fmin(1.0, one->keep_ratio * factor);
}

/* Whether every layer can hold what no segment does without. */
static bool all_feasible(const akv_llama *host, const akv_config *config, const double *factors)
{
    for (uint32_t i = 0; i < host->num_layers; i++) {
        akv_layer layer;
        akv_plan_info info;
        akv_config own;
        if (!host->is_hosted[i])
            continue;
        akvl_describe_layer(&host->dense_graph->layers[i], (int32_t)i, host->num_tokens, 0, &layer);
        layer.shape.num_queries = host->options.observation_queries;
        layer.shape.dtype = AKV_F16;
        akvl_share_config(config, factors[i], &own);
        akv_plan_info_init(&info);
        if (akv_plan(&layer.shape, &own, &info, NULL) == AKV_E_INFEASIBLE)
            return false; /* what else is wrong, akv_compress says with the layer's number */
    }
    return true;
}

void akvl_layer_factors(const akv_llama *host, const akv_config *config, double *factors, double *strength)
{
    double bytes = 0.0, wanted = 0.0;
    for (uint32_t i = 0; i < host->num_layers; i++) {
        if (!host->is_hosted[i])
            continue;
        bytes += (double)dense_bytes_of(host, i);
        wanted += host->shares[i] * (double)dense_bytes_of(host, i);
    }
    /* A mix with equal shares keeps the sum; the strongest mix that leaves every layer its fixed part is taken. */
    enum { STEPS = 16 };
    for (int step = STEPS; step >= 0; step--) {
        *strength = (double)step / STEPS;
        for (uint32_t i = 0; i < host->num_layers; i++)
            factors[i] = host->is_hosted[i] ? 1.0 + *strength * (host->shares[i] * bytes / wanted - 1.0) : 1.0;
        if (all_feasible(host, config, factors))
            return;
    }
}

/* ---------------------------------------------------------------------------------------- shares from measured errors */

enum { GRID = 161 }; /* candidate shares, 4^-1 .. 4^1 in equal steps of the logarithm */

static const double LEAST_ERROR = 1e-9; /* of the logarithm */

static double share_at(int i)
{
    return pow(4.0, 2.0 * i / (GRID - 1) - 1.0);
}

/* Relative error of a layer made `ratio` times smaller; log_ratio and log_error ascend. */
static double error_at(const double *log_ratio, const double *log_error, uint32_t n, double ratio)
{
    const double x = log(ratio);
    uint32_t i = 0;
    while (i + 2 < n && x > log_ratio[i + 1])
        i++;
    if (n == 1) /* one point: errors rise about as ratio^1.8 (docs/codec-log.md) */
        return exp(log_error[0] + 1.8 * (x - log_ratio[0]));
    const double slope = (log_error[i + 1] - log_error[i]) / (log_ratio[i + 1] - log_ratio[i]);
    return exp(log_error[i] + slope * (x - log_ratio[i]));
}

/* cost[GRID] of one layer; false when it has no segments. */
static bool layer_cost(const double *ratios, const double *errors, uint32_t num_ratios, uint32_t num_layers,
                       uint32_t layer, double keep_ratio, double *log_ratio, double *log_error, double *cost)
{
    if (errors[layer] < 0.0)
        return false;
    for (uint32_t r = 0; r < num_ratios; r++) {
        log_ratio[r] = log(ratios[r]);
        log_error[r] = log(fmax(errors[(size_t)r * num_layers + layer], LEAST_ERROR));
        if (r != 0 && log_error[r] < log_error[r - 1])
            log_error[r] = log_error[r - 1]; /* more bytes never hurt; what says so is noise */
    }
    for (int i = 0; i < GRID; i++)
        cost[i] = error_at(log_ratio, log_error, num_ratios, fmax(1.0, 1.0 / (keep_ratio * share_at(i))));
    return true;
}

/* The layers' best shares at one price of a byte; returns their mean. */
static double choose(const double *cost, const double *errors, uint32_t num_layers, double price, double *shares)
{
    double sum = 0.0;
    uint32_t count = 0;
    for (uint32_t l = 0; l < num_layers; l++) {
        shares[l] = 1.0;
        if (errors[l] < 0.0)
            continue;
        int best = 0;
        for (int i = 1; i < GRID; i++)
            if (cost[(size_t)l * GRID + i] + price * share_at(i) <
                cost[(size_t)l * GRID + best] + price * share_at(best))
                best = i;
        shares[l] = share_at(best);
        sum += shares[l];
        count++;
    }
    return count ? sum / count : 1.0;
}

static akv_status check_errors(const double *ratios, const double *errors, uint32_t num_ratios, uint32_t num_layers,
                               akv_diag *diag)
{
    for (uint32_t r = 0; r < num_ratios; r++) {
        if (!(ratios[r] > 1.0) || !isfinite(ratios[r]) || (r != 0 && !(ratios[r] > ratios[r - 1])))
            return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "ratio %u is %g; they must ascend and be above 1", r, ratios[r]);
        for (uint32_t l = 0; l < num_layers; l++) {
            const double e = errors[(size_t)r * num_layers + l];
            if (!isfinite(e) || (e < 0.0) != (errors[l] < 0.0))
                return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "the error of layer %u at ratio %g is %g", l, ratios[r], e);
        }
    }
    return AKV_OK;
}

akv_status akv_llama_solve_shares(const double *ratios, const double *errors, uint32_t num_ratios, uint32_t num_layers,
                                  double keep_ratio, double *shares, akv_diag *diag)
{
    if (!ratios || !errors || !shares || num_ratios == 0 || num_layers == 0 || !(keep_ratio > 0.0 && keep_ratio <= 1.0))
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT,
                         "ratios, errors and shares must not be NULL, nor empty, and keep_ratio be in (0, 1]");
    const akv_status status = check_errors(ratios, errors, num_ratios, num_layers, diag);
    if (status != AKV_OK)
        return status;
    double *cost = akvl_new((size_t)num_layers * GRID, sizeof *cost), *logs = akvl_new((size_t)2 * num_ratios, sizeof *logs);
    if (!cost || !logs) {
        free(cost);
        free(logs);
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the errors of %u layers", num_layers);
    }
    uint32_t count = 0;
    for (uint32_t l = 0; l < num_layers; l++)
        count += layer_cost(ratios, errors, num_ratios, num_layers, l, keep_ratio, logs, logs + num_ratios,
                            cost + (size_t)l * GRID);
    /* a higher price buys less: the price at which the mean share is 1 */
    double low = 1e-12, high = 1e6;
    for (int step = 0; step < 120; step++) {
        const double price = sqrt(low * high);
        *(choose(cost, errors, num_layers, price, shares) > 1.0 ? &low : &high) = price;
    }
    const double mean = choose(cost, errors, num_layers, high, shares); /* at most 1; steps leave a little over */
    for (uint32_t l = 0; l < num_layers && count != 0; l++)
        if (!(errors[l] < 0.0))
            shares[l] /= mean;
    free(cost);
    free(logs);
    return AKV_OK;
}
