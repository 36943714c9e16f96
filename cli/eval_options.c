/* SPDX-License-Identifier: Apache-2.0 */
/* eval_options.c - the command line of `akv eval`: lists, defaults, and what cannot be meant. */
#include "eval_options.h"

#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    OPT_CTX = 500,
    OPT_CONTINUATION,
    OPT_PIECES,
    OPT_SAMPLES,
    OPT_NEEDLES,
    OPT_AWARE,
    OPT_AGNOSTIC,
    OPT_EQUAL,
    OPT_SHOW,
    OPT_HTML
};

static const eval_method methods[] = {
    {"dense", EVAL_DENSE, 0, 0},
    {"exact", EVAL_EXACT, 0, 0},
    {"akv", EVAL_AKV, 0, 0},
    {"snapkv", EVAL_SNAPKV, 0, 0},
    {"rotated2", EVAL_ROTATED, 2, 0},
    {"rotated3", EVAL_ROTATED, 3, 0},
    {"rotated4", EVAL_ROTATED, 4, 0},
    {"q8_0", EVAL_CACHE, 0, AKV_LLAMA_CACHE_Q8_0},
    {"q5_1", EVAL_CACHE, 0, AKV_LLAMA_CACHE_Q5_1},
    {"q5_0", EVAL_CACHE, 0, AKV_LLAMA_CACHE_Q5_0},
    {"q4_1", EVAL_CACHE, 0, AKV_LLAMA_CACHE_Q4_1},
    {"q4_0", EVAL_CACHE, 0, AKV_LLAMA_CACHE_Q4_0},
    {"iq4_nl", EVAL_CACHE, 0, AKV_LLAMA_CACHE_IQ4_NL},
};
enum { NUM_METHODS = sizeof methods / sizeof methods[0] };

/* ----------------------------------------------------------------------------------------------------------- lists */

/* Calls `take` for each word between commas. */
static bool each(eval_options *o, const char *option, const char *text, bool (*take)(eval_options *, const char *word))
{
    for (;;) {
        char word[64];
        const size_t n = strcspn(text, ",");
        if (n == 0 || n >= sizeof word) {
            cli_fail(CLI_USAGE, "%s: \"%s\" is no list of values with commas between them", option, text);
            return false;
        }
        memcpy(word, text, n);
        word[n] = '\0';
        if (!take(o, word))
            return false;
        if (text[n] == '\0')
            return true;
        text += n + 1;
    }
}

static bool full(size_t count, const char *option)
{
    if (count == EVAL_MAX_LIST)
        cli_fail(CLI_USAGE, "%s: more than %d values", option, EVAL_MAX_LIST);
    return count == EVAL_MAX_LIST;
}

static bool take_ratio(eval_options *o, const char *word)
{
    return !full(o->num_ratios, "--ratio") && cli_parse_double("--ratio", word, 1.0, 1e6, &o->ratios[o->num_ratios]) &&
           ++o->num_ratios;
}

static bool take_profile(eval_options *o, const char *word)
{
    akv_profile profile;
    if (!cli_parse_profile(word, &profile))
        return false;
    for (size_t i = 0; i < o->num_profiles; i++)
        if (o->profiles[i] == profile)
            return true;
    if (full(o->num_profiles, "--profile"))
        return false;
    o->profiles[o->num_profiles++] = profile;
    return true;
}

static bool take_method(eval_options *o, const char *word)
{
    for (size_t i = 0; i < NUM_METHODS; i++) {
        if (strcmp(methods[i].name, word) != 0)
            continue;
        for (size_t m = 0; m < o->num_methods; m++)
            if (o->methods[m] == &methods[i])
                return true;
        o->methods[o->num_methods++] = &methods[i];
        return true;
    }
    cli_fail(CLI_USAGE,
             "--method: \"%s\" is unknown; there are akv, snapkv, rotated2, rotated3, rotated4, q8_0, q5_1, q5_0, "
             "q4_1, q4_0 and iq4_nl (dense and exact are always measured)",
             word);
    return false;
}

static bool take_task(eval_options *o, const char *word)
{
    for (unsigned t = 0; t < NEEDLE_TASKS; t++) {
        if (strcmp(needle_task_names[t], word) == 0) {
            o->tasks |= 1u << t;
            return true;
        }
    }
    cli_fail(CLI_USAGE,
             "--needles: \"%s\" is unknown; there are all, none, word, number, uuid, multi_key, multi_value and "
             "multi_query",
             word);
    return false;
}

