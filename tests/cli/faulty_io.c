/* SPDX-License-Identifier: Apache-2.0 */
/*
 * faulty_io.c - a library for LD_PRELOAD that lets one call to the operating system go wrong, for
 * tests/cli/test_faults.py and test_serve.py.
 *
 *   AKV_FAULT_FOLDER  only files below it are counted and touched
 *   AKV_FAULT_CALL    open mkstemps fstat mmap read write fsync rename fchmod close
 *   AKV_FAULT_AT      which of these calls, from 1; 0 = none: only count
 *   AKV_FAULT_HOW     a number: that errno, from then on ("disk full" stays full); "short": half of it, at every call
 *                     from then on; "eintr": EINTR once; "cut": another program halves the file just before the call;
 *                     "slow": two seconds, once
 *   AKV_FAULT_BYTES   for write: the disk holds that many bytes; what does not fit is ENOSPC (AKV_FAULT_AT 0)
 *   AKV_FAULT_COUNTS  file to which the number of each call is added when the program ends: "open 3"
 *
 * Calls inside libc (those behind fopen, say) do not pass here.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { OPEN, MKSTEMPS, FSTAT, MMAP, READ, WRITE, FSYNC, RENAME, FCHMOD, CLOSE, CALLS, MOST_FDS = 1024 };
static const char *const names[CALLS] = {"open",  "mkstemps", "fstat",  "mmap",   "read",
                                         "write", "fsync",    "rename", "fchmod", "close"};
static unsigned long counts[CALLS];
static bool watched[MOST_FDS];
static unsigned long long written;

static const char *setting(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value != NULL ? value : otherwise;
}

static bool inside(const char *path)
{
    const char *folder = setting("AKV_FAULT_FOLDER", "/nowhere");
    return path != NULL && strncmp(path, folder, strlen(folder)) == 0;
}

static bool is_watched(int fd)
{
    return fd >= 0 && fd < MOST_FDS && watched[fd];
}

static void watch(int fd, bool on)
{
    if (fd >= 0 && fd < MOST_FDS)
        watched[fd] = on;
}

enum { GO_ON, FAIL, HALF };

static void halve(int fd)
{
    char link[64];
    struct stat st;
    static int (*real)(int, struct stat *); /* not ours, which counts */
    if (real == NULL)
        *(void **)&real = dlsym(RTLD_NEXT, "fstat");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (real(fd, &st) != 0 || truncate(link, st.st_size / 2) != 0)
        abort();
}

/* Counts the call and says what becomes of it; errno is set for FAIL. */
static int fate(int call, int fd)
{
    const unsigned long at = strtoul(setting("AKV_FAULT_AT", "0"), NULL, 10), now = ++counts[call];
    const char *how = setting("AKV_FAULT_HOW", "5");
    if (at == 0 || strcmp(setting("AKV_FAULT_CALL", ""), names[call]) != 0 || now < at)
        return GO_ON;
    if (strcmp(how, "short") == 0)
        return HALF;
    if (strcmp(how, "eintr") == 0) {
        errno = EINTR;
        return now == at ? FAIL : GO_ON;
    }
    if (strcmp(how, "slow") == 0) {
        if (now == at)
            sleep(2);
        return GO_ON;
    }
    if (strcmp(how, "cut") == 0) {
        if (now == at)
            halve(fd);
        return GO_ON;
    }
    errno = atoi(how);
    return FAIL;
}

__attribute__((destructor)) static void report(void)
{
    const char *path = getenv("AKV_FAULT_COUNTS");
    FILE *file = path != NULL ? fopen(path, "a") : NULL;
    for (int i = 0; file != NULL && i < CALLS; i++)
        fprintf(file, "%s %lu\n", names[i], counts[i]);
    if (file != NULL)
        fclose(file);
}

#define REAL(type, name, ...)                                                                                          \
    static type (*real)(__VA_ARGS__);                                                                                  \
    if (real == NULL)                                                                                                  \
    *(void **)&real = dlsym(RTLD_NEXT, name)

int open(const char *path, int flags, ...)
{
    REAL(int, "open", const char *, int, ...);
    va_list args;
    va_start(args, flags);
    const mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    if (!inside(path))
        return real(path, flags, mode);
    if (fate(OPEN, -1) == FAIL)
        return -1;
    const int fd = real(path, flags, mode);
    watch(fd, true);
    return fd;
}

int open64(const char *path, int flags, ...) __attribute__((alias("open")));

int mkstemps(char *path, int suffix)
{
    REAL(int, "mkstemps", char *, int);
    if (!inside(path))
        return real(path, suffix);
    if (fate(MKSTEMPS, -1) == FAIL)
        return -1;
    const int fd = real(path, suffix);
    watch(fd, true);
    return fd;
}

int mkstemps64(char *path, int suffix) __attribute__((alias("mkstemps")));

int fstat(int fd, struct stat *st)
{
    REAL(int, "fstat", int, struct stat *);
    return is_watched(fd) && fate(FSTAT, fd) == FAIL ? -1 : real(fd, st);
}

int fstat64(int fd, struct stat64 *st)
{
    REAL(int, "fstat64", int, struct stat64 *);
    return is_watched(fd) && fate(FSTAT, fd) == FAIL ? -1 : real(fd, st);
}

void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    REAL(void *, "mmap", void *, size_t, int, int, int, off_t);
    return is_watched(fd) && fate(MMAP, fd) == FAIL ? MAP_FAILED : real(address, bytes, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t bytes, int protection, int flags, int fd, off_t offset)
    __attribute__((alias("mmap")));

ssize_t read(int fd, void *data, size_t bytes)
{
    REAL(ssize_t, "read", int, void *, size_t);
    const int what = is_watched(fd) ? fate(READ, fd) : GO_ON;
    return what == FAIL ? -1 : real(fd, data, what == HALF && bytes > 1 ? bytes / 4096 + 1 : bytes);
}

ssize_t write(int fd, const void *data, size_t bytes)
{
    REAL(ssize_t, "write", int, const void *, size_t);
    const int what = is_watched(fd) ? fate(WRITE, fd) : GO_ON;
    const char *room = getenv("AKV_FAULT_BYTES");
    if (what == FAIL)
        return -1;
    if (what == HALF && bytes > 1)
        bytes = (bytes + 1) / 2;
    if (is_watched(fd) && room != NULL) {
        const unsigned long long left = strtoull(room, NULL, 10) - written;
        if (left == 0 && bytes > 0) {
            errno = ENOSPC;
            return -1;
        }
        bytes = bytes < left ? bytes : (size_t)left;
    }
    const ssize_t done = real(fd, data, bytes);
    if (is_watched(fd) && done > 0)
        written += (unsigned long long)done;
    return done;
}

int fsync(int fd)
{
    REAL(int, "fsync", int);
    return is_watched(fd) && fate(FSYNC, fd) == FAIL ? -1 : real(fd);
}

int rename(const char *from, const char *to)
{
    REAL(int, "rename", const char *, const char *);
    return inside(to) && fate(RENAME, -1) == FAIL ? -1 : real(from, to);
}

int fchmod(int fd, mode_t mode)
{
    REAL(int, "fchmod", int, mode_t);
    return is_watched(fd) && fate(FCHMOD, fd) == FAIL ? -1 : real(fd, mode);
}

int close(int fd)
{
    REAL(int, "close", int);
    const bool failing = is_watched(fd) && fate(CLOSE, fd) == FAIL;
    const int error = errno;
    watch(fd, false);
    const int done = real(fd); /* Linux closes it whatever it says */
    errno = failing ? error : errno;
    return failing ? -1 : done;
}
