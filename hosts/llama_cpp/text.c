/* SPDX-License-Identifier: Apache-2.0 */
/*
 * text.c - text to tokens and back, and the split of one chat prompt into the document's half and the question's half.
 */
#include "host.h"

#include <string.h>

/* The template is rendered around this user text; no template trims, escapes or repeats it. */
static const char MARK[] = "@akv-document@@akv-question@";
/* Between the document and the question, inside the user's turn. */
static const char SEPARATOR[] = "\n\n";

void akv_llama_free_tokens(int32_t *tokens)
{
    free(tokens);
}

typedef struct token_list {
    int32_t *data;
    size_t count;
} token_list;

/* Append; on failure the list is as before. */
static akv_status append(const akv_llama *host, token_list *list, const char *text, size_t bytes, bool add_special,
                         bool parse_special, akv_diag *diag)
{
    if (llama_vocab_type(host->vocab) == LLAMA_VOCAB_TYPE_NONE)
        return akvl_fail(diag, AKV_E_UNSUPPORTED,
                         "this model file brings no tokenizer; only token ids can be used with it");
    if (bytes > INT32_MAX)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT,
                         "the text has %zu bytes; libllama's tokenizer takes at most 2147483647", bytes);
    int32_t room = llama_tokenize(host->vocab, text, (int32_t)bytes, NULL, 0, add_special, parse_special);
    if (room == INT32_MIN)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "the text has more tokens than libllama's tokenizer can count");
    room = room < 0 ? -room : room;
    int32_t *grown = realloc(list->data, (list->count + (size_t)room + 1) * sizeof *grown);
    if (!grown)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for %d tokens", room);
    list->data = grown;
    const int32_t got =
        llama_tokenize(host->vocab, text, (int32_t)bytes, grown + list->count, room, add_special, parse_special);
    if (got < 0)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "libllama's tokenizer failed on a text of %zu bytes", bytes);
    list->count += (size_t)got;
    return AKV_OK;
}

static akv_status give(akv_status status, token_list *list, int32_t **tokens, size_t *num_tokens)
{
    if (status == AKV_OK) {
        *tokens = list->data;
        *num_tokens = list->count;
    } else {
        free(list->data);
    }
    return status;
}

akv_status akv_llama_tokenize(const akv_llama *host, const char *text, size_t text_bytes, int add_special,
                              int parse_special, int32_t **tokens, size_t *num_tokens, akv_diag *diag)
{
    if (!host || (!text && text_bytes) || !tokens || !num_tokens)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host, text and the outputs must not be NULL");
    token_list list = {0};
    return give(append(host, &list, text ? text : "", text_bytes, add_special != 0, parse_special != 0, diag), &list,
                tokens, num_tokens);
}

akv_status akv_llama_token_text(const akv_llama *host, int32_t token, int special, char *text, size_t capacity,
                                size_t *bytes, akv_diag *diag)
{
    if (!host || !bytes || (!text && capacity))
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host, text and bytes must not be NULL");
    if (token < 0 || (uint32_t)token >= host->info.vocab_tokens)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "token %d does not exist; this model has %u", token,
                         host->info.vocab_tokens);
    if (llama_vocab_type(host->vocab) == LLAMA_VOCAB_TYPE_NONE)
        return akvl_fail(diag, AKV_E_UNSUPPORTED, "this model file brings no tokenizer; its tokens have no text");
    const int32_t room = capacity > INT32_MAX ? INT32_MAX : (int32_t)capacity;
    const int32_t got = llama_token_to_piece(host->vocab, token, text, room, 0, special != 0);
    if (got < 0)
        return akvl_fail(diag, AKV_E_NO_SPACE, "token %d has %d bytes of text; the buffer has %zu", token, -got,
                         capacity);
    *bytes = (size_t)got;
    return AKV_OK;
}

int akv_llama_is_end(const akv_llama *host, int32_t token)
{
    return host && token >= 0 && (uint32_t)token < host->info.vocab_tokens && llama_vocab_is_eog(host->vocab, token);
}

/* The rendered template, zero-terminated, from malloc. The document belongs at *cut, the rest of the turn follows at
 * *rest. */
