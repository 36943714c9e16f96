/* SPDX-License-Identifier: Apache-2.0 */
/* dense.c - segments that keep every token exactly, and the input checks that all segment makers share. */
#include "codec/codec.h"

#define MOST_SAMPLED 65536u

akv_status akv_check_layer(const akv_layer *layer, bool need_queries, akv_diag *diag)
{
    if (layer == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "layer must not be NULL");
    if (layer->struct_size < sizeof *layer)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "akv_layer has struct_size %zu; call akv_layer_init first",
                        layer->struct_size);
    const akv_shape *s = &layer->shape;
    AKV_TRY(akv_check_shape(s, diag));
    const struct {
        const akv_tensor *tensor;
        const char *name;
        bool needed;
    } tensors[] = {
        {&layer->keys, "keys", true}, {&layer->values, "values", true}, {&layer->queries, "queries", need_queries}};
    for (int i = 0; i < 3; i++) {
        if (!tensors[i].needed)
            continue;
        if (tensors[i].tensor->data == NULL)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "%s has no data; it must not be NULL", tensors[i].name);
        if ((unsigned)tensors[i].tensor->dtype > AKV_BF16)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "%s has dtype %d; it must be AKV_F32, AKV_F16 or AKV_BF16",
                            tensors[i].name, (int)tensors[i].tensor->dtype);
    }
    if (need_queries && layer->sampled.data != NULL && layer->num_sampled > 0) {
        if (layer->sampled_positions == NULL)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                            "sampled_positions is NULL; the %u sampled queries need their positions",
                            layer->num_sampled);
        if ((unsigned)layer->sampled.dtype > AKV_BF16)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                            "sampled has dtype %d; it must be AKV_F32, AKV_F16 or AKV_BF16", (int)layer->sampled.dtype);
        if (layer->num_sampled > MOST_SAMPLED)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                            "num_sampled is %u; at most %u are used, a few dozen are enough", layer->num_sampled,
                            MOST_SAMPLED);
    }
    if (layer->rope.rotary_dim != s->rotary_dim)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "rope.rotary_dim is %u but shape.rotary_dim is %u; they must agree", layer->rope.rotary_dim,
                        s->rotary_dim);
    if (s->rotary_dim != 0) {
        if (layer->rope.inv_freq == NULL)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "rope.inv_freq is NULL; %u frequencies are needed",
                            s->rotary_dim / 2);
        for (uint32_t j = 0; j < s->rotary_dim / 2; j++)
            if (!isfinite(layer->rope.inv_freq[j]))
                return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "rope.inv_freq[%u] is not finite", j);
        if ((unsigned)layer->rope.style > AKV_ROPE_INTERLEAVED)
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                            "rope.style is %d; it must be half-split (0) or interleaved (1)", (int)layer->rope.style);
        if (!(layer->rope.magnitude > 0) || !isfinite(layer->rope.magnitude))
            return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "rope.magnitude is %g; it must be positive (1 without YaRN)",
                            layer->rope.magnitude);
    }
    if (!isfinite(layer->sm_scale) || !(layer->logit_softcap >= 0) || !isfinite(layer->logit_softcap))
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT,
                        "sm_scale is %g and logit_softcap %g; both must be finite, the cap >= 0", layer->sm_scale,
                        layer->logit_softcap);
    if (layer->positions != NULL) {
        for (uint64_t t = 1; t < s->num_tokens; t++)
            if (layer->positions[t] <= layer->positions[t - 1])
                return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "positions must increase: token %llu is at %d after %d",
                                (unsigned long long)t, layer->positions[t], layer->positions[t - 1]);
    } else if ((int64_t)layer->first_position + (int64_t)s->num_tokens - 1 > INT32_MAX) {
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "the last position is past 2^31 - 1");
    }
    return AKV_OK;
}

