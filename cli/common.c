/* SPDX-License-Identifier: Apache-2.0 */
/* common.c - messages, exit codes, interruption, option values: the small things that every subcommand needs. */
#include "cli.h"
#include "cleanup.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int cli_exit_of(akv_status status)
{
    switch (status) {
    case AKV_OK: return CLI_OK;
    case AKV_E_INVALID_ARGUMENT: return CLI_BAD_INPUT;
    case AKV_E_UNSUPPORTED: return CLI_UNSUPPORTED;
    case AKV_E_NO_MEMORY: return CLI_NO_MEMORY;
    case AKV_E_NO_SPACE: return CLI_BAD_INPUT;
    case AKV_E_INFEASIBLE: return CLI_INFEASIBLE;
    case AKV_E_CORRUPT:
    case AKV_E_VERSION:
    case AKV_E_CHECKSUM: return CLI_CORRUPT;
    case AKV_E_MISMATCH: return CLI_WRONG_MODEL;
    case AKV_E_IO: return CLI_IO;
    case AKV_E_CANCELLED: return CLI_SIGNAL + (cli_interrupted() ? cli_interrupted() : SIGINT);
    case AKV_E_DEVICE: /* no command uses a GPU */
    case AKV_E_BAD_STATE:
    case AKV_E_NON_FINITE: return CLI_INTERNAL;
    }
    return CLI_INTERNAL;
}

