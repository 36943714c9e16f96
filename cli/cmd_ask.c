/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_ask.c - `akv ask`: a document, read once, and questions that each start right behind it. */
#include "sample.h"
#include "session.h"
#include "settings.h"

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPT_FROM = 300, OPT_TEMP };

typedef struct ask_options {
    cli_settings settings;
    const char *from;
    uint64_t max_tokens;
    double temperature;
    char **questions;
    size_t num_questions;
} ask_options;

/* One question's tokens, known before the document is read, so that nothing can fail late. */
typedef struct prompt {
    int32_t *tokens;
    size_t num_tokens;
} prompt;

static int check(const ask_options *o, bool document_options)
{
    const cli_settings *s = &o->settings;
    if (s->model == NULL)
        return cli_fail(CLI_USAGE, "which model? give a GGUF file with -m");
    if (o->from == NULL && s->num_files == 0)
        return cli_fail(CLI_USAGE, "which document? give a text file with -f, or a .akv file with --from");
    if (o->from != NULL && document_options)
        return cli_fail(CLI_USAGE, "--from takes a document that is already compressed; -f, --keep, --ratio, --budget, "
                                   "--profile, --method, --raw and --system were decided when it was packed");
    if (s->method == CLI_METHOD_DENSE && s->goal.given != 0)
        return cli_fail(CLI_USAGE, "--method dense compresses nothing; leave out --keep, --ratio and --budget");
    if (o->num_questions == 0)
        return cli_fail(CLI_USAGE, "no question was given");
    if (s->json != NULL && strcmp(s->json, "-") == 0)
        return cli_fail(CLI_USAGE, "standard output carries the answers; give --json the name of a file");
    for (size_t i = 0; i < o->num_questions; i++) {
        const char *q = o->questions[i];
        if (strspn(q, " \t\r\n") == strlen(q))
            return cli_fail(CLI_BAD_INPUT, "question %zu is empty", i + 1);
        if (cli_utf8_prefix(q, strlen(q)) != strlen(q))
            return cli_fail(CLI_BAD_INPUT, "question %zu is not UTF-8", i + 1);
    }
    return CLI_OK;
}

static int parse(int argc, char **argv, ask_options *o)
{
    static const struct option own[] = {{"from", required_argument, NULL, OPT_FROM},
                                        {"predict", required_argument, NULL, 'n'},
                                        {"temp", required_argument, NULL, OPT_TEMP},
                                        CLI_SETTINGS_LONG,
                                        {NULL, 0, NULL, 0}};
    bool document_options = false;
    int option;
    while ((option = getopt_long(argc, argv, "n:" CLI_SETTINGS_SHORT, own, NULL)) != -1) {
        bool ok = true;
        switch (option) {
        case 'h': return -1;
        case OPT_FROM: o->from = optarg; break;
        case 'n': ok = cli_parse_u64("-n", optarg, 1, 1000000, &o->max_tokens); break;
        case OPT_TEMP: ok = cli_parse_double("--temp", optarg, 0.0, 100.0, &o->temperature); break;
        default:
            ok = cli_settings_option(&o->settings, option, optarg);
            document_options = document_options || cli_settings_is_document(option);
        }
        if (!ok)
            return cli_usage(&cli_cmd_ask);
    }
    o->questions = argv + optind;
    o->num_questions = (size_t)(argc - optind);
    int code = check(o, document_options);
    return code == CLI_USAGE ? cli_usage(&cli_cmd_ask) : code;
}

/* ---------------------------------------------------------------------------------------------------------- answer */

static int write_answer(const char *text, size_t bytes)
{
    if (fwrite(text, 1, bytes, stdout) != bytes || fflush(stdout) != 0)
        return cli_fail(CLI_IO, "cannot write the answer to standard output: %s", strerror(errno));
    return CLI_OK;
}