bool akv_positions_consecutive(const akv_layer *layer)
{
    if (layer->positions == NULL)
        return true;
    uint64_t last = layer->shape.num_tokens - 1;
    return (int64_t)layer->positions[last] - layer->positions[0] == (int64_t)last;
}

akv_dtype akv_layer_dtype(const akv_layer *layer)
{
    return layer->keys.dtype == layer->values.dtype ? layer->keys.dtype : AKV_F32;
}

typedef struct akv_finite_job {
    const akv_tensor *tensor;
    uint64_t tokens;
    uint32_t dim;
    atomic_uint_fast64_t *bad; /* smallest (token * dim + i) of this head, or UINT64_MAX */
} akv_finite_job;

static void check_head(void *opaque, size_t head)
{
    akv_finite_job *job = opaque;
    float row[AKV_MAX_HEAD_DIM];
    for (uint64_t t = 0; t < job->tokens; t++) {
        akv_tensor_row(job->tensor, (int64_t)head, (int64_t)t, job->dim, row);
        float sum = 0.0f; /* 0 * x is NaN for every NaN and infinity */
        for (uint32_t i = 0; i < job->dim; i++)
            sum += 0.0f * row[i];
        if (sum == 0.0f)
            continue;
        for (uint32_t i = 0; i < job->dim; i++)
            if (!isfinite(row[i])) {
                atomic_store(&job->bad[head], t * job->dim + i);
                return;
            }
    }
}