static bool parse_tasks(eval_options *o, const char *text)
{
    o->tasks = 0;
    if (strcmp(text, "none") == 0)
        return true;
    if (strcmp(text, "all") != 0)
        return each(o, "--needles", text, take_task);
    o->tasks = (1u << NEEDLE_TASKS) - 1;
    return true;
}

/* --------------------------------------------------------------------------------------------------------- options */

static void set_defaults(eval_options *o)
{
    memset(o, 0, sizeof *o);
    cli_settings_init(&o->settings);
    o->ctx = 4096;
    o->continuation = 256;
    o->pieces = o->samples = 4;
    o->tasks = (1u << NEEDLE_TASKS) - 1;
}

static bool fill_lists(eval_options *o)
{
    if (o->num_ratios == 0 && !each(o, "--ratio", "10,20", take_ratio))
        return false;
    if (o->num_profiles == 0 && !each(o, "--profile", "default", take_profile))
        return false;
    return o->num_methods != 0 || each(o, "--method", "akv,snapkv,rotated2,rotated3,rotated4,q8_0,q4_0", take_method);
}

static int check(eval_options *o)
{
    const cli_settings *s = &o->settings;
    if (s->model == NULL)
        return cli_fail(CLI_USAGE, "which model? give a GGUF file with -m");
    if (s->num_files == 0)
        return cli_fail(CLI_USAGE,
                        "which text? give one with -f: plain prose such as you will compress, without which neither "
                        "perplexity nor needles mean anything; %llu pieces of %llu tokens are about %s",
                        (unsigned long long)(o->pieces != 0 ? o->pieces : 1),
                        (unsigned long long)(o->ctx + o->continuation),
                        cli_bytes((o->pieces != 0 ? o->pieces : 1) * (o->ctx + o->continuation) * 4));
    if (o->pieces == 0 && o->samples == 0)
        return cli_fail(CLI_USAGE, "--pieces 0 and no needles: nothing is left to measure");
    if (s->json != NULL && o->html != NULL && strcmp(s->json, "-") == 0 && strcmp(o->html, "-") == 0)
        return cli_fail(CLI_USAGE, "--json and --html cannot both go to standard output");
    int code = s->json != NULL ? cli_check_writable(s->json) : CLI_OK; /* before an hour of work, not after it */
    return code == CLI_OK && o->html != NULL ? cli_check_writable(o->html) : code;
}

static bool take_option(eval_options *o, int option, const char *value)
{
    switch (option) {
    case OPT_CTX:
        return cli_parse_u64("--ctx", value, 64, 1u << 24, &o->ctx);
    case OPT_CONTINUATION:
        return cli_parse_u64("--continuation", value, 1, 65536, &o->continuation);
    case OPT_PIECES:
        o->pieces_given = true;
        return cli_parse_u64("--pieces", value, 0, 10000, &o->pieces);
    case OPT_SAMPLES:
        return cli_parse_u64("--samples", value, 0, 10000, &o->samples);
    case OPT_NEEDLES:
        return parse_tasks(o, value);
    case OPT_AWARE:
        o->protocol[EVAL_AWARE] = true;
        return true;
    case OPT_AGNOSTIC:
        o->protocol[EVAL_AGNOSTIC] = true;
        return true;
    case OPT_EQUAL:
        o->equal_bytes = true;
        return true;
    case OPT_SHOW:
        o->show = true;
        return true;
    case OPT_HTML:
        o->html = value;
        return true;
    case 'r':
        return each(o, "--ratio", value, take_ratio);
    case OPT_PROFILE:
        return each(o, "--profile", value, take_profile);
    case OPT_METHOD:
        return each(o, "--method", value, take_method);
    default:
        return cli_settings_option(&o->settings, option, value);
    }
}