static int decode(cli_session *s, const int32_t *tokens, size_t n, const cli_answer *answer, bool *context_full)
{
    akv_diag diag = {AKV_OK, ""};
    akv_status status = akv_llama_decode(s->host, tokens, n, AKV_LLAMA_LOGITS_LAST, &diag);
    if (status == AKV_OK)
        return CLI_OK;
    if (status == AKV_E_NO_SPACE && answer->answer_tokens != 0) { /* an answer cut short is still an answer */
        *context_full = true;
        return CLI_OK;
    }
    cli_progress_end(&s->progress);
    if (answer->answer_tokens != 0)
        fputc('\n', stdout);
    return cli_fail_diag(status, &diag, NULL);
}

/* Picks, prints and appends tokens until the model ends the answer. */
static int generate(cli_session *s, const ask_options *o, cli_answer *answer)
{
    cli_sampler sampler = {o->temperature, o->settings.seed};
    bool context_full = false;
    answer->stopped = "limit";
    while (answer->answer_tokens < o->max_tokens) {
        const float *logits = akv_llama_logits(s->host, -1);
        int64_t token = logits == NULL ? -1 : cli_sample(&sampler, logits, s->model.vocab_tokens);
        if (token < 0)
            return cli_fail(CLI_INTERNAL, "the model gave logits that are no numbers");
        if (akv_llama_is_end(s->host, (int32_t)token)) {
            answer->stopped = "end";
            break;
        }
        char piece[512];
        size_t bytes = 0;
        akv_diag diag = {AKV_OK, ""};
        akv_status status = akv_llama_token_text(s->host, (int32_t)token, 0, piece, sizeof piece, &bytes, &diag);
        if (status != AKV_OK)
            return cli_fail_diag(status, &diag, NULL);
        if (!cli_buffer_add(&answer->text, piece, bytes))
            return cli_fail(CLI_NO_MEMORY, "no memory for the answer");
        int code = write_answer(piece, bytes);
        if (code != CLI_OK)
            return code;
        answer->answer_tokens++;
        if (cli_interrupted()) {
            fputc('\n', stdout);
            cli_note("interrupted");
            return CLI_SIGNAL + cli_interrupted();
        }
        if (answer->answer_tokens == o->max_tokens)
            break;
        int32_t next = (int32_t)token;
        code = decode(s, &next, 1, answer, &context_full);
        if (code != CLI_OK)
            return code;
        if (context_full) {
            cli_warn("the model's context is full; the answer stops here");
            answer->stopped = "context";
            break;
        }
    }
    return write_answer("\n", 1);
}

static int answer_one(cli_session *s, const ask_options *o, const prompt *p, cli_answer *answer)
{
    akv_diag diag = {AKV_OK, ""};
    bool unused = false;
    answer->question_tokens = p->num_tokens;
    akv_status status = akv_llama_rewind(s->host, &diag);
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, NULL);
    double start = cli_now();
    int code = decode(s, p->tokens, p->num_tokens, answer, &unused);
    if (code != CLI_OK)
        return code;
    cli_progress_end(&s->progress);
    answer->prompt_seconds = cli_now() - start;
    start = cli_now();
    code = generate(s, o, answer);
    answer->decode_seconds = cli_now() - start;
    return code;
}

/* ------------------------------------------------------------------------------------------------------------- run */

/* Tokens of all questions; *longest is the largest number. */
static int render_questions(cli_session *s, const ask_options *o, prompt *prompts, uint64_t *longest)
{
    *longest = 0;
    for (size_t i = 0; i < o->num_questions; i++) {
        akv_diag diag = {AKV_OK, ""};
        akv_status status =
            akv_llama_render_question(s->host, s->form, s->system, o->questions[i], strlen(o->questions[i]),
                                      &prompts[i].tokens, &prompts[i].num_tokens, &diag);
        cli_progress_end(&s->progress);
        if (status != AKV_OK)
            return cli_fail_diag(status, &diag, NULL);
        if (prompts[i].num_tokens > *longest)
            *longest = prompts[i].num_tokens;
    }
    return CLI_OK;
}

