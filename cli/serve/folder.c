/* SPDX-License-Identifier: Apache-2.0 */
/*
 * folder.c - documents in a folder: ID.akv for each that is ready, read again at the next start, and spill-N-I.bin for
 * segments that had to leave memory, of this run only. No name has anything of a request in it.
 */
#include "serve.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool path_of(char *path, size_t capacity, const char *folder, const char *name)
{
    const int n = snprintf(path, capacity, "%s/%s", folder, name);
    return n > 0 && (size_t)n < capacity;
}

static bool is_document(const char *name)
{
    return strlen(name) == SERVE_ID_BYTES - 1 + 4 && strncmp(name, "doc-", 4) == 0 &&
           strspn(name + 4, "0123456789abcdef") == SERVE_ID_BYTES - 5 && strcmp(name + SERVE_ID_BYTES - 1, ".akv") == 0;
}

int serve_folder_open(const char *folder)
{
    char path[4096];
    if (folder == NULL)
        return CLI_OK;
    if (mkdir(folder, 0700) != 0 && errno != EEXIST)
        return cli_fail(CLI_IO, "cannot make the folder %s: %s", folder, strerror(errno));
    DIR *dir = opendir(folder);
    if (dir == NULL)
        return cli_fail(CLI_IO, "cannot read the folder %s: %s", folder, strerror(errno));
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        unsigned long long id;
        unsigned index;
        int end = 0;
        if (sscanf(entry->d_name, "spill-%llu-%u.bin%n", &id, &index, &end) == 2 && end > 0 &&
            entry->d_name[end] == '\0' && path_of(path, sizeof path, folder, entry->d_name))
            unlink(path);
    }
    closedir(dir);
    return CLI_OK;
}

/* ------------------------------------------------------------------------------------------------------- documents */

bool serve_folder_save(const char *folder, const serve_document *d, const akv_llama_store *store)
{
    char name[64], path[4096], created[24], keep[32];
    uint64_t bytes = 0;
    if (folder == NULL)
        return false;
    snprintf(name, sizeof name, "%s.akv", d->id);
    snprintf(created, sizeof created, "%lld", (long long)d->created);
    snprintf(keep, sizeof keep, "%.9g", d->keep_ratio);
    const akv_document_property list[] = {
        {"method", "akv"},    {"profile", "default"}, {"keep_ratio", keep},
        {"form", "chat"},     {"name", d->name},      {"owner", d->owner},
        {"created", created}, {"creator", "akv"},     {"creator_version", akv_version()}};
    if (path_of(path, sizeof path, folder, name) &&
        cli_store_write(store, list, sizeof list / sizeof list[0], path, &bytes) == CLI_OK)
        return true;
    cli_warn("%s could not be written to the folder; it lives in memory only", d->id);
    return false;
}

void serve_folder_remove(const char *folder, const char *id)
{
    char name[64], path[4096];
    if (folder == NULL)
        return;
    snprintf(name, sizeof name, "%s.akv", id);
    if (path_of(path, sizeof path, folder, name) && unlink(path) != 0 && errno != ENOENT)
        cli_warn("cannot remove %s: %s", path, strerror(errno));
}

typedef struct opened {
    cli_image image;
    akv_document *document;
    akv_segment **segments; /* copies: the file may be removed */
    uint32_t num_segments;
} opened;

static void close_opened(opened *o)
{
    for (uint32_t i = 0; o->segments != NULL && i < o->num_segments; i++)
        akv_segment_release(o->segments[i]);
    free(o->segments);
    akv_document_close(o->document);
    cli_image_free(&o->image);
}

static akv_status open_all(opened *o, const akv_llama *host, akv_document_parts *parts, akv_diag *diag)
{
    akv_llama_fingerprint made_with;
    akv_status status = akv_document_open(o->image.data, o->image.bytes, NULL, &o->document, diag);
    if (status == AKV_OK)
        status = akv_document_get_parts(o->document, parts, diag);
    if (status != AKV_OK)
        return status;
    memcpy(&made_with, &parts->model, sizeof made_with);
    status = akv_llama_check_fingerprint(host, &made_with, diag);
    if (status == AKV_OK)
        status = akv_document_verify(o->document, diag);
    if (status == AKV_OK && (o->segments = calloc(parts->num_segments, sizeof *o->segments)) == NULL)
        status = AKV_E_NO_MEMORY;
    o->num_segments = parts->num_segments;
    for (uint32_t i = 0; status == AKV_OK && i < o->num_segments; i++)
        status = akv_document_open_segment(o->document, i, 1, NULL, &o->segments[i], diag);
    return status;
}