akv_status akv_check_finite(const akv_layer *layer, const akv_tensor *tensor, const char *name, uint32_t heads,
                            uint64_t tokens, uint32_t dim, const akv_config *config, akv_diag *diag)
{
    const akv_allocator *allocator = config ? config->allocator : NULL;
    size_t bytes = heads * sizeof(atomic_uint_fast64_t);
    akv_finite_job job = {tensor, tokens, dim, akv_alloc(allocator, bytes)};
    if (job.bad == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for %zu bytes of scratch", bytes);
    for (uint32_t h = 0; h < heads; h++)
        atomic_init(&job.bad[h], UINT64_MAX);
    akv_parallel_for(config ? config->executor : NULL, check_head, &job, heads);
    akv_status status = AKV_OK;
    for (uint32_t h = 0; h < heads && status == AKV_OK; h++) {
        uint64_t at = atomic_load(&job.bad[h]);
        if (at != UINT64_MAX)
            status =
                akv_fail(diag, AKV_E_NON_FINITE, "layer %d: %s hold NaN or infinity at head %u, token %llu, dim %llu",
                         layer->layer_index, name, h, (unsigned long long)(at / dim), (unsigned long long)(at % dim));
    }
    akv_free(allocator, job.bad, bytes);
    return status;
}

void akv_header_from_layer(akv_header *h, const akv_layer *layer)
{
    const akv_shape *s = &layer->shape;
    memset(h, 0, sizeof *h);
    h->magic = AKV_SEGMENT_MAGIC;
    h->major = AKV_SEGMENT_MAJOR;
    h->minor = AKV_SEGMENT_MINOR;
    h->header_bytes = sizeof *h;
    h->num_sections = AKV_SEC_COUNT;
    h->num_tokens = s->num_tokens;
    h->num_kv_heads = s->num_kv_heads;
    h->gqa_group = s->gqa_group;
    h->head_dim[AKV_SIDE_K] = s->head_dim_k;
    h->head_dim[AKV_SIDE_V] = s->head_dim_v;
    h->num_queries = s->num_queries;
    h->rotary_dim = s->rotary_dim;
    h->rope_style = (uint32_t)layer->rope.style;
    h->magnitude = s->rotary_dim != 0 ? layer->rope.magnitude : 1.0;
    h->sm_scale = layer->sm_scale;
    h->logit_softcap = layer->logit_softcap;
    h->dense_dtype = (uint32_t)akv_layer_dtype(layer);
    h->first_position = layer->positions ? layer->positions[0] : layer->first_position;
    h->last_position = layer->positions ? layer->positions[s->num_tokens - 1]
                                        : (int32_t)(layer->first_position + (int64_t)s->num_tokens - 1);
}

typedef struct akv_copy_job {
    const akv_layer *layer;
    const akv_header *header;
    uint8_t *blob;
    const uint32_t *kept; /* [H, n] token of each kept row, or NULL for all */
} akv_copy_job;

/* Copy one head of one side; task = head * 2 + side. */
static void copy_head(void *opaque, size_t task)
{
    const akv_copy_job *job = opaque;
    const akv_header *h = job->header;
    const uint32_t head = (uint32_t)(task / 2);
    const int side = (int)(task % 2);
    const akv_tensor *t = side == AKV_SIDE_K ? &job->layer->keys : &job->layer->values;
    const uint32_t dim = h->head_dim[side];
    const bool as_f32 = h->dense_dtype == AKV_F32;
    uint8_t *out = job->blob + h->sections[AKV_SEC_DENSE + side].offset +
                   head * h->num_tokens * dim * akv_dtype_bytes((akv_dtype)h->dense_dtype);
    for (uint64_t i = 0; i < h->num_tokens; i++) {
        int64_t token = job->kept ? (int64_t)job->kept[head * h->num_tokens + i] : (int64_t)i;
        if (as_f32) {
            akv_tensor_row(t, head, token, dim, (float *)(void *)out + i * dim);
            continue;
        }
        const uint16_t *in = (const uint16_t *)t->data + head * t->stride_head + token * t->stride_token;
        for (uint32_t d = 0; d < dim; d++)
            ((uint16_t *)(void *)out)[i * dim + d] = in[d * t->stride_dim];
    }
}

akv_status akv_make_dense(const akv_layer *layer, const akv_config *config, akv_dense_reason reason,
                          const uint32_t *kept, uint64_t num_kept, uint64_t budget_bytes, akv_segment **out,
                          akv_diag *diag)
{
    const akv_shape *s = &layer->shape;
    if (kept == NULL) {
        AKV_TRY(
            akv_check_finite(layer, &layer->keys, "keys", s->num_kv_heads, s->num_tokens, s->head_dim_k, config, diag));
        AKV_TRY(akv_check_finite(layer, &layer->values, "values", s->num_kv_heads, s->num_tokens, s->head_dim_v, config,
                                 diag));
    }
    akv_header h;
    akv_header_from_layer(&h, layer);
    h.kind = AKV_SEGMENT_DENSE;
    h.dense_reason = (uint32_t)reason;
    h.budget_bytes = budget_bytes;
    if (kept != NULL)
        h.num_tokens = num_kept;
    akv_layout_sections(&h, false);
    akv_segment *segment = akv_segment_new(config ? config->allocator : NULL, h.total_bytes);
    if (segment == NULL)
        return akv_fail(diag, AKV_E_NO_MEMORY, "no memory for a segment of %llu bytes",
                        (unsigned long long)h.total_bytes);
    akv_copy_job job = {layer, &h, (uint8_t *)segment + AKV_SEGMENT_OBJECT_BYTES, kept};
    memcpy(job.blob, &h, sizeof h);
    akv_parallel_for(config ? config->executor : NULL, copy_head, &job, (size_t)s->num_kv_heads * 2);
    *out = segment;
    return AKV_OK;
}

akv_status akv_segment_create_dense(const akv_layer *layer, const akv_config *config, akv_segment **out, akv_diag *diag)
{
    if (out == NULL)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "out must not be NULL");
    if (config != NULL && config->struct_size < sizeof *config)
        return akv_fail(diag, AKV_E_INVALID_ARGUMENT, "akv_config has struct_size %zu; call akv_config_init first",
                        config->struct_size);
    AKV_TRY(akv_check_layer(layer, false, diag));
    return akv_make_dense(layer, config, AKV_DENSE_REQUESTED, NULL, 0, 0, out, diag);
}
