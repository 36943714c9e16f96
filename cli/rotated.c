/* SPDX-License-Identifier: Apache-2.0 */
/* rotated.c - see rotated.h. */
#include "rotated.h"
#include "random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Positive halves of the Lloyd-Max levels of a unit Gaussian, ascending. */
static const float levels2[] = {0.452780f, 1.510418f};
static const float levels3[] = {0.245094f, 0.756005f, 1.343909f, 2.151946f};
static const float levels4[] = {0.128395f, 0.388048f, 0.656759f, 0.942340f, 1.256231f, 1.618046f, 2.069017f, 2.732590f};
static const float *const levels[] = {levels2, levels3, levels4};

uint64_t cli_rotated_bytes(uint64_t tokens, uint32_t kv_heads, uint32_t dim_k, uint32_t dim_v, uint32_t bits)
{
    const uint64_t exact = tokens < CLI_ROTATED_WINDOW ? tokens : CLI_ROTATED_WINDOW, coded = tokens - exact;
    const uint64_t codes = ((uint64_t)dim_k * bits + 7) / 8 + ((uint64_t)dim_v * bits + 7) / 8;
    return kv_heads * (coded * (codes + 4) + exact * 2 * ((uint64_t)dim_k + dim_v));
}

static float level_near(float x, uint32_t bits)
{
    const float *half = levels[bits - 2], a = fabsf(x);
    const uint32_t n = 1u << (bits - 1);
    uint32_t i = 0;
    while (i + 1 < n && a > 0.5f * (half[i] + half[i + 1]))
        i++;
    return x < 0.0f ? -half[i] : half[i];
}

/* The nearest half-precision number. */
static float as_half(float x)
{
    int exponent;
    const float fraction = frexpf(x, &exponent);
    if (x == 0.0f || exponent < -13)
        return rintf(x * 0x1p24f) * 0x1p-24f;
    const float rounded = ldexpf(rintf(fraction * 2048.0f), exponent - 11);
    return rounded > 65504.0f ? 65504.0f : rounded < -65504.0f ? -65504.0f : rounded;
}

/* Orthonormal Walsh-Hadamard transform of each block, in place; its own inverse. */
static void hadamard(float *x, uint32_t dim)
{
    const uint32_t block = dim & (~dim + 1); /* the largest power of two that divides dim */
    const float scale = 1.0f / sqrtf((float)block);
    for (uint32_t b = 0; b < dim; b += block)
        for (uint32_t half = 1; half < block; half *= 2)
            for (uint32_t i = b; i < b + block; i += 2 * half)
                for (uint32_t j = i; j < i + half; j++) {
                    const float u = x[j], v = x[j + half];
                    x[j] = u + v;
                    x[j + half] = u - v;
                }
    for (uint32_t i = 0; i < dim; i++)
        x[i] *= scale;
}

void cli_rotated_vector(float *x, uint32_t dim, uint32_t bits, const float *signs, float *scratch)
{
    double energy = 0.0;
    for (uint32_t i = 0; i < dim; i++)
        x[i] *= signs[i];
    hadamard(x, dim);
    for (uint32_t i = 0; i < dim; i++)
        energy += (double)x[i] * x[i];
    double scale = sqrt(energy / dim);
    for (int round = 0; round < 3; round++) {
        const float inverse = (float)(1.0 / (scale > 1e-20 ? scale : 1e-20));
        double product = 0.0, square = 0.0;
        for (uint32_t i = 0; i < dim; i++) {
            scratch[i] = level_near(x[i] * inverse, bits);
            product += (double)x[i] * scratch[i];
            square += (double)scratch[i] * scratch[i];
        }
        scale = product / square;
    }
    const float stored = as_half((float)scale);
    for (uint32_t i = 0; i < dim; i++)
        x[i] = scratch[i] * stored;
    hadamard(x, dim);
    for (uint32_t i = 0; i < dim; i++)
        x[i] *= signs[i];
}

/* ---------------------------------------------------------------------------------------------------- one layer */

