/* SPDX-License-Identifier: Apache-2.0 */
/* needles.c - see needles.h. */
#include "needles.h"
#include "random.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const needle_task_names[NEEDLE_TASKS] = {"word",      "number",      "uuid",
                                                     "multi_key", "multi_value", "multi_query"};

static const char *const adjectives[] = {
    "able",   "bold",  "brief",  "bright", "broad", "calm",  "cheap",   "clean",  "clear",  "crisp", "deep",   "dense",
    "double", "dry",   "empty",  "equal",  "exact", "fair",  "fine",    "firm",   "flat",   "fluid", "formal", "fresh",
    "full",   "glad",  "global", "green",  "heavy", "high",  "hollow",  "ideal",  "large",  "late",  "lean",   "level",
    "light",  "local", "long",   "lucid",  "major", "mild",  "minor",   "mobile", "modest", "moist", "mute",   "native",
    "neat",   "new",   "novel",  "open",   "oval",  "pale",  "patient", "plump",  "polite", "prime", "quick",  "quiet",
    "rare",   "ready", "rigid",  "rural",  "sober", "solar", "steep",   "sweet",  "tidy",   "vague"};
static const char *const nouns[] = {
    "acorn",  "album",   "anchor",  "apron",  "arrow",  "atlas",  "badge",  "bakery", "barrel", "beacon",
    "bench",  "blanket", "bottle",  "branch", "brick",  "bridge", "bucket", "button", "cabin",  "candle",
    "canyon", "carpet",  "castle",  "cherry", "clock",  "cloud",  "copper", "cradle", "desk",   "drum",
    "eagle",  "engine",  "falcon",  "fence",  "ferry",  "flute",  "forest", "garden", "guitar", "hammer",
    "harbor", "helmet",  "island",  "jacket", "kettle", "ladder", "lemon",  "magnet", "maple",  "meadow",
    "mirror", "needle",  "orchard", "paddle", "pepper", "piano",  "pillow", "quarry", "raven",  "ribbon",
    "saddle", "spoon",   "tablet",  "temple", "tunnel", "turnip", "valley", "walnut", "window", "zipper"};
enum { NUM_ADJECTIVES = sizeof adjectives / sizeof adjectives[0], NUM_NOUNS = sizeof nouns / sizeof nouns[0] };

static const char preface[] =
    "Notes from a working day follow. Some sentences state facts; questions about them come later.\n\n";

typedef struct fact {
    char sentence[160];
    unsigned question; /* of the context, whose value it states; -1u for a fact nobody asks about */
    unsigned value;
    double wanted; /* depth */
    size_t before; /* sentence of the prose that it precedes */
} fact;

typedef struct builder {
    const needle_request *request;
    needle_context *out;
    uint64_t random;
    fact facts[NEEDLE_FACTS];
    unsigned num_facts;
    char used[NEEDLE_FACTS + 1][32]; /* names given away */
    unsigned num_used;
} builder;

/* ---------------------------------------------------------------------------------------------------------- facts */

static const char *new_name(builder *b)
{
    char *name = b->used[b->num_used];
    bool taken;
    do {
        snprintf(name, sizeof b->used[0], "%s-%s", adjectives[cli_random_below(&b->random, NUM_ADJECTIVES)],
                 nouns[cli_random_below(&b->random, NUM_NOUNS)]);
        taken = false;
        for (unsigned i = 0; i < b->num_used; i++)
            taken = taken || strcmp(b->used[i], name) == 0;
    } while (taken);
    b->num_used++;
    return name;
}

static void new_number(builder *b, char *out, size_t bytes)
{
    snprintf(out, bytes, "%llu", 1000000ull + (unsigned long long)cli_random_below(&b->random, 9000000));
}

static void new_uuid(builder *b, char *out, size_t bytes)
{
    const uint64_t high = cli_random(&b->random), low = cli_random(&b->random);
    snprintf(out, bytes, "%08llx-%04llx-4%03llx-%04llx-%012llx", (unsigned long long)(high >> 32),
             (unsigned long long)(high >> 16 & 0xffff), (unsigned long long)(high & 0xfff),
             (unsigned long long)((low >> 48 & 0x3fff) | 0x8000), (unsigned long long)(low & 0xffffffffffffull));
}

static fact *new_fact(builder *b, unsigned question, unsigned value)
{
    fact *f = &b->facts[b->num_facts++];
    f->question = question;
    f->value = value;
    return f;
}

static void one_value(builder *b, unsigned index, const char *thing)
{
    needle_question *q = &b->out->questions[index];
    const char *key = new_name(b);
    q->num_values = 1;
    if (q->task == 0)
        snprintf(q->values[0], sizeof q->values[0], "%s", new_name(b));
    else if (q->task == 1)
        new_number(b, q->values[0], sizeof q->values[0]);
    else
        new_uuid(b, q->values[0], sizeof q->values[0]);
    fact *f = new_fact(b, index, 0);
    snprintf(f->sentence, sizeof f->sentence, "The %s of the %s is %s.", thing, key, q->values[0]);
    snprintf(q->ask, sizeof q->ask, "What is the %s of the %s?", thing, key);
    snprintf(q->opening, sizeof q->opening, "The %s of the %s is", thing, key);
}

