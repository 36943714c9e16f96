/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cmd_calibrate.c - `akv calibrate`: once per model, how much does each layer suffer from compression? The file lets
 * ask, pack and eval split the same bytes unevenly over the layers.
 *
 * A piece of text is read, its cache compressed at several ratios, and the text's continuation is read on from the
 * exact cache while every layer attends to the compressed ones as well (akv_llama_compare). No logits are compared: a
 * quantised model's own rounding noise is larger than what one compressed layer does to them.
 */
#include "eval.h"
#include "settings.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPT_CTX = 600, OPT_CONTINUATION, OPT_PIECES };

/* From where a layer is nearly exact to where the largest ratio in use, unevenly split, may put it. */
static const double default_ratios[] = {4, 7, 10, 14, 20, 28, 40};
enum { NUM_RATIOS = sizeof default_ratios / sizeof default_ratios[0] };

static const char help[] =
    "usage: akv calibrate -m MODEL -f TEXT -o FILE [options]\n"
    "\n"
    "Measures once how much each layer of a model suffers from compression. With the file, `akv ask`, `akv pack` and\n"
    "`akv eval` (--shares FILE) split the same bytes unevenly over the layers: the answers are nearer to those of the\n"
    "dense cache, nothing else changes.\n"
    "\n"
    "  -m, --model FILE     GGUF model\n"
    "  -f, --file FILE      text, UTF-8, such as you will compress; \"-\" = standard input; may be given several times\n"
    "  -o, --output FILE    where to (JSON)\n"
    "      --ctx N          tokens that are compressed (4096)\n"
    "      --continuation N tokens that look back at them (256)\n"
    "      --pieces N       pieces of the text, which do not overlap (2)\n"
    "      --profile NAME   codec profile: default, paper (default)\n"
    "      --seed S         of pieces and random anchors (0)\n"
    "  -t, --threads N      (all processors)\n"
    "  -q, --quiet          no progress\n"
    "  -h, --help           this text\n"
    "\n"
    "example:\n"
    "  akv calibrate -m model.gguf -f book.txt -o model.shares\n"
    "  akv ask -m model.gguf -f other.txt --ratio 20 --shares model.shares \"Who opened the letter?\"\n";

static bool take_option(eval_options *o, const char **output, int option, const char *value)
{
    switch (option) {
    case 'o':
        *output = value;
        return true;
    case OPT_CTX:
        return cli_parse_u64("--ctx", value, 256, 1u << 24, &o->ctx);
    case OPT_CONTINUATION: /* 1024: what the host's tail holds */
        return cli_parse_u64("--continuation", value, 1, 1024, &o->continuation);
    case OPT_PIECES:
        o->pieces_given = true;
        return cli_parse_u64("--pieces", value, 1, 1000, &o->pieces);
    default:
        return cli_settings_option(&o->settings, option, value);
    }
}

static int check(const eval_options *o, const char *output)
{
    if (o->settings.model == NULL)
        return cli_fail(CLI_USAGE, "which model? give a GGUF file with -m");
    if (o->settings.num_files == 0)
        return cli_fail(CLI_USAGE, "which text? give one with -f, such as you will compress");
    if (output == NULL)
        return cli_fail(CLI_USAGE, "where to? give the file to write with -o");
    return cli_check_writable(output); /* before minutes of work, not after them */
}

