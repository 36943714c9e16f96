/* SPDX-License-Identifier: Apache-2.0 */
/* files.c - texts and documents in, results out without ever leaving half a file behind. */
#include "cli.h"
#include "cleanup.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

bool cli_buffer_add(cli_buffer *b, const void *data, size_t bytes)
{
    if (bytes >= SIZE_MAX / 2 - b->bytes)
        return false;
    if (b->bytes + bytes + 1 > b->capacity) {
        size_t capacity = (b->bytes + bytes + 1) * 3 / 2 + 256;
        char *grown = realloc(b->data, capacity);
        if (grown == NULL)
            return false;
        b->data = grown;
        b->capacity = capacity;
    }
    if (bytes != 0)
        memcpy(b->data + b->bytes, data, bytes);
    b->bytes += bytes;
    b->data[b->bytes] = '\0';
    return true;
}

void cli_buffer_free(cli_buffer *b)
{
    free(b->data);
    memset(b, 0, sizeof *b);
}

/* Length of the well-formed UTF-8 sequence at s (at most n bytes), or 0. */
static size_t utf8_sequence(const unsigned char *s, size_t n)
{
    static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000};
    size_t length = s[0] < 0x80                   ? 1
                    : s[0] >= 0xc2 && s[0] < 0xe0 ? 2
                    : s[0] >= 0xe0 && s[0] < 0xf0 ? 3
                    : s[0] >= 0xf0 && s[0] < 0xf5 ? 4
                                                  : 0;
    if (length == 0 || length > n)
        return 0;
    if (length == 1)
        return 1;
    uint32_t point = s[0] & (0xffu >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
        point = point << 6 | (s[i] & 0x3fu);
    }
    bool surrogate = point >= 0xd800 && point <= 0xdfff;
    return point < smallest[length] || point > 0x10ffff || surrogate ? 0 : length;
}

size_t cli_utf8_prefix(const char *text, size_t bytes)
{
    size_t at = 0;
    while (at < bytes) {
        size_t length = utf8_sequence((const unsigned char *)text + at, bytes - at);
        if (length == 0)
            break;
        at += length;
    }
    return at;
}

/* ----------------------------------------------------------------------------------------------------------- texts */

static int read_all(int fd, const char *name, cli_buffer *text)
{
    char piece[65536];
    for (;;) {
        ssize_t got = read(fd, piece, sizeof piece);
        if (got == 0)
            return CLI_OK;
        if (cli_files_interrupted())
            return CLI_SIGNAL + cli_files_interrupted();
        if (got < 0) {
            if (errno == EINTR)
                continue;
            return cli_fail(CLI_IO, "cannot read %s: %s", name, strerror(errno));
        }
        if (!cli_buffer_add(text, piece, (size_t)got))
            return cli_fail(CLI_NO_MEMORY, "%s does not fit into memory", name);
    }
}

static size_t line_of(const char *text, size_t at)
{
    size_t line = 1;
    for (size_t i = 0; i < at; i++)
        line += text[i] == '\n';
    return line;
}

static int check_text(const char *name, cli_buffer *text, size_t start)
{
    static const char byte_order_mark[] = "\xef\xbb\xbf";
    char *s = text->data + start;
    size_t n = text->bytes - start;
    if (n >= 3 && memcmp(s, byte_order_mark, 3) == 0) {
        memmove(s, s + 3, n - 3 + 1);
        text->bytes -= 3;
        n -= 3;
    }
    if (n == 0 || strspn(s, " \t\r\n\f\v") == n)
        return cli_fail(CLI_BAD_INPUT, "%s is empty: there is no text to read", name);
    const char *nul = memchr(s, '\0', n);
    if (nul != NULL)
        return cli_fail(CLI_BAD_INPUT, "%s is not a text: byte %zu is NUL; convert it to UTF-8 text first", name,
                        (size_t)(nul - s));
    size_t valid = cli_utf8_prefix(s, n);
    if (valid != n)
        return cli_fail(CLI_BAD_INPUT,
                        "%s is not UTF-8: byte 0x%02x at offset %zu (line %zu); convert it, e.g. with iconv", name,
                        (unsigned char)s[valid], valid, line_of(s, valid));
    return CLI_OK;
}

int cli_read_text(const char *path, cli_buffer *text)
{
    bool from_stdin = strcmp(path, "-") == 0;
    const char *name = from_stdin ? "standard input" : path;
    int fd = from_stdin ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return cli_fail(CLI_IO, "cannot open %s: %s", path, strerror(errno));
    struct stat st;
    size_t start = text->bytes;
    int code = CLI_OK;
    if (fstat(fd, &st) == 0 && S_ISDIR(st.st_mode))
        code = cli_fail(CLI_BAD_INPUT, "%s is a directory; give text files", name);
    else if (!cli_buffer_add(text, "", 0))
        code = cli_fail(CLI_NO_MEMORY, "no memory");
    if (code == CLI_OK)
        code = read_all(fd, name, text);
    if (!from_stdin)
        close(fd);
    return code != CLI_OK ? code : check_text(name, text, start);
}