/* Four numbers of four keys, one of them asked for. */
static void multi_key(builder *b, unsigned index)
{
    needle_question *q = &b->out->questions[index];
    const unsigned asked = (unsigned)cli_random_below(&b->random, 4);
    q->num_values = 1;
    for (unsigned i = 0; i < 4; i++) {
        char value[16];
        const char *key = new_name(b);
        new_number(b, value, sizeof value);
        fact *f = new_fact(b, i == asked ? index : -1u, 0);
        snprintf(f->sentence, sizeof f->sentence, "The room code of the %s is %s.", key, value);
        if (i != asked)
            continue;
        snprintf(q->values[0], sizeof q->values[0], "%s", value);
        snprintf(q->ask, sizeof q->ask, "What is the room code of the %s?", key);
        snprintf(q->opening, sizeof q->opening, "The room code of the %s is", key);
    }
}

/* Four numbers of one key. */
static void multi_value(builder *b, unsigned index)
{
    needle_question *q = &b->out->questions[index];
    const char *key = new_name(b);
    q->num_values = 4;
    for (unsigned i = 0; i < 4; i++) {
        new_number(b, q->values[i], sizeof q->values[i]);
        fact *f = new_fact(b, index, i);
        snprintf(f->sentence, sizeof f->sentence, "One of the part numbers of the %s is %s.", key, q->values[i]);
    }
    snprintf(q->ask, sizeof q->ask, "What are all four part numbers of the %s?", key);
    snprintf(q->opening, sizeof q->opening, "The four part numbers of the %s are", key);
}

/* The numbers of four keys in one question. */
static void multi_query(builder *b, unsigned index)
{
    needle_question *q = &b->out->questions[index];
    const char *keys[4];
    q->num_values = 4;
    for (unsigned i = 0; i < 4; i++) {
        keys[i] = new_name(b);
        new_number(b, q->values[i], sizeof q->values[i]);
        fact *f = new_fact(b, index, i);
        snprintf(f->sentence, sizeof f->sentence, "The meter reading of the %s is %s.", keys[i], q->values[i]);
    }
    snprintf(q->ask, sizeof q->ask, "What are the meter readings of the %s, the %s, the %s and the %s?", keys[0],
             keys[1], keys[2], keys[3]);
    snprintf(q->opening, sizeof q->opening,
             "The meter readings of the %s, the %s, the %s and the %s, in this order, are", keys[0], keys[1], keys[2],
             keys[3]);
}

static void make_facts(builder *b)
{
    static const char *const things[] = {"password", "access number", "ticket identifier"};
    for (unsigned task = 0; task < NEEDLE_TASKS; task++) {
        if ((b->request->tasks >> task & 1u) == 0)
            continue;
        const unsigned index = b->out->num_questions++;
        b->out->questions[index].task = task;
        if (task < 3)
            one_value(b, index, things[task]);
        else if (task == 3)
            multi_key(b, index);
        else if (task == 4)
            multi_value(b, index);
        else
            multi_query(b, index);
    }
    /* one stretch of the depth each, in random order; a random place inside the stretch */
    for (unsigned i = 0; i < b->num_facts; i++)
        b->facts[i].wanted = i;
    for (unsigned i = b->num_facts; i > 1; i--) {
        const unsigned other = (unsigned)cli_random_below(&b->random, i);
        const double swap = b->facts[i - 1].wanted;
        b->facts[i - 1].wanted = b->facts[other].wanted;
        b->facts[other].wanted = swap;
    }
    for (unsigned i = 0; i < b->num_facts; i++)
        b->facts[i].wanted = (b->facts[i].wanted + cli_random_unit(&b->random)) / b->num_facts;
}

/* ---------------------------------------------------------------------------------------------------------- prose */

enum { LONGEST_SENTENCE = 600 }; /* bytes; texts without full stops are cut at a space */

size_t needle_sentence(const char *text, size_t bytes, size_t *at)
{
    while (*at < bytes && isspace((unsigned char)text[*at]))
        ++*at;
    const size_t left = bytes - *at;
    const char *s = text + *at;
    size_t space = 0;
    for (size_t i = 0; i < left; i++) {
        if (s[i] == '\n')
            return i;
        if (isspace((unsigned char)s[i])) {
            if (i > 0 && strchr(".!?", s[i - 1]) != NULL)
                return i;
            space = i;
        }
        if (i >= LONGEST_SENTENCE)
            return space != 0 ? space : cli_utf8_prefix(s, i);
    }
    return left;
}

typedef struct piece {
    const char *text;
    size_t bytes;
    uint64_t tokens;
} piece;

