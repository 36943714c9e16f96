/* SPDX-License-Identifier: Apache-2.0 */
/* chat.h - the conversation of `akv chat`: its turns, its file, its rolling compression.
 * Functions return an exit code (cli.h), after telling the user what went wrong. */
#ifndef AKV_CLI_CHAT_H
#define AKV_CLI_CHAT_H

#include "sample.h"
#include "session.h"

typedef struct cli_chat {
    cli_settings settings;
    const char *from, *file; /* a document; the session's file */
    uint64_t max_tokens;
    double temperature;

    cli_session session;
    cli_sampler sampler;
    int32_t *starts; /* [num_turns] position where each turn began */
    uint32_t num_turns;
    int unsaved; /* why the session's file does not hold all that was said, or CLI_OK */
    bool behind_document; /* the first turn asks about a document, else it opens the chat */
    uint64_t answer_tokens;
    double answer_seconds;
} cli_chat;

/* From the session's file if it is there, else from the document, else from an empty chat. */
int cli_chat_begin(cli_chat *c);

/* A packed document or an earlier conversation in the place of this one, which is as it was when that fails
 * (c->session.store is NULL if even going back failed). */
int cli_chat_load(cli_chat *c, const char *path);

/* The conversation so far as a .akv file, whole or not at all; *bytes written. */
int cli_chat_save(cli_chat *c, const char *path, uint64_t *bytes);

/* After every change, when there is a session file: c->unsaved says how it went. */
void cli_chat_autosave(cli_chat *c);

/* One turn: the user's text (NUL-terminated, UTF-8), then the model's answer on standard output. An error means
 * that the conversation cannot go on; what only this turn could not do is said, and the conversation is as before. */
int cli_chat_say(cli_chat *c, const char *text);

/* Takes the last turn back. */
int cli_chat_undo(cli_chat *c);

#endif