int cli_read_texts(const char *const *paths, size_t num_paths, cli_buffer *text)
{
    bool stdin_used = false;
    for (size_t i = 0; i < num_paths; i++) {
        if (strcmp(paths[i], "-") == 0) {
            if (stdin_used)
                return cli_fail(CLI_USAGE, "-f - (standard input) can be given once");
            stdin_used = true;
        }
        if (text->bytes != 0 && text->data[text->bytes - 1] != '\n' && !cli_buffer_add(text, "\n", 1))
            return cli_fail(CLI_NO_MEMORY, "no memory");
        int code = cli_read_text(paths[i], text);
        if (code != CLI_OK)
            return code;
    }
    return CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------- images */

enum { IMAGE_ALIGN = 64 }; /* what akv_document_open asks for */

static int read_image(int fd, const char *path, cli_image *image)
{
    size_t at = 0;
    while (at < image->bytes) {
        const size_t left = image->bytes - at, piece = left < (1u << 26) ? left : 1u << 26;
        const ssize_t got = read(fd, (char *)image->data + at, piece);
        if (cli_files_interrupted())
            return CLI_SIGNAL + cli_files_interrupted();
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return cli_fail(CLI_IO, "cannot read %s: %s", path, strerror(errno));
        if (got == 0)
            return cli_fail(CLI_IO, "%s became shorter while it was being read: %zu of %zu bytes", path, at,
                            image->bytes);
        at += (size_t)got;
    }
    return CLI_OK;
}

int cli_image_read(const char *path, cli_image *image)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return cli_fail(CLI_IO, "cannot open %s: %s", path, strerror(errno));
    struct stat st;
    int code = CLI_OK;
    if (fstat(fd, &st) != 0)
        code = cli_fail(CLI_IO, "cannot read %s: %s", path, strerror(errno));
    else if (S_ISDIR(st.st_mode))
        code = cli_fail(CLI_BAD_INPUT, "%s is a directory; give a .akv file", path);
    else if (!S_ISREG(st.st_mode))
        code = cli_fail(CLI_BAD_INPUT, "%s is not a regular file; a .akv file must be one", path);
    else if (st.st_size == 0)
        code = cli_fail(CLI_CORRUPT, "%s is empty; a .akv file never is", path);
    else if ((uint64_t)st.st_size > SIZE_MAX / 2)
        code = cli_fail(CLI_NO_MEMORY, "%s does not fit into the address space", path);
    if (code == CLI_OK) {
        image->bytes = (size_t)st.st_size;
        if (posix_memalign(&image->data, IMAGE_ALIGN, image->bytes) != 0) {
            image->data = NULL;
            code = cli_fail(CLI_NO_MEMORY, "%s does not fit into memory: it has %s", path, cli_bytes(image->bytes));
        }
    }
    if (code == CLI_OK)
        code = read_image(fd, path, image);
    close(fd);
    if (code != CLI_OK)
        cli_image_free(image);
    return code;
}

void cli_image_free(cli_image *image)
{
    free(image->data);
    memset(image, 0, sizeof *image);
}

/* ---------------------------------------------------------------------------------------------------------- output */

struct cli_output {
    int fd;
    char *path;      /* final name */
    char *temporary; /* NULL: written directly (device, pipe) */
};

static char *join(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b);
    char *s = malloc(n + m + 1);
    if (s != NULL) {
        memcpy(s, a, n);
        memcpy(s + n, b, m);
        s[n + m] = '\0';
    }
    return s;
}

static void output_free(cli_output *o)
{
    if (o == NULL)
        return;
    if (o->fd >= 0)
        close(o->fd);
    cli_doom_path(NULL);
    free(o->path);
    free(o->temporary);
    free(o);
}

void cli_output_abort(cli_output *o)
{
    if (o != NULL && o->temporary != NULL && o->fd >= 0)
        unlink(o->temporary);
    output_free(o);
}

/* mkstemp's files are private; the result gets what the umask grants to an ordinary new file, or the old file's mode.
 */
static void set_mode(int fd, const struct stat *old)
{
    mode_t mask = umask(0);
    umask(mask);
    if (fchmod(fd, old != NULL ? old->st_mode & 07777 : 0666 & ~mask) != 0)
        cli_warn("cannot set the mode of the new file: %s", strerror(errno));
}

