/* SPDX-License-Identifier: Apache-2.0 */
/* settings.c - the options that `akv ask` and `akv pack` have in common. */
#include "settings.h"

#include <stdlib.h>

static bool add_file(cli_settings *s, const char *file)
{
    const char **grown = realloc(s->files, (s->num_files + 1) * sizeof *grown);
    if (grown == NULL) {
        cli_fail(CLI_NO_MEMORY, "no memory");
        return false;
    }
    s->files = grown;
    s->files[s->num_files++] = file;
    return true;
}

bool cli_settings_option(cli_settings *s, int option, const char *value)
{
    uint64_t number = 0;
    switch (option) {
    case 'm': s->model = value; return true;
    case 'f': return add_file(s, value);
    case 'k':
    case 'r':
    case 'b': return cli_size_goal_set(&s->goal, option, value);
    case 'q': s->quiet = true; return true;
    case OPT_PROFILE: return cli_parse_profile(value, &s->profile);
    case OPT_METHOD: return cli_parse_method(value, &s->method);
    case OPT_SEED: return cli_parse_u64("--seed", value, 0, UINT64_MAX, &s->seed);
    case OPT_SHARES: s->shares = value; return true;
    case 't':
        if (!cli_parse_u64("--threads", value, 1, 1024, &number))
            return false;
        s->threads = (uint32_t)number;
        return true;
    case OPT_RAW: s->raw = true; return true;
    case OPT_SYSTEM: s->system = value; return true;
    case OPT_JSON: s->json = value; return true;
    default: return false; /* getopt_long has said what it is */
    }
}

bool cli_settings_is_document(int option)
{
    switch (option) {
    case 'f':
    case 'k':
    case 'r':
    case 'b':
    case OPT_PROFILE:
    case OPT_METHOD:
    case OPT_SHARES:
    case OPT_RAW:
    case OPT_SYSTEM: return true;
    default: return false;
    }
}

void cli_settings_free(cli_settings *s)
{
    free(s->files);
    s->files = NULL;
    s->num_files = 0;
}