static int prepare(cli_session *s, const ask_options *o, prompt *prompts)
{
    uint64_t longest = 0;
    if (o->from != NULL) {
        int code = cli_session_load(s, o->from, NULL, NULL);
        return code == CLI_OK ? render_questions(s, o, prompts, &longest) : code;
    }
    int code = render_questions(s, o, prompts, &longest);
    if (code == CLI_OK)
        code = cli_session_read(s, longest + 1);
    if (code == CLI_OK) {
        uint64_t room = longest + o->max_tokens;
        uint64_t most = s->model.train_context > s->num_tokens ? s->model.train_context - s->num_tokens : room;
        code = cli_session_prefill(s, s->settings->method == CLI_METHOD_DENSE ? (room < most ? room : most) : 0);
    }
    return code;
}

static int finish(const cli_session *s, const ask_options *o, const cli_answer *answers)
{
    cli_report report;
    int code = cli_session_report(s, &report);
    if (code != CLI_OK)
        return code;
    report.command = "ask";
    report.document_path = o->from;
    report.answers = answers;
    report.num_answers = o->num_questions;
    if (!o->settings.quiet)
        cli_report_print(&report);
    if (o->settings.json != NULL)
        code = cli_report_json(&report, o->settings.json);
    free((void *)(uintptr_t)report.layers);
    return code;
}

static int run(int argc, char **argv)
{
    ask_options o;
    cli_session session;
    memset(&o, 0, sizeof o);
    memset(&session, 0, sizeof session);
    cli_settings_init(&o.settings);
    o.max_tokens = 256;
    int code = parse(argc, argv, &o);
    if (code != CLI_OK) {
        cli_settings_free(&o.settings);
        return code < 0 ? cli_help(&cli_cmd_ask) : code;
    }
    prompt *prompts = calloc(o.num_questions, sizeof *prompts);
    cli_answer *answers = calloc(o.num_questions, sizeof *answers);
    if (prompts == NULL || answers == NULL)
        code = cli_fail(CLI_NO_MEMORY, "no memory for %zu questions", o.num_questions);
    if (code == CLI_OK && o.settings.json != NULL)
        code = cli_check_writable(o.settings.json);
    if (code == CLI_OK)
        code = cli_session_open(&session, &o.settings);
    if (code == CLI_OK)
        code = prepare(&session, &o, prompts);
    for (size_t i = 0; i < o.num_questions && code == CLI_OK; i++) {
        answers[i].question = o.questions[i];
        code = answer_one(&session, &o, &prompts[i], &answers[i]);
    }
    if (code == CLI_OK)
        code = finish(&session, &o, answers);
    for (size_t i = 0; i < o.num_questions; i++) {
        if (prompts != NULL)
            akv_llama_free_tokens(prompts[i].tokens);
        if (answers != NULL)
            cli_buffer_free(&answers[i].text);
    }
    free(prompts);
    free(answers);
    cli_session_close(&session);
    cli_settings_free(&o.settings);
    return code;
}

const cli_command cli_cmd_ask = {
    "ask", "answer questions about a document", run,
    "usage: akv ask -m MODEL -f FILE [options] QUESTION...\n"
    "       akv ask -m MODEL --from DOC.akv [options] QUESTION...\n"
    "\n"
    "Reads the document once, compresses the model's key/value cache, frees the dense cache and answers each question\n"
    "from the compressed form. Every question starts right behind the document; nothing of one leaks into the next.\n"
    "Answers go to standard output; progress and the plan that was really applied go to standard error.\n"
    "\n"
    "  -m, --model FILE     GGUF model\n"
    "  -f, --file FILE      text to read, UTF-8; \"-\" is standard input; several are joined\n"
    "      --from DOC.akv   a document packed earlier: no reading, no compression\n"
    "  -n, --predict N      at most N tokens an answer (256)\n"
    "      --temp T         sampling temperature; 0 (default) takes the likeliest token\n" CLI_SETTINGS_HELP "\n"
    "examples:\n"
    "  akv ask -m model.gguf -f book.txt --ratio 10 \"Who opened the letter?\"\n"
    "  cat *.md | akv ask -m model.gguf -f - \"What is this project?\" \"How is it built?\"\n"
    "  akv ask -m model.gguf --from book.akv --json answer.json \"Who wrote it?\"\n"};