/* The host's store and the file have the same layers (session.c asserts it). */
static serve_document *make_document(const akv_document *file, const akv_document_parts *parts)
{
    serve_document *d = calloc(1, sizeof *d);
    const char *name = akv_document_property_value(file, "name", 0),
               *owner = akv_document_property_value(file, "owner", 0),
               *created = akv_document_property_value(file, "created", 0);
    akv_llama_layer *layers = malloc(parts->num_layers * sizeof *layers);
    void *state = parts->native_state_bytes > 0 ? malloc((size_t)parts->native_state_bytes) : NULL;
    if (d != NULL) {
        d->name = strdup(name != NULL ? name : "untitled");
        d->tokens = malloc((size_t)parts->num_tokens * sizeof *d->tokens);
    }
    if (d == NULL || layers == NULL || d->name == NULL || d->tokens == NULL ||
        (parts->native_state_bytes > 0 && state == NULL)) {
        if (d != NULL) {
            free(d->name);
            free(d->tokens);
        }
        free(d);
        free(layers);
        free(state);
        return NULL;
    }
    snprintf(d->owner, sizeof d->owner, "%s", owner != NULL ? owner : "");
    d->created = created != NULL ? strtoll(created, NULL, 10) : 0;
    d->num_tokens = (size_t)parts->num_tokens;
    memcpy(d->tokens, parts->tokens, d->num_tokens * sizeof *d->tokens);
    memcpy(layers, parts->layers, parts->num_layers * sizeof *layers);
    if (state != NULL)
        memcpy(state, parts->native_state, (size_t)parts->native_state_bytes);
    akv_llama_store_parts *p = &d->parts;
    akv_llama_store_parts_init(p);
    memcpy(&p->fingerprint, &parts->model, sizeof p->fingerprint);
    p->tokens = d->tokens;
    p->num_tokens = parts->num_tokens;
    p->next_position = parts->next_position;
    p->method = parts->method;
    p->num_layers = parts->num_layers;
    p->layers = layers;
    p->num_segments = parts->num_segments;
    p->native_state = state;
    p->native_state_bytes = parts->native_state_bytes;
    return d;
}

static void load_one(const char *folder, const char *name, const akv_llama *host, serve_folder_fn found, void *opaque)
{
    char path[4096];
    akv_diag diag = {AKV_OK, ""};
    opened o = {{NULL, 0}, NULL, NULL, 0};
    akv_document_parts parts;
    akv_document_parts_init(&parts);
    if (!path_of(path, sizeof path, folder, name) || cli_image_read(path, &o.image) != CLI_OK)
        return;
    const akv_status status = open_all(&o, host, &parts, &diag);
    serve_document *d = status == AKV_OK ? make_document(o.document, &parts) : NULL;
    if (d != NULL) {
        snprintf(d->id, sizeof d->id, "%.*s", SERVE_ID_BYTES - 1, name);
        if (!found(opaque, d, o.segments, o.num_segments)) {
            free(d->name);
            free(d->tokens);
            free((void *)(uintptr_t)d->parts.layers);
            free((void *)(uintptr_t)d->parts.native_state);
            free(d);
        }
    } else {
        cli_warn("%s is left alone: %s", path, diag.message[0] != '\0' ? diag.message : "no memory");
    }
    close_opened(&o);
}

int serve_folder_load(const char *folder, const akv_llama *host, serve_folder_fn found, void *opaque)
{
    struct dirent **names = NULL;
    if (folder == NULL)
        return CLI_OK;
    const int n = scandir(folder, &names, NULL, alphasort);
    if (n < 0)
        return cli_fail(CLI_IO, "cannot read the folder %s: %s", folder, strerror(errno));
    for (int i = 0; i < n; i++) {
        if (is_document(names[i]->d_name) && !cli_interrupted())
            load_one(folder, names[i]->d_name, host, found, opaque);
        free(names[i]);
    }
    free(names);
    return CLI_OK;
}

/* ---------------------------------------------------------------------------------------------------------- spilled */

static bool spill_path(char *path, size_t capacity, const char *folder, uint64_t id, uint32_t index)
{
    char name[64];
    snprintf(name, sizeof name, "spill-%llu-%u.bin", (unsigned long long)id, index);
    return path_of(path, capacity, folder, name);
}

static akv_status io_error(akv_diag *diag, const char *what, const char *path)
{
    if (diag != NULL) {
        diag->status = AKV_E_IO;
        snprintf(diag->message, sizeof diag->message, "%s %.300s: %s", what, path, strerror(errno));
    }
    return AKV_E_IO;
}

akv_status serve_folder_spill(void *folder, uint64_t id, uint32_t index, const void *data, size_t bytes, akv_diag *diag)
{
    char path[4096];
    if (!spill_path(path, sizeof path, folder, id, index))
        return AKV_E_IO;
    const int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    size_t done = 0;
    for (ssize_t n = 0; file >= 0 && done < bytes; done += (size_t)n)
        if ((n = write(file, (const char *)data + done, bytes - done)) <= 0)
            break;
    const bool ok = file >= 0 && done == bytes;
    if (file >= 0 && close(file) != 0)
        return io_error(diag, "cannot write", path);
    return ok ? AKV_OK : io_error(diag, "cannot write", path);
}

akv_status serve_folder_fetch(void *folder, uint64_t id, uint32_t index, void *data, size_t bytes, akv_diag *diag)
{
    char path[4096];
    if (!spill_path(path, sizeof path, folder, id, index))
        return AKV_E_IO;
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    size_t done = 0;
    errno = 0;
    for (ssize_t n = 0; file >= 0 && done < bytes; done += (size_t)n)
        if ((n = read(file, (char *)data + done, bytes - done)) <= 0)
            break;
    if (file >= 0)
        close(file);
    return file >= 0 && done == bytes ? AKV_OK : io_error(diag, "cannot read", path);
}

void serve_folder_forget(void *folder, uint64_t id)
{
    char path[4096];
    for (uint32_t i = 0; spill_path(path, sizeof path, folder, id, i); i++)
        if (unlink(path) != 0)
            break;
}