static int parse(int argc, char **argv, eval_options *o, const char **output)
{
    static const struct option options[] = {{"model", required_argument, NULL, 'm'},
                                            {"file", required_argument, NULL, 'f'},
                                            {"output", required_argument, NULL, 'o'},
                                            {"ctx", required_argument, NULL, OPT_CTX},
                                            {"continuation", required_argument, NULL, OPT_CONTINUATION},
                                            {"pieces", required_argument, NULL, OPT_PIECES},
                                            {"profile", required_argument, NULL, OPT_PROFILE},
                                            {"seed", required_argument, NULL, OPT_SEED},
                                            {"threads", required_argument, NULL, 't'},
                                            {"quiet", no_argument, NULL, 'q'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    int option;
    memset(o, 0, sizeof *o);
    cli_settings_init(&o->settings);
    o->ctx = 4096;
    o->continuation = 256;
    o->pieces = 2;
    while ((option = getopt_long(argc, argv, "m:f:o:t:qh", options, NULL)) != -1) {
        if (option == 'h')
            return -1;
        if (!take_option(o, output, option, optarg))
            return cli_usage(&cli_cmd_calibrate);
    }
    if (optind != argc) {
        cli_fail(CLI_USAGE, "\"%s\" is one argument too many", argv[optind]);
        return cli_usage(&cli_cmd_calibrate);
    }
    const int code = check(o, *output);
    return code == CLI_USAGE ? cli_usage(&cli_cmd_calibrate) : code;
}

/* -------------------------------------------------------------------------------------------------------- measuring */

typedef struct calibration {
    cli_shares out;
    double *energy;        /* [layers] of one piece */
    double *one;           /* [ratios][layers] of one piece */
} calibration;

static bool make_room(calibration *c, uint32_t num_layers)
{
    c->out.num_layers = num_layers;
    c->out.errors = calloc((size_t)NUM_RATIOS * num_layers, sizeof(double));
    c->one = calloc((size_t)NUM_RATIOS * num_layers, sizeof(double));
    c->energy = calloc(num_layers, sizeof(double));
    return c->out.errors && c->one && c->energy;
}

/* The prefilled document at all ratios; those that this length cannot reach are left out. Exit code. */
static int compress_all(eval_run *run, calibration *c, bool first, akv_llama_store **stores)
{
    akv_diag diag = {AKV_OK, ""};
    uint32_t n = 0;
    for (size_t r = 0; r < NUM_RATIOS; r++) {
        akv_config config;
        akv_config_init(&config);
        config.profile = c->out.profile;
        config.seed = run->options->settings.seed;
        config.keep_ratio = 1.0 / default_ratios[r];
        const akv_status status = akv_llama_compress(run->session.host, AKV_LLAMA_ANCHOR, &config, &stores[n], &diag);
        if (status == AKV_E_INFEASIBLE && n != 0) {
            if (first)
                eval_note(run, "%llu tokens cannot be made %g times smaller: measured up to %g times",
                          (unsigned long long)run->options->ctx, default_ratios[r], default_ratios[r - 1]);
            break;
        }
        if (status != AKV_OK)
            return eval_failed(run, NULL, status, &diag);
        c->out.ratios[n++] = default_ratios[r];
    }
    c->out.num_ratios = n;
    return CLI_OK;
}

static int compare(eval_run *run, calibration *c, akv_llama_store *const *stores, const int32_t *rest)
{
    akv_llama *host = run->session.host;
    const uint32_t L = c->out.num_layers;
    akv_llama_store *exact = NULL;
    akv_diag diag = {AKV_OK, ""};
    akv_config config;
    akv_config_init(&config);
    akv_status status = akv_llama_compress(host, AKV_LLAMA_EXACT, &config, &exact, &diag);
    if (status == AKV_OK)
        status = akv_llama_attach(host, exact, &diag);
    akv_llama_store_release(exact);
    memset(c->one, 0, (size_t)NUM_RATIOS * L * sizeof *c->one);
    memset(c->energy, 0, L * sizeof *c->energy);
    if (status == AKV_OK)
        status = akv_llama_compare(host, stores, c->out.num_ratios, rest, (size_t)run->options->continuation, c->one,
                                   c->energy, &diag);
    akv_llama_detach(host, NULL);
    if (status != AKV_OK)
        return eval_failed(run, NULL, status, &diag);
    for (uint32_t r = 0; r < c->out.num_ratios; r++)
        for (uint32_t l = 0; l < L; l++)
            c->out.errors[(size_t)r * L + l] +=
                c->energy[l] > 0.0 ? c->one[(size_t)r * L + l] / c->energy[l] / (double)run->options->pieces : -1.0;
    return CLI_OK;
}

static int one_piece(eval_run *run, calibration *c, uint64_t number, const int32_t *document, const int32_t *rest)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_store *stores[NUM_RATIOS] = {NULL};
    eval_label(run, "text", number, run->options->pieces, NULL);
    const akv_status status = akv_llama_prefill(run->session.host, document, (size_t)run->options->ctx, 0, &diag);
    if (status != AKV_OK)
        return eval_failed(run, NULL, status, &diag);
    int code = compress_all(run, c, number == 1, stores);
    if (code == CLI_OK)
        code = compare(run, c, stores, rest);
    for (size_t r = 0; r < NUM_RATIOS; r++)
        akv_llama_store_release(stores[r]);
    return code;
}

/* The split at the ratios that people use, and what is expected of it. */
static int print_outcome(const calibration *c)
{
    const cli_shares *s = &c->out;
    const uint32_t L = s->num_layers;
    akv_diag diag = {AKV_OK, ""};
    double *ten = calloc(L, sizeof *ten), *twenty = calloc(L, sizeof *twenty);
    if (ten == NULL || twenty == NULL) {
        free(ten);
        free(twenty);
        return cli_fail(CLI_NO_MEMORY, "no memory for the shares of %u layers", L);
    }
    printf("layer  relative squared error of its attention output at %.4gx .. %.4gx   share of 10x, of 20x\n",
           s->ratios[0], s->ratios[s->num_ratios - 1]);
    akv_status status = akv_llama_solve_shares(s->ratios, s->errors, s->num_ratios, L, 0.1, ten, &diag);
    if (status == AKV_OK)
        status = akv_llama_solve_shares(s->ratios, s->errors, s->num_ratios, L, 0.05, twenty, &diag);
    for (uint32_t l = 0; status == AKV_OK && l < L; l++) {
        if (s->errors[l] < 0.0)
            continue;
        printf("%5u", l);
        for (uint32_t r = 0; r < s->num_ratios; r++)
            printf("  %.5f", s->errors[(size_t)r * L + l]);
        printf("   %.2f  %.2f\n", ten[l], twenty[l]);
    }
    free(ten);
    free(twenty);
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, NULL);
    return fflush(stdout) == 0 ? CLI_OK : cli_fail(CLI_IO, "cannot write to standard output");
}