int eval_parse(int argc, char **argv, eval_options *o)
{
    static const struct option own[] = {{"model", required_argument, NULL, 'm'},
                                        {"file", required_argument, NULL, 'f'},
                                        {"ctx", required_argument, NULL, OPT_CTX},
                                        {"continuation", required_argument, NULL, OPT_CONTINUATION},
                                        {"pieces", required_argument, NULL, OPT_PIECES},
                                        {"samples", required_argument, NULL, OPT_SAMPLES},
                                        {"needles", required_argument, NULL, OPT_NEEDLES},
                                        {"aware", no_argument, NULL, OPT_AWARE},
                                        {"agnostic", no_argument, NULL, OPT_AGNOSTIC},
                                        {"equal-bytes", no_argument, NULL, OPT_EQUAL},
                                        {"show", no_argument, NULL, OPT_SHOW},
                                        {"ratio", required_argument, NULL, 'r'},
                                        {"profile", required_argument, NULL, OPT_PROFILE},
                                        {"method", required_argument, NULL, OPT_METHOD},
                                        {"seed", required_argument, NULL, OPT_SEED},
                                        {"threads", required_argument, NULL, 't'},
                                        {"shares", required_argument, NULL, OPT_SHARES},
                                        {"raw", no_argument, NULL, OPT_RAW},
                                        {"system", required_argument, NULL, OPT_SYSTEM},
                                        {"json", required_argument, NULL, OPT_JSON},
                                        {"html", required_argument, NULL, OPT_HTML},
                                        {"quiet", no_argument, NULL, 'q'},
                                        {"help", no_argument, NULL, 'h'},
                                        {NULL, 0, NULL, 0}};
    int option;
    set_defaults(o);
    while ((option = getopt_long(argc, argv, "m:f:t:qh", own, NULL)) != -1) {
        if (option == 'h')
            return -1;
        if (!take_option(o, option, optarg))
            return cli_usage(&cli_cmd_eval);
    }
    if (optind != argc) {
        cli_fail(CLI_USAGE, "\"%s\" is one argument too many", argv[optind]);
        return cli_usage(&cli_cmd_eval);
    }
    if (!fill_lists(o))
        return cli_usage(&cli_cmd_eval);
    if (!o->protocol[EVAL_AWARE])
        o->protocol[EVAL_AGNOSTIC] = true;
    if (o->tasks == 0)
        o->samples = 0;
    const int code = check(o);
    return code == CLI_USAGE ? cli_usage(&cli_cmd_eval) : code;
}

const char eval_help[] =
    "usage: akv eval -m MODEL -f TEXT [options]\n"
    "\n"
    "Measures what a compressed cache costs in quality, with your model and your text, against the dense cache: how "
    "well\n"
    "the text's continuation is predicted (perplexity, Kullback-Leibler divergence, top-1 agreement), and whether "
    "facts\n"
    "placed in the text are found (needles). Other ways of saving bytes are measured on the same samples.\n"
    "\n"
    "  -m, --model FILE     GGUF model\n"
    "  -f, --file FILE      text, UTF-8, \"-\" = standard input; may be given several times. Prose such as you will "
    "compress\n"
    "      --ctx N          tokens that are compressed (4096)\n"
    "      --continuation N tokens predicted after them (256)\n"
    "      --pieces N       pieces of the text, which do not overlap (4); 0: no continuations\n"
    "      --samples N      contexts with needles (4); 0: no needles\n"
    "      --needles LIST   all, none, or of: word, number, uuid (one fact each), multi_key (four keys, one asked "
    "for),\n"
    "                       multi_value (four values of one key), multi_query (four keys in one question)\n"
    "      --agnostic       compress the context, ask later (the default)\n"
    "      --aware          compress context and question together; give both for both\n"
    "      --ratio LIST     how many times smaller, for akv and snapkv (10,20)\n"
    "      --profile LIST   codec profiles of akv: default, paper (default)\n"
    "      --method LIST    akv; snapkv (eviction at equal bytes); rotated2, rotated3, rotated4 (every token in so "
    "many\n"
    "                       bits a coordinate, the last 128 exact); libllama's own cache types q8_0, q5_1, q5_0, "
    "q4_1,\n"
    "                       q4_0, iq4_nl, each of which costs one more prefill a sample\n"
    "                       (akv,snapkv,rotated2,rotated3,rotated4,q8_0,q4_0)\n"
    "      --shares FILE    of `akv calibrate`: split akv's bytes unevenly over the layers\n"
    "      --equal-bytes    akv also at the bytes of every method that has only one size\n"
    "      --show           print each question's values and the answers, on standard error\n"
    "      --seed S         of pieces, needles and random anchors (0)\n"
    "  -t, --threads N      (all processors)\n"
    "      --raw            ask in plain text, not through the model's chat template\n"
    "      --system TEXT    system message of the chat\n"
    "      --json FILE      rows for programs (\"-\": standard output, instead of the table)\n"
    "      --html FILE      a page with plots, self-contained\n"
    "  -q, --quiet          no progress\n"
    "  -h, --help           this text\n"
    "\n"
    "Always measured: `dense`, whose divergence from itself in other batches is the engine's own noise, and `exact`,\n"
    "everything kept through the library's path, which must stay at that noise. Ctrl-C shows what there is so far.\n"
    "\n"
    "example:\n"
    "  akv eval -m model.gguf -f book.txt --ctx 4096 --ratio 5,10,20,40 --profile paper,default --html eval.html\n";