int (cli_fail)(int code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("akv: error: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return code;
}

int (cli_fail_diag)(akv_status status, const akv_diag *diag, const char *what)
{
    if (status == AKV_E_CANCELLED && cli_interrupted()) {
        cli_note("interrupted");
        return cli_exit_of(status);
    }
    const char *message = diag->status == status && diag->message[0] != '\0' ? diag->message : akv_status_str(status);
    if (what == NULL)
        return cli_fail(cli_exit_of(status), "%s", message);
    return cli_fail(cli_exit_of(status), "%s: %s", what, message);
}

void cli_warn(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("akv: warning: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

void cli_note(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("akv: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

/* ---------------------------------------------------------------------------------------------------- interruption */

/* Read by every thread of akv serve, written by a handler: atomic, and without a lock. */
_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "a signal handler must not wait for a lock");
static atomic_int signal_seen;
static char doomed_path[4096]; /* temporary file to remove when the program must end at once */
static atomic_int doomed_set;

bool cli_doom_path(const char *path)
{
    doomed_set = 0;
    if (path == NULL)
        return true;
    if (strlen(path) >= sizeof doomed_path)
        return false;
    memcpy(doomed_path, path, strlen(path) + 1);
    doomed_set = 1;
    return true;
}

static void on_signal(int number)
{
    if (signal_seen != 0) {
        if (doomed_set)
            unlink(doomed_path);
        _exit(CLI_SIGNAL + number);
    }
    signal_seen = number;
}

/* libllama maps the model. If it shrinks under us, the next touch raises SIGBUS; there is nothing to go on with. */
static void on_bus_error(int number)
{
    static const char text[] =
        "akv: error: a file that is mapped into memory - the model? - became shorter, or cannot be read\n";
    (void)number;
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0)
        _exit(CLI_IO);
    if (doomed_set)
        unlink(doomed_path);
    _exit(CLI_IO);
}

void cli_signals_install(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    action.sa_handler = on_signal;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    action.sa_handler = on_bus_error;
    sigaction(SIGBUS, &action, NULL);
    action.sa_handler = SIG_IGN; /* a closed pipe shall be an ordinary write error */
    sigaction(SIGPIPE, &action, NULL);
}

int cli_interrupted(void)
{
    return signal_seen;
}

void cli_interruption_over(void)
{
    signal_seen = 0;
}

static atomic_bool files_outlast_signal;

void cli_files_outlast_signal(void)
{
    atomic_store(&files_outlast_signal, true);
}

int cli_files_interrupted(void)
{
    return atomic_load(&files_outlast_signal) ? 0 : cli_interrupted();
}

/* --------------------------------------------------------------------------------------------------- option values */

bool cli_parse_u64(const char *option, const char *text, uint64_t min, uint64_t max, uint64_t *out)
{
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value < min || value > max) {
        cli_fail(CLI_USAGE, "%s: \"%s\" is not a whole number from %llu to %llu", option, text, (unsigned long long)min,
                 (unsigned long long)max);
        return false;
    }
    *out = value;
    return true;
}

bool cli_parse_double(const char *option, const char *text, double min, double max, double *out)
{
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(value) || value < min || value > max) {
        cli_fail(CLI_USAGE, "%s: \"%s\" is not a number from %g to %g", option, text, min, max);
        return false;
    }
    *out = value;
    return true;
}

bool cli_parse_bytes(const char *option, const char *text, uint64_t *out)
{
    static const char suffixes[] = "KMGT";
    char *end = NULL;
    double value = strtod(text, &end);
    double unit = 1.0;
    const char *suffix = end != text && *end != '\0' ? strchr(suffixes, *end & ~0x20) : NULL;
    if (suffix != NULL) {
        for (const char *s = suffixes; s <= suffix; s++)
            unit *= 1024.0;
        end++;
        if (strcmp(end, "iB") == 0)
            end += 2;
        else if (strcmp(end, "B") == 0)
            end++;
    }
    if (end == text || *end != '\0' || !(value >= 0.0) || value * unit < 1.0 || value * unit > 0x1p62) {
        cli_fail(CLI_USAGE, "%s: \"%s\" is not a number of bytes such as 750000, 64K, 1.5M or 2G", option, text);
        return false;
    }
    *out = (uint64_t)(value * unit);
    return true;
}

static const char *const method_names[] = {"akv", "snapkv", "dense", "exact"};

const char *cli_method_name(cli_method method)
{
    return method_names[method];
}

bool cli_parse_method(const char *text, cli_method *out)
{
    for (size_t i = 0; i < sizeof method_names / sizeof method_names[0]; i++)
        if (strcmp(text, method_names[i]) == 0) {
            *out = (cli_method)i;
            return true;
        }
    cli_fail(CLI_USAGE, "--method: \"%s\" is unknown; there are akv, snapkv, dense and exact", text);
    return false;
}

bool cli_parse_profile(const char *text, akv_profile *out)
{
    static const akv_profile profiles[] = {AKV_PROFILE_DEFAULT, AKV_PROFILE_PAPER};
    for (size_t i = 0; i < sizeof profiles / sizeof profiles[0]; i++) {
        if (strcmp(text, cli_profile_name(profiles[i])) == 0) {
            *out = profiles[i];
            return true;
        }
    }
    cli_fail(CLI_USAGE, "--profile: \"%s\" is unknown; there are default and paper", text);
    return false;
}

const char *cli_profile_name(uint32_t profile)
{
    switch (profile) {
    case 0: return "none";
    case AKV_PROFILE_PAPER: return "paper";
    case AKV_PROFILE_DEFAULT: return "default";
    default: return "unknown";
    }
}

void cli_size_goal_init(cli_size_goal *goal)
{
    memset(goal, 0, sizeof *goal);
    goal->keep_ratio = 0.1;
}

bool cli_size_goal_set(cli_size_goal *goal, int option, const char *value)
{
    double x = 0.0;
    if (goal->given++ != 0) {
        cli_fail(CLI_USAGE, "--keep, --ratio and --budget say the same thing; give one of them");
        return false;
    }
    switch (option) {
    case 'k':
        if (!cli_parse_double("--keep", value, 1e-6, 1.0, &goal->keep_ratio))
            return false;
        return true;
    case 'r':
        if (!cli_parse_double("--ratio", value, 1.0, 1e6, &x))
            return false;
        goal->keep_ratio = 1.0 / x;
        return true;
    default: return cli_parse_bytes("--budget", value, &goal->budget_bytes);
    }
}

const char *cli_bytes(uint64_t bytes)
{
    static char ring[8][24];
    static unsigned next;
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    char *out = ring[next++ % 8];
    double value = (double)bytes;
    unsigned unit = 0;
    while (value >= 1024.0 && unit < 4) {
        value /= 1024.0;
        unit++;
    }
    snprintf(out, sizeof ring[0], unit == 0 ? "%.0f %s" : "%.2f %s", value, units[unit]);
    return out;
}

const char *cli_printable(const char *text)
{
    static char clean[1024];
    size_t n = 0;
    for (; text[n] != '\0' && n + 1 < sizeof clean; n++)
        clean[n] = (unsigned char)text[n] < 0x20 || text[n] == 0x7f ? '?' : text[n];
    clean[n] = '\0';
    return clean;
}

uint32_t cli_default_threads(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > 256 ? 256 : (uint32_t)n;
}

double cli_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

uint64_t cli_resident_bytes(void)
{
    unsigned long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL)
        return 0;
    if (fscanf(file, "%*u %llu", &pages) != 1)
        pages = 0;
    fclose(file);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* -------------------------------------------------------------------------------------------------------- progress */

void cli_progress_init(cli_progress *progress, bool quiet)
{
    memset(progress, 0, sizeof *progress);
    progress->terminal = isatty(STDERR_FILENO) != 0;
    progress->quiet = quiet;
    progress->stage = -1;
}

static void print_bar(cli_progress *p, const char *name, const char *unit, uint64_t done, uint64_t total,
                      double seconds)
{
    enum { WIDTH = 28 };
    char bar[WIDTH + 1];
    unsigned filled = total == 0 ? 0 : (unsigned)((double)done / (double)total * WIDTH);
    for (unsigned i = 0; i < WIDTH; i++)
        bar[i] = i < filled ? '#' : '.';
    bar[WIDTH] = '\0';
    if (unit == NULL)
        fprintf(stderr, "\r\033[K%-9s [%s] %3.0f %%", name, bar,
                total == 0 ? 0.0 : 100.0 * (double)done / (double)total);
    else
        fprintf(stderr, "\r\033[K%-9s [%s] %llu/%llu %s  %.1f %s/s", name, bar, (unsigned long long)done,
                (unsigned long long)total, unit, seconds > 0.0 ? (double)done / seconds : 0.0, unit);
    fflush(stderr);
    p->bar_shown = true;
}

void cli_progress_update(cli_progress *p, int stage, const char *name, const char *unit, uint64_t done, uint64_t total)
{
    double now = cli_now();
    if (p->quiet || total == 0)
        return;
    if (p->stage != stage) {
        p->stage = stage;
        p->stage_start = now;
        p->last_print = p->terminal ? 0.0 : now;
        p->last_done = 0;
    }
    bool last = done >= total;
    double seconds = now - p->stage_start;
    if (p->terminal) {
        if (last || now - p->last_print >= 0.1) {
            print_bar(p, name, unit, done, total, seconds);
            p->last_print = now;
        }
    } else if ((last && unit != NULL) || (now - p->last_print >= 10.0 && done != p->last_done)) {
        if (unit == NULL)
            cli_note("%s: %.0f %%", name, total == 0 ? 0.0 : 100.0 * (double)done / (double)total);
        else
            cli_note("%s: %llu of %llu %s, %.1f s", name, (unsigned long long)done, (unsigned long long)total, unit,
                     seconds);
        p->last_print = now;
        p->last_done = done;
    }
    if (last)
        p->stage = -1;
}

void cli_progress_end(cli_progress *p)
{
    if (p->bar_shown) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
        p->bar_shown = false;
    }
    p->stage = -1;
}
