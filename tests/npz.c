/* SPDX-License-Identifier: Apache-2.0 */
/* npz.c - see npz.h. A .npz is a zip of .npy files; only stored (uncompressed) members of known type are read. */
#include "npz.h"

#include <stdio.h>
#include <stdlib.h>

static uint32_t le(const uint8_t *p, int bytes)
{
    uint32_t x = 0;
    for (int i = 0; i < bytes; i++)
        x |= (uint32_t)p[i] << (8 * i);
    return x;
}

bool npz_open(const char *path, npz *out)
{
    memset(out, 0, sizeof *out);
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        return false;
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    rewind(f);
    out->bytes = must(malloc((size_t)size + 1));
    out->size = (uint64_t)size;
    bool ok = fread(out->bytes, 1, (size_t)size, f) == (size_t)size;
    fclose(f);
    if (!ok)
        npz_close(out);
    return ok;
}

void npz_close(npz *file)
{
    free(file->bytes);
    file->bytes = NULL;
}

static bool parse_npy(const uint8_t *p, npz_array *out)
{
    if (memcmp(p, "\x93NUMPY", 6) != 0)
        return false;
    uint32_t head_bytes = le(p + 8, 2);
    const char *head = (const char *)p + 10, *shape = strstr(head, "'shape': (");
    if (shape == NULL || shape > head + head_bytes)
        return false;
    out->kind = strstr(head, "'<f2'") != NULL && strstr(head, "'<f2'") < head + head_bytes ? 'f' : 'i';
    out->rank = 0;
    for (const char *s = shape + 10; *s != ')' && out->rank < 4;) {
        char *end;
        unsigned long n = strtoul(s, &end, 10);
        if (end == s)
            break;
        out->shape[out->rank++] = n;
        s = end;
        while (*s == ',' || *s == ' ')
            s++;
    }
    out->data = p + 10 + head_bytes;
    return true;
}

bool npz_find(const npz *file, const char *name, npz_array *out)
{
    /* the end record, then the central directory, then the member's local header */
    if (file->size < 22)
        return false;
    const uint8_t *end = file->bytes + file->size - 22;
    while (end > file->bytes && le(end, 4) != 0x06054b50)
        end--;
    const uint8_t *entry = file->bytes + le(end + 16, 4);
    for (uint32_t i = 0; i < le(end + 10, 2) && le(entry, 4) == 0x02014b50; i++) {
        uint32_t name_bytes = le(entry + 28, 2);
        bool match =
            name_bytes == strlen(name) + 4 && memcmp(entry + 46, name, strlen(name)) == 0 && le(entry + 10, 2) == 0;
        if (match) {
            const uint8_t *local = file->bytes + le(entry + 42, 4);
            return parse_npy(local + 30 + le(local + 26, 2) + le(local + 28, 2), out);
        }
        entry += 46 + name_bytes + le(entry + 30, 2) + le(entry + 32, 2);
    }
    return false;
}

static double element(const npz_array *a, uint64_t at)
{
    uint16_t h;
    memcpy(&h, (const uint8_t *)a->data + at * 2, 2);
    return akv_f16_to_f32(h);
}

bool fixture_from_npz(const char *path, fixture *f)
{
    npz file;
    npz_array K, V, Q, first;
    memset(f, 0, sizeof *f);
    if (!npz_open(path, &file))
        return false;
    if (!npz_find(&file, "K", &K) || !npz_find(&file, "V", &V) || !npz_find(&file, "Q", &Q)) {
        npz_close(&file);
        return false;
    }
    int32_t start = 0;
    if (npz_find(&file, "first", &first))
        memcpy(&start, first.data, 4);
    uint64_t H = K.shape[0], S = K.shape[1], W = Q.shape[1];
    uint32_t d = (uint32_t)K.shape[2];
    akv_layer *l = &f->layer;
    akv_layer_init(l);
    akv_config_init(&f->config);
    f->config.profile = AKV_PROFILE_PAPER;
    l->shape.num_tokens = S;
    l->shape.num_kv_heads = (uint32_t)H;
    l->shape.gqa_group = (uint32_t)(Q.shape[0] / H);
    l->shape.head_dim_k = l->shape.head_dim_v = l->shape.rotary_dim = d;
    l->shape.num_queries = (uint32_t)W;
    l->shape.dtype = AKV_F16;
    l->first_position = start;
    f->inv_freq = must(malloc(d / 2 * sizeof(double)));
    for (uint32_t j = 0; j < d / 2; j++)
        f->inv_freq[j] = pow(1e6, -2.0 * j / d);
    l->rope = (akv_rope){d, AKV_ROPE_HALF_SPLIT, 1, f->inv_freq};
    l->sm_scale = 1 / sqrt((double)d);
    l->keys = tensor_make(H, S, d, AKV_F16, LAY_CONTIGUOUS, &f->memory[0]);
    l->values = tensor_make(H, S, d, AKV_F16, LAY_TRANSPOSED, &f->memory[1]);
    l->queries = tensor_make(Q.shape[0], W, d, AKV_F32, LAY_TOKEN_MAJOR, &f->memory[2]);
    double *x = must(malloc(d * sizeof *x));
    for (uint64_t h = 0; h < H; h++)
        for (uint64_t p = 0; p < S; p++) {
            for (uint32_t i = 0; i < d; i++) {
                x[i] = element(&K, (h * S + p) * d + i);
                tensor_set(&l->values, h, p, i, element(&V, (h * S + p) * d + i));
            }
            ref_rope_rotate(&l->rope, (double)start + (double)p, x);
            for (uint32_t i = 0; i < d; i++)
                tensor_set(&l->keys, h, p, i, x[i]);
        }
    for (uint64_t h = 0; h < Q.shape[0]; h++)
        for (uint64_t r = 0; r < W; r++)
            for (uint32_t i = 0; i < d; i++)
                tensor_set(&l->queries, h, r, i, element(&Q, (h * W + r) * d + i));
    free(x);
    npz_close(&file);
    return true;
}
