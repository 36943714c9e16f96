/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cli.h - what the subcommands of `akv` share: exit codes, messages, interruption, files, option values, progress and
 * the report. The program sees the public headers of the library and of the llama.cpp host, nothing else.
 */
#ifndef AKV_CLI_H
#define AKV_CLI_H

#include <anchorkv/akv_document.h>
#include <anchorkv/anchorkv.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ------------------------------------------------------------------------------------------------------ exit codes */

/* Documented in akv.1; values are fixed for ever. */
enum cli_exit {
    CLI_OK = 0,
    CLI_USAGE = 1,       /* unknown or contradictory options */
    CLI_BAD_INPUT = 2,   /* the document or a question cannot be used */
    CLI_INFEASIBLE = 3,  /* the byte budget is too small */
    CLI_CORRUPT = 4,     /* a .akv file that is damaged or of an unknown version */
    CLI_WRONG_MODEL = 5, /* a .akv file that another model made */
    CLI_IO = 6,          /* the operating system refused to read or write */
    CLI_NO_MEMORY = 7,
    CLI_UNSUPPORTED = 8, /* this model or this build cannot do it */
    CLI_INTERNAL = 9,    /* a fault of akv itself */
    CLI_SIGNAL = 128     /* + signal number: 130 after Ctrl-C */
};

int cli_exit_of(akv_status status);

/* "akv: error: ..." on standard error; returns `code` so that callers can `return cli_fail(...)`. */
int cli_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same with the library's message. An interruption gets no message, only its exit code. */
int cli_fail_diag(akv_status status, const akv_diag *diag, const char *what);
#ifdef __clang_analyzer__ /* it does not see into the other file what these return: what is given, and not CLI_OK */
#  define cli_fail(code, ...) (cli_fail(code, __VA_ARGS__), (code))
#  define cli_fail_diag(status, diag, what) (cli_fail_diag(status, diag, what), CLI_INTERNAL)
#endif
void cli_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));
void cli_note(const char *format, ...) __attribute__((format(printf, 1, 2))); /* plain line on standard error */

/* ---------------------------------------------------------------------------------------------------- interruption */

/*
 * The first SIGINT or SIGTERM only sets a flag, which everything that takes time polls. A second one ends the program
 * at once; a temporary file that is being written is removed even then.
 */
void cli_signals_install(void);
int cli_interrupted(void); /* the signal's number, or 0 */
/* The interruption has ended the work; what is left, e.g. writing what was measured, may take its time. A further signal
 * counts as the first one. */
void cli_interruption_over(void);
/* From now on the first signal does not end the reading and writing of files: for programs that finish what they have begun. */
void cli_files_outlast_signal(void);
int cli_files_interrupted(void); /* cli_interrupted for reading and writing: 0 after cli_files_outlast_signal */

/* ----------------------------------------------------------------------------------------------------------- files */

typedef struct cli_buffer {
    char *data;
    size_t bytes;
    size_t capacity;
} cli_buffer;

/* Grows as needed; false when out of memory. */
bool cli_buffer_add(cli_buffer *buffer, const void *data, size_t bytes);
void cli_buffer_free(cli_buffer *buffer);

/*
 * Appends one text file ("-" = standard input). Checked: readable, no directory, not empty, UTF-8 without NUL; a byte
 * order mark is dropped. Returns an exit code and prints the reason.
 */
int cli_read_text(const char *path, cli_buffer *text);
/* Several files, joined at line ends. */
int cli_read_texts(const char *const *paths, size_t num_paths, cli_buffer *text);

/* Number of leading bytes that are valid UTF-8. */
size_t cli_utf8_prefix(const char *text, size_t bytes);

typedef struct cli_image {
    void *data;
    size_t bytes;
} cli_image;

/*
 * A copy of a regular file in memory. It is read and not mapped: what was checked must not change afterwards, and a
 * mapped file that another program shortens would end this one. An empty file is CLI_CORRUPT: no .akv file is empty.
 */
int cli_image_read(const char *path, cli_image *image);
void cli_image_free(cli_image *image);

/*
 * A file that appears under its name only when it is complete: temporary file in the same folder, fsync, rename, fsync
 * of the folder. Devices and pipes are written directly.
 */
typedef struct cli_output cli_output;
int cli_output_open(const char *path, cli_output **out);
/* An akv_document_write_fn. */
akv_status cli_output_write(void *output, const void *data, size_t bytes, akv_diag *diag);
int cli_output_commit(cli_output *output); /* frees it, whatever happens */
void cli_output_abort(cli_output *output); /* removes the temporary file; NULL is fine */

/* Whether such a file could be made now: asked before long work, so that its result has somewhere to go. */
int cli_check_writable(const char *path);

/* All of `data` to a file as above ("-" = standard output). */
int cli_write_file(const char *path, const void *data, size_t bytes);

/* --------------------------------------------------------------------------------------------------- option values */

/* Each prints what is wrong and returns false. `option` is the name for the message. */
bool cli_parse_u64(const char *option, const char *text, uint64_t min, uint64_t max, uint64_t *out);
bool cli_parse_double(const char *option, const char *text, double min, double max, double *out);
bool cli_parse_bytes(const char *option, const char *text, uint64_t *out); /* 123, 64K, 1.5M, 2G (powers of 1024) */

typedef enum cli_method { CLI_METHOD_AKV, CLI_METHOD_SNAPKV, CLI_METHOD_DENSE, CLI_METHOD_EXACT } cli_method;
const char *cli_method_name(cli_method method);
bool cli_parse_method(const char *text, cli_method *out);
bool cli_parse_profile(const char *text, akv_profile *out);
const char *cli_profile_name(uint32_t profile);

