/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fingerprint.c - which model is this? Cheap (a few hundred kilobytes are read, whatever the model's size), yet any
 * other weights, tokenizer, shape or rotary setting gives another answer: a compressed cache only makes sense to its
 * own model.
 */
#include "host.h"

#include <gguf.h>
#include <stdio.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { SAMPLE_BYTES = 256 };

static void hash_text(XXH3_state_t *state, const char *text)
{
    const uint64_t bytes = text ? strlen(text) : 0; /* the length keeps "ab","c" apart from "a","bc" */
    XXH3_128bits_update(state, &bytes, sizeof bytes);
    XXH3_128bits_update(state, text ? text : "", (size_t)bytes);
}

/* Names, types, shapes, and three samples of each tensor. The first file of a split model stands for all of them. */
static akv_status hash_tensors(XXH3_state_t *state, const char *path, akv_diag *diag)
{
    const struct gguf_init_params params = {.no_alloc = true, .ctx = NULL};
    struct gguf_context *gguf = gguf_init_from_file(path, params);
    FILE *file = gguf ? fopen(path, "rb") : NULL;
    if (!file) {
        if (gguf)
            gguf_free(gguf);
        return akvl_fail(diag, AKV_E_IO, "cannot read the tensor table of \"%s\"", path);
    }
    akv_status status = AKV_OK;
    const uint64_t base = gguf_get_data_offset(gguf);
    const int64_t count = gguf_get_n_tensors(gguf);
    for (int64_t i = 0; i < count && status == AKV_OK; i++) {
        const uint64_t bytes = gguf_get_tensor_size(gguf, i), start = base + gguf_get_tensor_offset(gguf, i);
        const uint32_t type = (uint32_t)gguf_get_tensor_type(gguf, i);
        hash_text(state, gguf_get_tensor_name(gguf, i));
        XXH3_128bits_update(state, &bytes, sizeof bytes);
        XXH3_128bits_update(state, &type, sizeof type);
        const uint64_t length = bytes < SAMPLE_BYTES ? bytes : SAMPLE_BYTES;
        const uint64_t offsets[3] = {0, (bytes - length) / 2, bytes - length};
        for (int s = 0; s < 3; s++) {
            unsigned char sample[SAMPLE_BYTES];
            if (fseeko(file, (off_t)(start + offsets[s]), SEEK_SET) != 0 || fread(sample, 1, length, file) != length) {
                status = akvl_fail(diag, AKV_E_IO, "\"%s\" ends inside tensor %s", path, gguf_get_tensor_name(gguf, i));
                break;
            }
            XXH3_128bits_update(state, sample, length);
        }
    }
    fclose(file);
    gguf_free(gguf);
    return status;
}

/* Strings of any length: libllama says how long, then they are read again. */
static void hash_metadata(XXH3_state_t *state, const struct llama_model *model)
{
    char fixed[512];
    const int32_t count = llama_model_meta_count(model);
    for (int32_t i = 0; i < count; i++) {
        llama_model_meta_key_by_index(model, i, fixed, sizeof fixed);
        hash_text(state, fixed);
        const int32_t length = llama_model_meta_val_str_by_index(model, i, fixed, sizeof fixed);
        char *value = fixed;
        if (length >= (int32_t)sizeof fixed) {
            char *longer = akvl_new((size_t)length + 1, 1);
            if (longer) {
                llama_model_meta_val_str_by_index(model, i, longer, (size_t)length + 1);
                value = longer;
            }
        }
        hash_text(state, value);
        if (value != fixed)
            free(value);
    }
}

akv_status akvl_fingerprint(akv_llama *host, akv_diag *diag)
{
    XXH3_state_t *state = XXH3_createState();
    if (!state)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the model's fingerprint");
    XXH3_128bits_reset(state);
    hash_metadata(state, host->model);
    const bool has_texts = llama_vocab_type(host->vocab) != LLAMA_VOCAB_TYPE_NONE;
    for (int32_t i = 0; has_texts && i < llama_vocab_n_tokens(host->vocab); i++)
        hash_text(state, llama_vocab_get_text(host->vocab, i));
    const akv_status status = hash_tensors(state, host->options.model_path, diag);
    if (status == AKV_OK) {
        akv_llama_fingerprint *f = &host->info.fingerprint;
        memset(f, 0, sizeof *f);
        f->num_layers = host->info.num_layers;
        f->num_heads = host->info.num_heads;
        f->num_kv_heads = host->info.num_kv_heads;
        f->embedding_dim = (uint32_t)llama_model_n_embd(host->model);
        f->vocab_tokens = host->info.vocab_tokens;
        f->rope_type = (int32_t)llama_model_rope_type(host->model);
        f->weight_bytes = host->info.weight_bytes;
        const XXH128_hash_t hash = XXH3_128bits_digest(state);
        f->hash[0] = hash.low64;
        f->hash[1] = hash.high64;
        snprintf(f->description, sizeof f->description, "%.*s", (int)sizeof f->description - 1, host->info.description);
    }
    XXH3_freeState(state);
    return status;
}

akv_status akv_llama_check_fingerprint(const akv_llama *host, const akv_llama_fingerprint *made, akv_diag *diag)
{
    if (!host || !made)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host and fingerprint must not be NULL");
    const akv_llama_fingerprint *mine = &host->info.fingerprint;
    char theirs[sizeof made->description];
    memcpy(theirs, made->description, sizeof theirs); /* may come from a file: not necessarily terminated */
    theirs[sizeof theirs - 1] = 0;
    const struct {
        const char *name;
        uint64_t mine;
        uint64_t made;
    } fields[] = {
        {"number of layers", mine->num_layers, made->num_layers},
        {"number of attention heads", mine->num_heads, made->num_heads},
        {"number of key/value heads", mine->num_kv_heads, made->num_kv_heads},
        {"embedding dimension", mine->embedding_dim, made->embedding_dim},
        {"vocabulary size", mine->vocab_tokens, made->vocab_tokens},
        {"rotary type", (uint64_t)(int64_t)mine->rope_type, (uint64_t)(int64_t)made->rope_type},
        {"size of the weights", mine->weight_bytes, made->weight_bytes},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].mine != fields[i].made)
            return akvl_fail(diag, AKV_E_MISMATCH,
                             "made with another model (%s): its %s is %lld, this model's (%s) is %lld", theirs,
                             fields[i].name, (long long)fields[i].made, mine->description, (long long)fields[i].mine);
    if (mine->hash[0] != made->hash[0] || mine->hash[1] != made->hash[1])
        return akvl_fail(diag, AKV_E_MISMATCH,
                         "made with another model (%s): same shape, but its weights, tokenizer or metadata differ"
                         " from this model's (%s)",
                         theirs, mine->description);
    return AKV_OK;
}