static int measure(eval_run *run, eval_options *o, calibration *c)
{
    int code = eval_open(run, o);
    if (code != CLI_OK)
        return code;
    c->out.profile = o->settings.profile;
    int32_t *document = malloc((size_t)o->ctx * sizeof *document);
    if (document == NULL || !make_room(c, run->session.model.num_layers)) {
        free(document);
        return cli_fail(CLI_NO_MEMORY, "no memory for the errors of %u layers", run->session.model.num_layers);
    }
    run->session.label = run->label;
    uint64_t random = o->settings.seed;
    for (uint64_t p = 0; code == CLI_OK && p < o->pieces; p++) {
        const int32_t *rest;
        eval_piece_tokens(run, p, &random, document, &rest);
        code = one_piece(run, c, p + 1, document, rest);
    }
    free(document);
    cli_progress_end(&run->session.progress);
    return code;
}

static int run_calibrate(int argc, char **argv)
{
    eval_options o;
    const char *output = NULL;
    calibration c = {.one = NULL};
    int code = parse(argc, argv, &o, &output);
    eval_run *run = code == CLI_OK ? calloc(1, sizeof *run) : NULL;
    if (code == CLI_OK && run == NULL)
        code = cli_fail(CLI_NO_MEMORY, "no memory for the measurement");
    if (code == CLI_OK) {
        code = measure(run, &o, &c);
        if (code == CLI_OK)
            code = print_outcome(&c);
        if (code == CLI_OK)
            code = cli_shares_save(output, &run->session, &c.out, o.ctx, o.pieces, o.continuation);
    }
    if (run != NULL)
        eval_close(run);
    free(run);
    free(c.one);
    free(c.energy);
    cli_shares_free(&c.out);
    cli_settings_free(&o.settings);
    return code < 0 ? cli_help(&cli_cmd_calibrate) : code;
}

const cli_command cli_cmd_calibrate = {"calibrate", "measure once how a model's layers best share a budget",
                                       run_calibrate, help};
