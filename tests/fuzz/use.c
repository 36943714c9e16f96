/* SPDX-License-Identifier: Apache-2.0 */
/* use.c - the life of a segment that opened: everything a program could do to it. */
#include "fuzz.h"

#include <math.h>

uint8_t *fuzz_copy(const uint8_t *data, size_t size)
{
    void *copy = NULL;
    HOLDS(posix_memalign(&copy, 64, size != 0 ? size : 1) == 0, "no memory");
    memcpy(copy, data, size);
    return copy;
}

static void decode(const akv_segment *segment, const akv_shape *s)
{
    enum { STEP = 48 };
    akv_diag diag = {AKV_OK, ""};
    float *k = malloc(STEP * sizeof *k * s->head_dim_k), *v = malloc(STEP * sizeof *v * s->head_dim_v);
    HOLDS(k && v, "no memory");
    for (uint32_t head = 0; head < s->num_kv_heads; head++) {
        for (uint64_t at = 0; at < s->num_tokens; at += STEP) {
            const uint64_t left = s->num_tokens - at, n = left < STEP ? left : STEP;
            const akv_status status = akv_segment_decode(segment, head, at, n, k, v, &diag);
            HOLDS(status == AKV_OK, "decode: %s", diag.message);
        }
    }
    free(k);
    free(v);
}

static void attend(const akv_segment *segment, const akv_shape *s)
{
    const uint32_t heads = s->num_kv_heads * s->gqa_group;
    akv_diag diag = {AKV_OK, ""};
    akv_attend_params p;
    akv_attend_params_init(&p);
    p.num_kv_heads = s->num_kv_heads;
    p.gqa_group = s->gqa_group;
    p.head_dim_k = s->head_dim_k;
    p.head_dim_v = s->head_dim_v;
    p.num_queries = 1;
    p.sm_scale = 0.125;
    p.segments = &segment;
    p.num_segments = 1;
    float *q = malloc((size_t)heads * s->head_dim_k * sizeof *q);
    p.out = malloc((size_t)heads * s->head_dim_v * sizeof *p.out);
    HOLDS(q && p.out, "no memory");
    for (size_t i = 0; i < (size_t)heads * s->head_dim_k; i++)
        q[i] = (float)(i % 7) - 3.0f;
    p.queries = akv_tensor_contiguous(q, AKV_F32, 1, s->head_dim_k);
    p.out_stride_head = p.out_stride_token = s->head_dim_v;
    size_t bytes = 0;
    akv_status status = akv_attend_workspace_bytes(&p, &bytes, &diag);
    SAYS_WHY(status, diag);
    if (status == AKV_OK && bytes < (size_t)1 << 30) {
        void *workspace = NULL;
        HOLDS(posix_memalign(&workspace, 64, bytes != 0 ? bytes : 1) == 0, "no memory");
        status = akv_attend(&p, workspace, bytes, &diag);
        SAYS_WHY(status, diag);
        free(workspace);
    }
    free(q);
    free(p.out);
}

void fuzz_use_segment(const akv_segment *segment)
{
    akv_diag diag = {AKV_OK, ""};
    akv_segment_info info;
    akv_segment_info_init(&info);
    HOLDS(akv_segment_get_info(segment, &info, &diag) == AKV_OK, "info: %s", diag.message);
    const akv_shape *s = &info.shape;
    HOLDS(s->num_tokens >= 1 && s->num_kv_heads >= 1 && s->gqa_group >= 1, "an empty shape");
    if ((uint64_t)s->num_kv_heads * s->gqa_group * (s->head_dim_k + s->head_dim_v) > 1u << 22)
        return; /* many made-up query heads only cost time */
    decode(segment, s);
    attend(segment, s);
}

void fuzz_look_at_segment(const akv_segment *segment)
{
    enum { FEW = 3 };
    akv_diag diag = {AKV_OK, ""};
    akv_segment_info info;
    akv_segment_info_init(&info);
    HOLDS(akv_segment_get_info(segment, &info, &diag) == AKV_OK, "info: %s", diag.message);
    const akv_shape *s = &info.shape;
    HOLDS(s->num_tokens >= 1 && s->num_kv_heads >= 1 && s->gqa_group >= 1, "an empty shape");
    const uint64_t n = s->num_tokens < FEW ? s->num_tokens : FEW;
    float *k = malloc(FEW * sizeof *k * s->head_dim_k), *v = malloc(FEW * sizeof *v * s->head_dim_v);
    HOLDS(k && v, "no memory");
    for (int end = 0; end < 2; end++) {
        const uint32_t head = end ? s->num_kv_heads - 1 : 0;
        const akv_status status = akv_segment_decode(segment, head, end ? s->num_tokens - n : 0, n, k, v, &diag);
        HOLDS(status == AKV_OK, "decode: %s", diag.message);
    }
    free(k);
    free(v);
}

void fuzz_rewrite_segment(akv_segment *segment, uint64_t pick)
{
    akv_diag diag = {AKV_OK, ""};
    akv_segment_info info;
    akv_segment_info_init(&info);
    HOLDS(akv_segment_get_info(segment, &info, &diag) == AKV_OK, "info: %s", diag.message);
    akv_segment *out = NULL;
    const uint64_t budget = 1 + info.bytes.total * (pick % 64) / 48;
    akv_status status = akv_segment_retarget(segment, budget, NULL, &out, NULL, &diag);
    SAYS_WHY(status, diag);
    if (status == AKV_OK) {
        akv_segment_info smaller;
        akv_segment_info_init(&smaller);
        HOLDS(akv_segment_get_info(out, &smaller, &diag) == AKV_OK, "info: %s", diag.message);
        HOLDS(smaller.bytes.total <= budget, "%llu bytes of %llu", (unsigned long long)smaller.bytes.total,
              (unsigned long long)budget);
        fuzz_use_segment(out);
        akv_segment_release(out);
    }
    /* with queries, unless that would be too much work */
    const akv_shape *s = &info.shape;
    const uint64_t rows = (uint64_t)s->num_kv_heads * s->gqa_group;
    if (rows * s->head_dim_k <= 4096 && rows * s->num_tokens <= 65536) {
        float *q = calloc(rows * 2 * s->head_dim_k, sizeof *q);
        HOLDS(q != NULL, "no memory");
        for (uint64_t i = 0; i < rows * 2 * s->head_dim_k; i++)
            q[i] = (float)((int)((pick + i * 37) % 23) - 11) * 0.25f;
        const akv_tensor queries = akv_tensor_contiguous(q, AKV_F32, 2, s->head_dim_k);
        out = NULL;
        diag = (akv_diag){AKV_OK, ""};
        status = akv_segment_retarget_observed(segment, budget, &queries, 2, NULL, &out, NULL, &diag);
        SAYS_WHY(status, diag);
        if (status == AKV_OK) {
            fuzz_use_segment(out);
            akv_segment_release(out);
        }
        free(q);
    }
    out = NULL;
    diag = (akv_diag){AKV_OK, ""};
    const uint64_t tokens = 1 + (pick >> 8) % info.shape.num_tokens;
    status = akv_segment_cut(segment, tokens, NULL, &out, &diag);
    SAYS_WHY(status, diag);
    if (status == AKV_OK) {
        fuzz_use_segment(out);
        akv_segment_release(out);
    }
}
