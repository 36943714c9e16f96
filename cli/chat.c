/* SPDX-License-Identifier: Apache-2.0 */
/* chat.c - the conversation of `akv chat`. */
#include "chat.h"

#include "chat_line.h"
#include "shares.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool add_turn(cli_chat *c, int32_t start)
{
    int32_t *grown = realloc(c->starts, (c->num_turns + 1) * sizeof *grown);
    if (grown == NULL)
        return false;
    c->starts = grown;
    c->starts[c->num_turns++] = start;
    return true;
}

/* ------------------------------------------------------------------------------------------------------ save and load */

/* The conversation so far as a .akv file: the same as a packed document, with a "turn" for the position where each began. */
int cli_chat_save(cli_chat *c, const char *path, uint64_t *bytes)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_store *store = NULL;
    const cli_session *s = &c->session;
    akv_document_property *list = calloc(c->num_turns + 8, sizeof *list);
    char(*numbers)[16] = calloc(c->num_turns + 1, sizeof *numbers);
    uint32_t n = 0;
    if (list == NULL || numbers == NULL) {
        free(list);
        free(numbers);
        return cli_fail(CLI_NO_MEMORY, "no memory for the session's tables");
    }
    list[n++] = (akv_document_property){"form", "chat"};
    list[n++] = (akv_document_property){"chat", c->behind_document ? "document" : "plain"};
    if (s->system != NULL)
        list[n++] = (akv_document_property){"system", s->system};
    if (s->model.name[0] != '\0')
        list[n++] = (akv_document_property){"model", s->model.name};
    list[n++] = (akv_document_property){"creator", "akv"};
    list[n++] = (akv_document_property){"creator_version", akv_version()};
    for (uint32_t i = 0; i < c->num_turns; i++) {
        snprintf(numbers[i], sizeof *numbers, "%" PRId32, c->starts[i]);
        list[n++] = (akv_document_property){"turn", numbers[i]};
    }
    akv_status status = akv_llama_snapshot(s->host, &store, &diag);
    int code = status == AKV_OK ? cli_store_write(store, list, n, path, bytes) : cli_fail_diag(status, &diag, NULL);
    akv_llama_store_release(store);
    free(list);
    free(numbers);
    return code;
}

/* After every change, when there is a session file. Failing to save does not end a conversation; it is said, and in the
 * end the exit code says it too, unless a later save went well. */
void cli_chat_autosave(cli_chat *c)
{
    uint64_t bytes = 0;
    if (c->file == NULL)
        return;
    c->unsaved = cli_chat_save(c, c->file, &bytes);
    if (c->unsaved != CLI_OK)
        cli_warn("%s was not written; the conversation goes on", c->file);
    else if (!c->settings.quiet && !chat_line_is_interactive())
        cli_note("%" PRIu32 " turns saved, %" PRIu64 " bytes", c->num_turns, bytes);
}

static int set_rolling(cli_chat *c)
{
    akv_diag diag = {AKV_OK, ""};
    akv_llama_rolling rolling;
    akv_llama_rolling_init(&rolling);
    rolling.config.keep_ratio = c->settings.goal.keep_ratio;
    rolling.config.profile = c->settings.profile;
    rolling.config.seed = c->settings.seed;
    rolling.budget_bytes = c->settings.goal.budget_bytes;
    rolling.from_token = !c->behind_document ? 0 : c->num_turns > 0 ? (uint32_t)c->starts[0] : UINT32_MAX;
    akv_status status = cli_shares_apply(&c->session.shares, c->session.host, &rolling.config, &diag);
    if (status == AKV_OK)
        status = akv_llama_set_rolling(c->session.host, &rolling, &diag);
    return status == AKV_OK ? CLI_OK : cli_fail_diag(status, &diag, NULL);
}

/* Where turns begin, as the document says. */
static int read_turns(cli_chat *c)
{
    const char *path = c->session.path, *turn;
    int32_t last = 0;
    for (uint32_t i = 0; (turn = akv_document_property_value(c->session.document, "turn", i)) != NULL; i++) {
        char *end = NULL;
        errno = 0;
        const long start = strtol(turn, &end, 10);
        if (errno != 0 || end == turn || *end != '\0' || start <= last ||
            start >= akv_llama_next_position(c->session.host))
            return cli_fail(CLI_CORRUPT,
                            "%s: turn %" PRIu32 " begins at \"%s\", which is no position of the conversation", path, i,
                            cli_printable(turn));
        last = (int32_t)start;
        if (!add_turn(c, last))
            return cli_fail(CLI_NO_MEMORY, "no memory for the session's tables");
    }
    return CLI_OK;
}

