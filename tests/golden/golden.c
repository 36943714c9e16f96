/* SPDX-License-Identifier: Apache-2.0 */
/* golden.c - see golden.h; shared by the generator and the test. */
#include "golden.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint8_t *golden_read(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    long size = -1;
    if (file == NULL || fseek(file, 0, SEEK_END) != 0 || (size = ftell(file)) < 0 || fseek(file, 0, SEEK_SET) != 0) {
        perror(path);
        exit(2);
    }
    uint8_t *data = must(aligned_alloc(64, ((size_t)size + 64) / 64 * 64));
    if (fread(data, 1, (size_t)size, file) != (size_t)size) {
        perror(path);
        exit(2);
    }
    fclose(file);
    *bytes = (size_t)size;
    return data;
}

static bool ends_with(const char *name, const char *end)
{
    const size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

static akv_status open_segments(const char *name, const akv_document *document, golden_visit visit, void *opaque,
                                akv_diag *diag)
{
    akv_document_parts parts;
    akv_document_parts_init(&parts);
    akv_status status = akv_document_get_parts(document, &parts, diag);
    for (uint32_t i = 0; status == AKV_OK && i < parts.num_segments; i++) {
        akv_segment *segment = NULL;
        status = akv_document_open_segment(document, i, 0, NULL, &segment, diag);
        if (status == AKV_OK && visit != NULL)
            visit(name, segment, opaque);
        akv_segment_release(segment);
    }
    return status;
}

akv_status golden_open(const char *name, const void *data, size_t bytes, golden_visit visit, void *opaque,
                       akv_diag *diag)
{
    if (ends_with(name, ".akvs")) {
        akv_segment *segment = NULL;
        const akv_status status = akv_segment_open(data, bytes, 0, NULL, &segment, diag);
        if (status == AKV_OK && visit != NULL)
            visit(name, segment, opaque);
        akv_segment_release(segment);
        return status;
    }
    akv_document *document = NULL;
    akv_status status = akv_document_open(data, bytes, NULL, &document, diag);
    if (status == AKV_OK)
        status = akv_document_verify(document, diag);
    if (status == AKV_OK)
        status = open_segments(name, document, visit, opaque, diag);
    akv_document_close(document);
    return status;
}

void golden_attend_make(const akv_segment *segment, const akv_segment *const *list, golden_attend *a)
{
    akv_segment_info info;
    akv_rng rng = {77};
    akv_segment_info_init(&info);
    akv_segment_get_info(segment, &info, NULL);
    akv_attend_params *p = &a->params;
    akv_attend_params_init(p);
    p->num_kv_heads = info.shape.num_kv_heads;
    p->gqa_group = info.shape.gqa_group;
    p->head_dim_k = info.shape.head_dim_k;
    p->head_dim_v = info.shape.head_dim_v;
    p->num_queries = 1;
    p->segments = list;
    p->num_segments = 1;
    p->sm_scale = info.sm_scale;
    p->logit_softcap = info.logit_softcap;
    a->rows = (uint64_t)p->num_kv_heads * p->gqa_group;
    p->queries = tensor_make(a->rows, 1, p->head_dim_k, AKV_F32, LAY_CONTIGUOUS, &a->queries);
    for (uint64_t i = 0; i < a->rows; i++)
        for (uint32_t c = 0; c < p->head_dim_k; c++)
            tensor_set(&p->queries, i, 0, c, 2 * random_unit(&rng) - 1);
    a->out = must(malloc(a->rows * p->head_dim_v * sizeof *a->out));
    p->out = a->out;
    p->out_stride_head = p->out_stride_token = p->head_dim_v;
}

void golden_attend_free(golden_attend *a)
{
    free(a->queries);
    free(a->out);
}

static double weighted(const double *x, uint64_t n, akv_rng *rng)
{
    double sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum += (2 * random_unit(rng) - 1) * x[i];
    return sum;
}

void golden_add(const akv_segment *segment, golden_figures *sum)
{
    const akv_header *h = akv_header_of(segment);
    akv_rng rng = {78};
    for (int side = 0; side < 2; side++) {
        const uint64_t n = h->num_tokens * h->head_dim[side];
        double *x = must(malloc(n * sizeof *x));
        for (uint32_t head = 0; head < h->num_kv_heads; head++) {
            must(ref_decode(segment->blob, side, head, x, NULL) ? x : NULL);
            *(side == 0 ? &sum->keys : &sum->values) += weighted(x, n, &rng);
        }
        free(x);
    }
    golden_attend a;
    const akv_segment *list[1] = {segment};
    golden_attend_make(segment, list, &a);
    double *out = must(malloc(a.rows * h->head_dim[1] * sizeof *out));
    ref_row_result *rows = must(malloc(a.rows * sizeof *rows));
    must(ref_attend(&a.params, out, rows) ? out : NULL);
    sum->attend += weighted(out, a.rows * h->head_dim[1], &rng);
    free(rows);
    free(out);
    golden_attend_free(&a);
}