typedef struct job {
    const akv_segment *exact;
    uint64_t tokens;
    uint32_t dim[2];
    uint32_t bits;
    float *data[2];  /* [H, S, dim] keys, values */
    float *signs[2]; /* [dim] */
    float *scratch;  /* [H * 2, largest dim] */
    uint32_t widest;
    akv_status *status; /* [H * 2] */
} job;

/* Task: one side of one head. */
static void quantise(void *arg, size_t task)
{
    const job *j = arg;
    const uint32_t side = task & 1u, head = (uint32_t)(task / 2), dim = j->dim[side];
    float *rows = j->data[side] + head * j->tokens * dim, *scratch = j->scratch + task * j->widest;
    akv_diag diag;
    j->status[task] =
        akv_segment_decode(j->exact, head, 0, j->tokens, side == 0 ? rows : NULL, side == 1 ? rows : NULL, &diag);
    if (j->status[task] != AKV_OK)
        return;
    for (uint64_t t = 0; t + CLI_ROTATED_WINDOW < j->tokens; t++)
        cli_rotated_vector(rows + t * dim, dim, j->bits, j->signs[side], scratch);
}

static float *random_signs(uint32_t dim, uint64_t state)
{
    float *signs = malloc(dim * sizeof *signs);
    for (uint32_t i = 0; signs != NULL && i < dim; i++)
        signs[i] = cli_random(&state) & 1 ? 1.0f : -1.0f;
    return signs;
}

static akv_status run(cli_rotated *peer, job *j, const akv_layer *layer, const akv_config *config, akv_segment **out,
                      akv_diag *diag)
{
    const uint32_t heads = layer->shape.num_kv_heads;
    const akv_executor *executor = config->executor;
    const size_t tasks = (size_t)heads * 2;
    if (executor != NULL)
        executor->parallel_for(executor->opaque, quantise, j, tasks);
    else
        for (size_t i = 0; i < tasks; i++)
            quantise(j, i);
    for (size_t i = 0; i < tasks; i++)
        if (j->status[i] != AKV_OK)
            return j->status[i];
    akv_layer read_back = *layer;
    read_back.keys = akv_tensor_contiguous(j->data[0], AKV_F32, j->tokens, j->dim[0]);
    read_back.values = akv_tensor_contiguous(j->data[1], AKV_F32, j->tokens, j->dim[1]);
    const akv_status status = akv_segment_create_dense(&read_back, config, out, diag);
    if (status == AKV_OK)
        peer->bytes += cli_rotated_bytes(j->tokens, heads, j->dim[0], j->dim[1], j->bits);
    return status;
}

akv_status cli_rotated_make(void *opaque, const akv_layer *layer, const akv_config *config, akv_segment **out,
                            akv_diag *diag)
{
    cli_rotated *peer = opaque;
    const akv_shape *s = &layer->shape;
    akv_segment *exact = NULL;
    akv_status status = akv_segment_create_dense(layer, config, &exact, diag);
    if (status != AKV_OK)
        return status;
    job j = {.exact = exact, .tokens = s->num_tokens, .dim = {s->head_dim_k, s->head_dim_v}, .bits = peer->bits};
    j.widest = j.dim[0] > j.dim[1] ? j.dim[0] : j.dim[1];
    const size_t heads = s->num_kv_heads, rows = heads * (size_t)s->num_tokens;
    for (int side = 0; side < 2; side++) {
        j.data[side] = malloc(rows * j.dim[side] * sizeof(float));
        j.signs[side] = random_signs(j.dim[side], peer->seed * 2654435761u + (uint64_t)layer->layer_index);
    }
    j.scratch = malloc(heads * 2 * j.widest * sizeof(float));
    j.status = calloc(heads * 2, sizeof *j.status);
    if (j.data[0] && j.data[1] && j.signs[0] && j.signs[1] && j.scratch && j.status) {
        status = run(peer, &j, layer, config, out, diag);
    } else {
        status = AKV_E_NO_MEMORY;
        if (diag != NULL)
            snprintf(diag->message, sizeof diag->message, "no memory for %zu vectors", rows * 2);
    }
    for (int side = 0; side < 2; side++) {
        free(j.data[side]);
        free(j.signs[side]);
    }
    free(j.scratch);
    free(j.status);
    akv_segment_release(exact);
    return status;
}