/* How small the cache shall be; at most one of the three may be given. */
typedef struct cli_size_goal {
    int given;             /* how many of --keep, --ratio, --budget */
    double keep_ratio;     /* 0.1 unless given */
    uint64_t budget_bytes; /* all layers together; 0 = not given */
} cli_size_goal;

void cli_size_goal_init(cli_size_goal *goal);
bool cli_size_goal_set(cli_size_goal *goal, int option, const char *value); /* option: 'k', 'r' or 'b' */

/* "12.3 MiB" into a static ring of buffers: good for a few uses in one printf. */
const char *cli_bytes(uint64_t bytes);

/* Text from a file for a terminal: control characters become '?'. Into a static buffer; one use at a time. */
const char *cli_printable(const char *text);

uint32_t cli_default_threads(void);

/* -------------------------------------------------------------------------------------------------------- progress */

/* A bar when standard error is a terminal, otherwise a line at the end of each stage and now and then in long ones. */
typedef struct cli_progress {
    bool terminal;
    bool quiet;
    bool bar_shown;
    int stage; /* -1 = none */
    double stage_start;
    double last_print;
    uint64_t last_done;
} cli_progress;

void cli_progress_init(cli_progress *progress, bool quiet);
/* `name` e.g. "prefill", `unit` e.g. "tokens" or NULL for a bare percentage. */
void cli_progress_update(cli_progress *progress, int stage, const char *name, const char *unit, uint64_t done,
                         uint64_t total);
void cli_progress_end(cli_progress *progress); /* wipes the bar */

double cli_now(void); /* monotonic seconds */
uint64_t cli_resident_bytes(void); /* of this process; 0 where the system does not say */

/* ---------------------------------------------------------------------------------------------------------- report */

typedef struct cli_layer_report {
    bool hosted;
    const char *native_kind; /* when not hosted */
    double seconds;
    akv_segment_info segment;
} cli_layer_report;

typedef struct cli_answer {
    const char *question;
    cli_buffer text;
    uint64_t question_tokens;
    uint64_t answer_tokens;
    double prompt_seconds; /* reading the question */
    double decode_seconds;
    const char *stopped;   /* "end", "limit" or "context" */
} cli_answer;

/* Everything that was really done. Zero fields that do not apply. */
typedef struct cli_report {
    const char *command;
    const char *model_description;
    const char *model_path;
    const char *document_path; /* of a .akv file, or NULL */
    const char *method;
    const char *profile;
    uint64_t tokens;
    uint64_t document_tokens_evaluated; /* by this run */
    double keep_ratio;
    const char *shares;      /* file of `akv calibrate` that split the budget, or NULL */
    double share_strength;   /* 1 = as the file says; less: nearer to equal, for a layer's fixed part */
    uint64_t seed;
    uint32_t num_layers;
    uint32_t hosted_layers;
    const cli_layer_report *layers; /* [num_layers] or NULL */
    uint64_t dense_bytes;
    uint64_t budget_bytes;
    akv_bytes bytes;        /* sum over layers */
    uint64_t native_bytes;
    uint64_t file_bytes;    /* of a .akv file written or read */
    uint64_t rss_before;
    uint64_t rss_after;
    uint64_t rss_end; /* now; 0 = not measured */
    uint32_t threads;
    double load_seconds;
    double prefill_seconds;
    double compress_seconds;
    double decode_seconds;
    double attend_seconds;
    uint64_t decode_tokens;
    uint64_t tail_moves;
    double residual_energy_lost[2]; /* keys, values: by repack */
    const cli_answer *answers;
    size_t num_answers;
} cli_report;

/* Fills bytes, dense_bytes and budget_bytes from the layers. */
void cli_report_sum(cli_report *report);
/* What the layer's cache costs uncompressed; a segment that dropped tokens does not know how many there were. */
uint64_t cli_layer_dense_bytes(const cli_report *report, const cli_layer_report *layer);
void cli_report_print(const cli_report *report); /* on standard error */
int cli_report_json(const cli_report *report, const char *path);
/* The same sum for programs: "total" and one number per kind. */
struct cJSON *cli_bytes_json(const akv_bytes *bytes);
/* A string member; bytes that are no UTF-8 become U+FFFD, so that the file stays JSON. */
void cli_json_text(struct cJSON *object, const char *key, const char *text, size_t bytes);
/* Prints the tree to a file ("-" = standard output) and deletes it. */
int cli_json_write(struct cJSON *root, const char *path);
/* One line per kind, e.g. for info and plan: "  anchors  1.2 MiB  12.3 %". */
void cli_print_bytes_by_kind(void *stream, const akv_bytes *bytes);

/* ----------------------------------------------------------------------------------------------------- subcommands */

typedef struct cli_command {
    const char *name;
    const char *summary;
    int (*run)(int argc, char **argv); /* argv[0] is the subcommand's name */
    const char *help;
} cli_command;

extern const cli_command cli_cmd_ask;
extern const cli_command cli_cmd_pack;
extern const cli_command cli_cmd_chat;
extern const cli_command cli_cmd_serve;
extern const cli_command cli_cmd_repack;
extern const cli_command cli_cmd_info;
extern const cli_command cli_cmd_verify;
extern const cli_command cli_cmd_plan;
extern const cli_command cli_cmd_eval;
extern const cli_command cli_cmd_calibrate;
extern const cli_command cli_cmd_bench;

/* After getopt_long met something it does not know. */
int cli_usage(const cli_command *command);
int cli_help(const cli_command *command);

#endif