/* Sentences from a place of the prose on, round its end, until `room` tokens are used up. */
static int take_prose(builder *b, size_t start, uint64_t room, piece **out, size_t *count, uint64_t *total)
{
    const needle_request *r = b->request;
    size_t at = start, capacity = 0, n = 0;
    piece *list = NULL;
    uint64_t used = 0;
    for (;;) {
        size_t length = needle_sentence(r->prose, r->prose_bytes, &at);
        if (length == 0) {
            at = 0; /* the text is longer than the context, so this comes once */
            continue;
        }
        if (n == capacity) {
            capacity = capacity * 2 + 256;
            piece *grown = realloc(list, capacity * sizeof *grown);
            if (grown == NULL) {
                free(list);
                return cli_fail(CLI_NO_MEMORY, "no memory for %zu sentences", capacity);
            }
            list = grown;
        }
        list[n] = (piece){r->prose + at, length, 0};
        if (!r->part(r->opaque, list[n].text, length, &list[n].tokens)) {
            free(list);
            return CLI_INTERNAL;
        }
        if (used + list[n].tokens > room)
            break;
        used += list[n].tokens;
        at += length;
        n++;
    }
    *out = list;
    *count = n;
    *total = used;
    return CLI_OK;
}

/* Each fact before the first sentence that begins at its depth or later. */
static void place(builder *b, const piece *list, size_t n, uint64_t total)
{
    for (unsigned f = 0; f < b->num_facts; f++) {
        uint64_t before = 0;
        size_t i = 0;
        while (i < n && (double)before < b->facts[f].wanted * (double)total)
            before += list[i++].tokens;
        b->facts[f].before = i;
        if (b->facts[f].question != -1u)
            b->out->questions[b->facts[f].question].depth[b->facts[f].value] =
                total != 0 ? (double)before / (double)total : 0.0;
    }
}

static bool write_text(builder *b, const piece *list, size_t n)
{
    cli_buffer *text = &b->out->text;
    text->bytes = 0;
    bool ok = cli_buffer_add(text, preface, sizeof preface - 1);
    for (size_t i = 0; ok && i <= n; i++) {
        for (unsigned f = 0; ok && f < b->num_facts; f++)
            if (b->facts[f].before == i)
                ok = cli_buffer_add(text, b->facts[f].sentence, strlen(b->facts[f].sentence)) &&
                     cli_buffer_add(text, " ", 1);
        if (ok && i < n)
            ok = cli_buffer_add(text, list[i].text, list[i].bytes) && cli_buffer_add(text, " ", 1);
    }
    if (ok)
        text->data[--text->bytes] = '\0'; /* the last space */
    return ok;
}

int needle_build(const needle_request *r, needle_context *out)
{
    builder b = {.request = r, .out = out, .random = r->seed * 0x9e3779b97f4a7c15u + r->sample + 1};
    memset(out, 0, sizeof *out);
    make_facts(&b);
    const size_t stretch = r->prose_bytes / (r->num_samples != 0 ? r->num_samples : 1);
    size_t start = (size_t)r->sample * stretch + (size_t)cli_random_below(&b.random, stretch + 1);
    const size_t cut = needle_sentence(r->prose, r->prose_bytes, &start); /* begins anywhere in a sentence */
    start += cut;
    uint64_t cost = 0, tokens = 0;
    if (!r->whole(r->opaque, preface, sizeof preface - 1, &cost))
        return CLI_INTERNAL;
    for (unsigned f = 0; f < b.num_facts; f++) {
        if (!r->part(r->opaque, b.facts[f].sentence, strlen(b.facts[f].sentence), &tokens))
            return CLI_INTERNAL;
        cost += tokens;
    }
    enum { LEAST_PROSE = 32 };
    for (uint64_t room = r->room > cost ? r->room - cost : 0; room >= LEAST_PROSE;) {
        piece *list = NULL;
        size_t n = 0;
        uint64_t total = 0;
        int code = take_prose(&b, start, room, &list, &n, &total);
        if (code != CLI_OK)
            return code;
        place(&b, list, n, total);
        const bool written = write_text(&b, list, n);
        free(list);
        if (!written)
            return cli_fail(CLI_NO_MEMORY, "no memory for a context");
        if (!r->whole(r->opaque, out->text.data, out->text.bytes, &tokens))
            return CLI_INTERNAL;
        if (tokens <= r->room)
            return CLI_OK;
        room -= room < tokens - r->room + 8 ? room : tokens - r->room + 8;
    }
    return cli_fail(CLI_BAD_INPUT,
                    "%llu tokens cannot hold the %llu tokens of the needles and some prose; give a larger "
                    "--ctx, or fewer --needles",
                    (unsigned long long)r->room, (unsigned long long)cost);
}

/* ---------------------------------------------------------------------------------------------------------- score */

static bool occurs(const char *text, const char *part)
{
    for (; *text != '\0'; text++) {
        size_t i = 0;
        while (part[i] != '\0' && tolower((unsigned char)text[i]) == tolower((unsigned char)part[i]))
            i++;
        if (part[i] == '\0')
            return true;
    }
    return false;
}

double needle_found(const needle_question *q, const char *answer, bool hit[NEEDLE_VALUES])
{
    unsigned found = 0;
    for (unsigned i = 0; i < q->num_values; i++)
        found += hit[i] = occurs(answer, q->values[i]);
    return (double)found / q->num_values;
}