/* The session has a document: is it one to converse about? */
static int accept_document(void *context)
{
    cli_chat *c = context;
    if (c->session.form != AKV_LLAMA_CHAT)
        return cli_fail(CLI_BAD_INPUT, "%s was packed with --raw; a conversation needs the chat form", c->session.path);
    const char *kind = akv_document_property_value(c->session.document, "chat", 0);
    c->behind_document = kind == NULL || strcmp(kind, "plain") != 0;
    const int code = read_turns(c);
    return code == CLI_OK ? set_rolling(c) : code;
}

int cli_chat_load(cli_chat *c, const char *path)
{
    const bool behind_document = c->behind_document;
    const akv_llama_store *store = c->session.store;
    int32_t *starts = c->starts;
    const uint32_t num_turns = c->num_turns;
    c->starts = NULL;
    c->num_turns = 0;
    const int code = cli_session_load(&c->session, path, accept_document, c);
    if (code == CLI_OK) {
        free(starts);
        return CLI_OK;
    }
    free(c->starts);
    c->starts = starts;
    c->num_turns = num_turns;
    c->behind_document = behind_document;
    /* a file that was refused before the conversation had been detached has cost it nothing, its latest queries included */
    if (store != NULL && c->session.store != NULL && c->session.store != store && set_rolling(c) != CLI_OK)
        cli_session_unload(&c->session);
    return code;
}

/* A chat without a document: what stands before the first user's text is read and kept as it is. */
static int begin_plain(cli_chat *c)
{
    cli_session *s = &c->session;
    akv_diag diag = {AKV_OK, ""};
    akv_config config;
    size_t n = 0;
    akv_config_init(&config);
    cli_progress_end(&s->progress);
    akv_status status = akv_llama_render_opening(s->host, s->system, &s->tokens, &n, &diag);
    if (status == AKV_OK)
        status = akv_llama_prefill(s->host, s->tokens, n, 0, &diag);
    if (status == AKV_OK)
        status = akv_llama_compress(s->host, AKV_LLAMA_EXACT, &config, &s->store, &diag);
    if (status == AKV_OK)
        status = akv_llama_free_dense(s->host, &diag);
    if (status == AKV_OK)
        status = akv_llama_attach(s->host, s->store, &diag);
    cli_progress_end(&s->progress);
    return status == AKV_OK ? set_rolling(c) : cli_fail_diag(status, &diag, NULL);
}

int cli_chat_begin(cli_chat *c)
{
    if (c->file != NULL && access(c->file, F_OK) == 0)
        return cli_chat_load(c, c->file);
    if (c->from != NULL)
        return cli_chat_load(c, c->from);
    return begin_plain(c);
}

/* --------------------------------------------------------------------------------------------------------------- turns */

/* Back to where the turn began: nothing half-said stays. An error here ends the program: the conversation is undefined. */
static int take_back(cli_chat *c, int32_t start)
{
    akv_diag diag = {AKV_OK, ""};
    akv_status status = akv_llama_truncate(c->session.host, start, &diag);
    return status == AKV_OK ? CLI_OK : cli_fail_diag(status, &diag, NULL);
}