static akv_status render(const akv_llama *host, const char *system, char **out, size_t *cut, const char **rest,
                         akv_diag *diag)
{
    const char *template = llama_model_chat_template(host->model, NULL);
    if (!template)
        return akvl_fail(diag, AKV_E_UNSUPPORTED, "this model brings no chat template; use raw mode (--raw)");
    struct llama_chat_message messages[2];
    size_t count = 0;
    if (system && *system)
        messages[count++] = (struct llama_chat_message){"system", system};
    messages[count++] = (struct llama_chat_message){"user", MARK};
    const int32_t length = llama_chat_apply_template(template, messages, count, true, NULL, 0);
    char *text = length > 0 ? akvl_new((size_t)length + 1, 1) : NULL;
    if (length > 0 && !text)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the chat template");
    if (length <= 0 || llama_chat_apply_template(template, messages, count, true, text, length) != length ||
        !strstr(text, MARK)) {
        free(text);
        return akvl_fail(diag, AKV_E_UNSUPPORTED,
                         "the chat template of this model is not one that libllama can render; use raw mode"
                         " (--raw)");
    }
    *out = text;
    *cut = (size_t)(strstr(text, MARK) - text);
    *rest = text + *cut + sizeof MARK - 1;
    return AKV_OK;
}

/* Templates may write the BOS that the tokenizer adds as well; tokenizers may add an EOS that does not belong here. */
static void tidy_specials(const akv_llama *host, token_list *list)
{
    const int32_t bos = llama_vocab_bos(host->vocab), eos = llama_vocab_eos(host->vocab);
    if (list->count >= 2 && bos >= 0 && list->data[0] == bos && list->data[1] == bos)
        memmove(list->data, list->data + 1, --list->count * sizeof *list->data);
    if (llama_vocab_get_add_eos(host->vocab) && list->count && eos >= 0 && list->data[list->count - 1] == eos)
        list->count--;
}

akv_status akv_llama_render_document(const akv_llama *host, akv_llama_prompt form, const char *system,
                                     const char *document, size_t document_bytes, int32_t **tokens, size_t *num_tokens,
                                     akv_diag *diag)
{
    if (!host || !tokens || !num_tokens)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host and the outputs must not be NULL");
    if (!document || document_bytes == 0)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "the document is empty; there is nothing to read");
    token_list list = {0};
    akv_status status;
    if (form == AKV_LLAMA_RAW) {
        status = append(host, &list, document, document_bytes, true, false, diag);
        if (status == AKV_OK)
            tidy_specials(host, &list);
    } else {
        char *text;
        size_t cut;
        const char *rest;
        status = render(host, system, &text, &cut, &rest, diag);
        if (status != AKV_OK)
            return status;
        status = append(host, &list, text, cut, true, true, diag);
        free(text);
        if (status == AKV_OK) {
            tidy_specials(host, &list);
            status = append(host, &list, document, document_bytes, false, false, diag);
        }
    }
    return give(status, &list, tokens, num_tokens);
}

akv_status akv_llama_render_question(const akv_llama *host, akv_llama_prompt form, const char *system,
                                     const char *question, size_t question_bytes, int32_t **tokens, size_t *num_tokens,
                                     akv_diag *diag)
{
    if (!host || !tokens || !num_tokens)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host and the outputs must not be NULL");
    if (!question || question_bytes == 0)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "the question is empty");
    token_list list = {0};
    if (form == AKV_LLAMA_RAW)
        return give(append(host, &list, question, question_bytes, false, false, diag), &list, tokens, num_tokens);
    char *text;
    size_t cut;
    const char *rest;
    akv_status status = render(host, system, &text, &cut, &rest, diag);
    if (status != AKV_OK)
        return status;
    /* separator and question in one piece, so that tokens may span them as they would in the whole prompt */
    char *piece = question_bytes < SIZE_MAX - sizeof SEPARATOR ? akvl_new(sizeof SEPARATOR + question_bytes, 1) : NULL;
    if (!piece) {
        free(text);
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for a question of %zu bytes", question_bytes);
    }
    memcpy(piece, SEPARATOR, sizeof SEPARATOR - 1);
    memcpy(piece + sizeof SEPARATOR - 1, question, question_bytes);
    status = append(host, &list, piece, sizeof SEPARATOR - 1 + question_bytes, false, false, diag);
    if (status == AKV_OK)
        status = append(host, &list, rest, strlen(rest), false, true, diag);
    free(piece);
    free(text);
    return give(status, &list, tokens, num_tokens);
}