int cli_output_open(const char *path, cli_output **out)
{
    struct stat st;
    bool exists = stat(path, &st) == 0;
    if (exists && S_ISDIR(st.st_mode))
        return cli_fail(CLI_IO, "%s is a directory; give the name of a file to write", path);
    cli_output *o = calloc(1, sizeof *o);
    if (o == NULL)
        return cli_fail(CLI_NO_MEMORY, "no memory");
    o->fd = -1;
    bool direct = exists && !S_ISREG(st.st_mode);
    /* A symbolic link is followed, so that its target is replaced and not the link. */
    char *real = exists && !direct ? realpath(path, NULL) : NULL;
    o->path = real != NULL ? real : join(path, "");
    if (o->path != NULL && !direct)
        o->temporary = join(o->path, ".XXXXXX.tmp");
    if (o->path == NULL || (!direct && o->temporary == NULL)) {
        output_free(o);
        return cli_fail(CLI_NO_MEMORY, "no memory");
    }
    if (direct) {
        o->fd = open(path, O_WRONLY | O_CLOEXEC);
    } else {
        o->fd = mkstemps(o->temporary, 4);
        if (o->fd >= 0 && !cli_doom_path(o->temporary)) {
            cli_output_abort(o);
            return cli_fail(CLI_IO, "the path %s is too long", path);
        }
        if (o->fd >= 0)
            set_mode(o->fd, exists ? &st : NULL);
    }
    if (o->fd < 0) {
        int error = errno;
        output_free(o);
        return cli_fail(CLI_IO, "cannot write %s: %s", path, strerror(error));
    }
    *out = o;
    return CLI_OK;
}

akv_status cli_output_write(void *output, const void *data, size_t bytes, akv_diag *diag)
{
    cli_output *o = output;
    const char *at = data;
    while (bytes > 0) {
        if (cli_files_interrupted())
            return AKV_E_CANCELLED;
        size_t piece = bytes < (1u << 22) ? bytes : 1u << 22;
        ssize_t wrote = write(o->fd, at, piece);
        if (wrote < 0) {
            if (errno == EINTR)
                continue;
            if (diag != NULL) {
                diag->status = AKV_E_IO;
                snprintf(diag->message, sizeof diag->message, "cannot write: %s; nothing was changed", strerror(errno));
            }
            return AKV_E_IO;
        }
        at += wrote;
        bytes -= (size_t)wrote;
    }
    return AKV_OK;
}

/* The rename must reach the disk too. Some file systems cannot sync a folder; then there is nothing more to do. */
static void sync_folder(const char *path)
{
    char *folder = join(path, "");
    if (folder == NULL)
        return;
    char *slash = strrchr(folder, '/');
    if (slash != NULL)
        slash[slash == folder ? 1 : 0] = '\0';
    int fd = open(slash != NULL ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        (void)fsync(fd);
        close(fd);
    }
    free(folder);
}

int cli_output_commit(cli_output *o)
{
    int code = CLI_OK;
    if (o->temporary == NULL) {
        if (close(o->fd) != 0)
            code = cli_fail(CLI_IO, "cannot write %s: %s", o->path, strerror(errno));
        o->fd = -1;
        output_free(o);
        return code;
    }
    int synced = fsync(o->fd);
    while (synced != 0 && errno == EINTR && !cli_files_interrupted())
        synced = fsync(o->fd);
    if (synced != 0) {
        code = cli_fail(CLI_IO, "cannot write %s: %s; nothing was changed", o->path, strerror(errno));
        cli_output_abort(o);
        return code;
    }
    if (rename(o->temporary, o->path) != 0) {
        code = cli_fail(CLI_IO, "cannot name the new file %s: %s; nothing was changed", o->path, strerror(errno));
        cli_output_abort(o);
        return code;
    }
    cli_doom_path(NULL);
    sync_folder(o->path);
    output_free(o);
    return CLI_OK;
}

int cli_check_writable(const char *path)
{
    cli_output *o = NULL;
    int code = strcmp(path, "-") == 0 ? CLI_OK : cli_output_open(path, &o);
    cli_output_abort(o);
    return code;
}

int cli_write_file(const char *path, const void *data, size_t bytes)
{
    if (strcmp(path, "-") == 0) {
        if (fwrite(data, 1, bytes, stdout) != bytes || fflush(stdout) != 0)
            return cli_fail(CLI_IO, "cannot write to standard output: %s", strerror(errno));
        return CLI_OK;
    }
    cli_output *o = NULL;
    akv_diag diag = {AKV_OK, ""};
    int code = cli_output_open(path, &o);
    if (code != CLI_OK)
        return code;
    akv_status status = cli_output_write(o, data, bytes, &diag);
    if (status != AKV_OK) {
        cli_output_abort(o);
        return cli_fail_diag(status, &diag, path);
    }
    return cli_output_commit(o);
}