/* Says the answer token by token and puts each into the conversation. Ctrl-C ends it; what was said stays. */
static int answer_tokens(cli_chat *c, bool *failed)
{
    cli_session *s = &c->session;
    const double begun = cli_now();
    for (uint64_t n = 0; n < c->max_tokens && !cli_interrupted(); n++) {
        const float *logits = akv_llama_logits(s->host, -1);
        const int64_t token = logits == NULL ? -1 : cli_sample(&c->sampler, logits, s->model.vocab_tokens);
        if (token < 0)
            return cli_fail(CLI_INTERNAL, "the model gave logits that are no numbers");
        if (akv_llama_is_end(s->host, (int32_t)token))
            break;
        char piece[512];
        size_t bytes = 0;
        akv_diag diag = {AKV_OK, ""};
        akv_status status = akv_llama_token_text(s->host, (int32_t)token, 0, piece, sizeof piece, &bytes, &diag);
        if (status != AKV_OK)
            return cli_fail_diag(status, &diag, NULL);
        if (fwrite(piece, 1, bytes, stdout) != bytes || fflush(stdout) != 0)
            return cli_fail(CLI_IO, "cannot write the answer to standard output: %s", strerror(errno));
        const int32_t before = akv_llama_next_position(s->host), next = (int32_t)token;
        status = akv_llama_decode(s->host, &next, 1, AKV_LLAMA_LOGITS_LAST, &diag);
        if (status != AKV_OK) {
            if (status != AKV_E_CANCELLED) {
                fputc('\n', stdout);
                cli_fail_diag(status, &diag, NULL);
                *failed = status != AKV_E_NO_SPACE; /* an answer cut short by the context is still one */
            }
            const int code = take_back(c, before);
            if (code != CLI_OK)
                return code;
            break;
        }
        c->answer_tokens++;
    }
    c->answer_seconds += cli_now() - begun;
    fputc('\n', stdout);
    return fflush(stdout) == 0 ? CLI_OK
                               : cli_fail(CLI_IO, "cannot write the answer to standard output: %s", strerror(errno));
}

/* Without progress: its bar would wipe the line that the answer stands in. */
static int answer(cli_chat *c, bool *failed)
{
    bool *quiet = &c->session.progress.quiet;
    const bool before = *quiet;
    *quiet = true;
    const int code = answer_tokens(c, failed);
    *quiet = before;
    return code;
}

int cli_chat_say(cli_chat *c, const char *text)
{
    cli_session *s = &c->session;
    akv_diag diag = {AKV_OK, ""};
    const int32_t start = akv_llama_next_position(s->host);
    const size_t bytes = strlen(text);
    int32_t *tokens = NULL;
    size_t n = 0;
    if (cli_utf8_prefix(text, bytes) != bytes) {
        cli_fail(CLI_BAD_INPUT, "the line is not UTF-8; nothing was said");
        return CLI_OK;
    }
    akv_status status =
        c->num_turns == 0 && c->behind_document
            ? akv_llama_render_question(s->host, AKV_LLAMA_CHAT, s->system, text, bytes, &tokens, &n, &diag)
            : akv_llama_render_turn(s->host, c->num_turns == 0 ? AKV_LLAMA_TURN_FIRST : AKV_LLAMA_TURN_LATER, s->system,
                                    text, bytes, &tokens, &n, &diag);
    if (status == AKV_OK)
        status = akv_llama_decode(s->host, tokens, n, AKV_LLAMA_LOGITS_LAST, &diag);
    akv_llama_free_tokens(tokens);
    cli_progress_end(&s->progress);
    bool failed = status != AKV_OK;
    int code = CLI_OK;
    if (failed && status != AKV_E_CANCELLED)
        cli_fail_diag(status, &diag, NULL);
    if (!failed)
        code = answer(c, &failed);
    if (code != CLI_OK)
        return code;
    if (failed) /* the conversation is as it was before this turn */
        return take_back(c, start);
    if (!add_turn(c, start))
        return cli_fail(CLI_NO_MEMORY, "no memory for the session's tables");
    if (cli_interrupted() == SIGINT)
        cli_interruption_over(); /* it has ended the answer, and must not end the writing of the file */
    cli_chat_autosave(c);
    return CLI_OK;
}

int cli_chat_undo(cli_chat *c)
{
    akv_diag diag = {AKV_OK, ""};
    if (c->num_turns == 0) {
        cli_note("there is nothing to take back");
        return CLI_OK;
    }
    akv_status status = akv_llama_truncate(c->session.host, c->starts[c->num_turns - 1], &diag);
    if (status != AKV_OK) {
        cli_fail_diag(status, &diag, NULL);
        return CLI_OK;
    }
    c->num_turns--;
    cli_note("the last turn is taken back; %" PRIu32 " are left", c->num_turns);
    cli_chat_autosave(c);
    return CLI_OK;
}