/* The template around one turn: `opening` before the first user text, `between` an unclosed answer and the next user text,
 * `rest` behind a user text. All point into *text, which is from malloc. */
static akv_status render_turns(const akv_llama *host, const char *system, char **text, size_t *opening, const char **between,
                               size_t *between_bytes, const char **rest, akv_diag *diag)
{
    static const char ANSWER[] = "@akv-answer@@akv-end@";
    static const char SECOND[] = "@akv-second@@akv-question@";
    const char *template = llama_model_chat_template(host->model, NULL);
    if (!template)
        return akvl_fail(diag, AKV_E_UNSUPPORTED, "this model brings no chat template; a conversation needs one");
    struct llama_chat_message messages[4];
    size_t count = 0;
    if (system && *system)
        messages[count++] = (struct llama_chat_message){"system", system};
    messages[count++] = (struct llama_chat_message){"user", MARK};
    messages[count++] = (struct llama_chat_message){"assistant", ANSWER};
    messages[count++] = (struct llama_chat_message){"user", SECOND};
    const int32_t length = llama_chat_apply_template(template, messages, count, true, NULL, 0);
    char *out = length > 0 ? akvl_new((size_t)length + 1, 1) : NULL;
    if (length > 0 && !out)
        return akvl_fail(diag, AKV_E_NO_MEMORY, "no memory for the chat template");
    const bool rendered = length > 0 && llama_chat_apply_template(template, messages, count, true, out, length) == length;
    const char *first = rendered ? strstr(out, MARK) : NULL, *answer = first ? strstr(first, ANSWER) : NULL;
    const char *second = answer ? strstr(answer, SECOND) : NULL;
    if (!second) {
        free(out);
        return akvl_fail(diag, AKV_E_UNSUPPORTED, "the chat template of this model is not one that libllama can render turn by turn");
    }
    *text = out;
    *opening = (size_t)(first - out);
    *between = answer + sizeof ANSWER - 1;
    *between_bytes = (size_t)(second - *between);
    *rest = second + sizeof SECOND - 1;
    return AKV_OK;
}

akv_status akv_llama_render_opening(const akv_llama *host, const char *system, int32_t **tokens, size_t *num_tokens,
                                    akv_diag *diag)
{
    if (!host || !tokens || !num_tokens)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host and the outputs must not be NULL");
    token_list list = {0};
    char *text;
    const char *between, *rest;
    size_t opening, between_bytes;
    akv_status status = render_turns(host, system, &text, &opening, &between, &between_bytes, &rest, diag);
    if (status != AKV_OK)
        return status;
    status = append(host, &list, text, opening, true, true, diag);
    free(text);
    if (status == AKV_OK)
        tidy_specials(host, &list);
    if (status == AKV_OK && list.count == 0)
        status = akvl_fail(diag, AKV_E_UNSUPPORTED, "this model's chat begins with the user's text; give a system message");
    return give(status, &list, tokens, num_tokens);
}

akv_status akv_llama_render_turn(const akv_llama *host, akv_llama_turn turn, const char *system, const char *text,
                                 size_t text_bytes, int32_t **tokens, size_t *num_tokens, akv_diag *diag)
{
    if (!host || !tokens || !num_tokens)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "host and the outputs must not be NULL");
    if (!text || text_bytes == 0)
        return akvl_fail(diag, AKV_E_INVALID_ARGUMENT, "the text is empty");
    token_list list = {0};
    char *rendered;
    const char *between, *rest;
    size_t opening, between_bytes;
    akv_status status = render_turns(host, system, &rendered, &opening, &between, &between_bytes, &rest, diag);
    if (status != AKV_OK)
        return status;
    if (turn == AKV_LLAMA_TURN_LATER)
        status = append(host, &list, between, between_bytes, false, true, diag);
    if (status == AKV_OK)
        status = append(host, &list, text, text_bytes, false, false, diag);
    if (status == AKV_OK)
        status = append(host, &list, rest, strlen(rest), false, true, diag);
    free(rendered);
    return give(status, &list, tokens, num_tokens);
}
