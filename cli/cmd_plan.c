/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_plan.c - `akv plan`: exact bytes for a document of N tokens, before anything is read. */
#include "cli.h"
#include "model_shape.h"
#include "plan_speed.h"

#include <cjson/cJSON.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUESTION = 128 }; /* tokens that are attended from at once, where speed is foretold */

enum { OPT_GAPS = 255, OPT_LAYERS = 256, OPT_KV_HEADS, OPT_HEAD_DIM, OPT_HEAD_DIM_V, OPT_GQA_GROUP, OPT_ROTARY, OPT_PROFILE, OPT_JSON };

typedef struct plan_options {
    const char *model;
    const char *json;
    uint64_t tokens;
    uint64_t layers, kv_heads, head_dim, head_dim_v, gqa_group, rotary_dim;
    bool rotary_given, gaps;
    akv_profile profile;
    cli_size_goal goal;
} plan_options;

static int parse(int argc, char **argv, plan_options *o)
{
    static const struct option options[] = {{"model", required_argument, NULL, 'm'},
                                            {"tokens", required_argument, NULL, 't'},
                                            {"keep", required_argument, NULL, 'k'},
                                            {"ratio", required_argument, NULL, 'r'},
                                            {"budget", required_argument, NULL, 'b'},
                                            {"profile", required_argument, NULL, OPT_PROFILE},
                                            {"layers", required_argument, NULL, OPT_LAYERS},
                                            {"kv-heads", required_argument, NULL, OPT_KV_HEADS},
                                            {"head-dim", required_argument, NULL, OPT_HEAD_DIM},
                                            {"head-dim-v", required_argument, NULL, OPT_HEAD_DIM_V},
                                            {"gqa-group", required_argument, NULL, OPT_GQA_GROUP},
                                            {"rotary-dim", required_argument, NULL, OPT_ROTARY},
                                            {"gaps", no_argument, NULL, OPT_GAPS},
                                            {"json", required_argument, NULL, OPT_JSON},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    int option;
    while ((option = getopt_long(argc, argv, "m:h", options, NULL)) != -1) {
        bool ok = true;
        switch (option) {
        case 'h': return -1;
        case 'm': o->model = optarg; break;
        case 't': ok = cli_parse_u64("--tokens", optarg, 1, UINT64_C(1) << 40, &o->tokens); break;
        case 'k':
        case 'r':
        case 'b': ok = cli_size_goal_set(&o->goal, option, optarg); break;
        case OPT_PROFILE: ok = cli_parse_profile(optarg, &o->profile); break;
        case OPT_LAYERS: ok = cli_parse_u64("--layers", optarg, 1, 65536, &o->layers); break;
        case OPT_KV_HEADS: ok = cli_parse_u64("--kv-heads", optarg, 1, 65536, &o->kv_heads); break;
        case OPT_HEAD_DIM: ok = cli_parse_u64("--head-dim", optarg, 2, 1024, &o->head_dim); break;
        case OPT_HEAD_DIM_V: ok = cli_parse_u64("--head-dim-v", optarg, 2, 1024, &o->head_dim_v); break;
        case OPT_GQA_GROUP: ok = cli_parse_u64("--gqa-group", optarg, 1, 4096, &o->gqa_group); break;
        case OPT_ROTARY:
            ok = cli_parse_u64("--rotary-dim", optarg, 0, 1024, &o->rotary_dim);
            o->rotary_given = true;
            break;
        case OPT_GAPS: o->gaps = true; break;
        case OPT_JSON: o->json = optarg; break;
        default: return cli_usage(&cli_cmd_plan);
        }
        if (!ok)
            return cli_usage(&cli_cmd_plan);
    }
    if (optind != argc)
        cli_fail(CLI_USAGE, "\"%s\" is one argument too many", argv[optind]);
    else if (o->tokens == 0)
        cli_fail(CLI_USAGE, "how long is the document? give --tokens N");
    else if (o->model != NULL && (o->layers != 0 || o->kv_heads != 0 || o->head_dim != 0))
        cli_fail(CLI_USAGE, "give a model with -m or its shape with --layers, --kv-heads and --head-dim, not both");
    else if (o->model == NULL && (o->layers == 0 || o->kv_heads == 0 || o->head_dim == 0))
        cli_fail(CLI_USAGE, "give a model with -m, or its shape with --layers, --kv-heads and --head-dim");
    else
        return CLI_OK;
    return cli_usage(&cli_cmd_plan);
}

static const char *reason_text(const akv_plan_info *info)
{
    if (info->kind == AKV_SEGMENT_COMPRESSED)
        return "compressed";
    switch (info->dense_reason) {
    case AKV_DENSE_FITS: return "kept dense: the dense cache is within the budget";
    case AKV_DENSE_WITHIN_WINDOW: return "kept dense: no longer than the window, which is always exact";
    default: return "kept dense";
    }
}

static void print_speed(const char *label, const char *what, const plan_speed *s, const akv_plan_info *info)
{
    const char *verdict = plan_speed_verdict(s, info), *comma = s->why != NULL ? ", " : "", *why = s->why != NULL ? s->why : "";
    printf("%-12s %s: ", label, what);
    if (s->times_dense == 0)
        printf("%s%s%s\n", strcmp(verdict, "dense") == 0 ? "that of dense attention" : "not measured", comma, why);
    else
        printf("%s than dense f16: %.2fx of our own, %.2fx of ggml's (%s kernels%s%s; 10x, one thread, nearest shape measured)\n",
               strcmp(verdict, "even") == 0 ? "no faster" : verdict, s->times_dense, s->times_ggml, s->kernels, comma, why);
}

static int print_plan(const plan_options *o, const akv_shape *shape, uint32_t layers, const akv_plan_info *info)
{
    double ratio = (double)info->dense_bytes / (double)info->bytes.total;
    printf("shape        %u layers, %u KV heads x %u query heads each, head_dim %u/%u, %llu tokens\n", layers,
           shape->num_kv_heads, shape->gqa_group, shape->head_dim_k, shape->head_dim_v,
           (unsigned long long)shape->num_tokens);
    printf("profile      %s, %s\n", cli_profile_name(o->profile), reason_text(info));
    printf("dense cache  %s (%llu bytes)\n", cli_bytes(info->dense_bytes * layers),
           (unsigned long long)(info->dense_bytes * layers));
    printf("compressed   %s (%llu bytes) of a budget of %s: %.2fx smaller\n", cli_bytes(info->bytes.total * layers),
           (unsigned long long)(info->bytes.total * layers), cli_bytes(info->budget_bytes * layers), ratio);
    if (info->kind == AKV_SEGMENT_COMPRESSED && o->profile == AKV_PROFILE_DEFAULT)
        printf("per layer    %u anchors a head; which token gets how many bits depends on the data\n",
               info->num_anchors);
    else if (info->kind == AKV_SEGMENT_COMPRESSED)
        printf("per layer    %u anchors a head, %llu key and %llu value residuals for %llu tokens x heads\n",
               info->num_anchors, (unsigned long long)info->residuals_k, (unsigned long long)info->residuals_v,
               (unsigned long long)(shape->num_tokens * shape->num_kv_heads));
    printf("one layer    %s\n", cli_bytes(info->bytes.total));
    cli_print_bytes_by_kind(stdout, &info->bytes);
    const plan_speed one = plan_speed_of(shape, info, o->profile, 1, o->gaps);
    const plan_speed many = plan_speed_of(shape, info, o->profile, QUESTION, o->gaps);
    print_speed("speed", "one token at a time", &one, info);
    print_speed("", "128 tokens at once", &many, info);
    if (info->min_keep_ratio > 0.0)
        printf("smallest     keep ratio %.5f (%.1fx), %s\n", info->min_keep_ratio, 1.0 / info->min_keep_ratio,
               cli_bytes(info->min_bytes * layers));
    return fflush(stdout) == 0 ? CLI_OK : cli_fail(CLI_IO, "cannot write to standard output");
}

static cJSON *speed_json(const plan_options *o, const akv_shape *shape, const akv_plan_info *info, uint64_t queries)
{
    const plan_speed s = plan_speed_of(shape, info, o->profile, queries, o->gaps);
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "verdict", plan_speed_verdict(&s, info));
    cJSON_AddStringToObject(object, "kernels", s.kernels);
    if (s.times_dense != 0) {
        cJSON_AddNumberToObject(object, "times_dense", s.times_dense);
        cJSON_AddNumberToObject(object, "times_ggml_f16", s.times_ggml);
    }
    if (s.why != NULL)
        cJSON_AddStringToObject(object, "why", s.why);
    return object;
}

static int write_json(const plan_options *o, const akv_shape *shape, uint32_t layers, const akv_plan_info *info)
{
    const char *path = o->json;
    const akv_profile profile = o->profile;
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "version", akv_version());
    cJSON_AddStringToObject(root, "command", "plan");
    cJSON_AddStringToObject(root, "profile", cli_profile_name(profile));
    cJSON_AddNumberToObject(root, "tokens", (double)shape->num_tokens);
    cJSON_AddNumberToObject(root, "num_layers", layers);
    cJSON_AddStringToObject(root, "kind", info->kind == AKV_SEGMENT_COMPRESSED ? "compressed" : "dense");
    cJSON_AddNumberToObject(root, "dense_bytes", (double)(info->dense_bytes * layers));
    cJSON_AddNumberToObject(root, "compressed_bytes", (double)(info->bytes.total * layers));
    cJSON_AddNumberToObject(root, "budget_bytes", (double)(info->budget_bytes * layers));
    cJSON_AddNumberToObject(root, "ratio", (double)info->dense_bytes / (double)info->bytes.total);
    cJSON_AddNumberToObject(root, "num_anchors", info->num_anchors);
    if (profile == AKV_PROFILE_PAPER) { /* otherwise their number depends on the data */
        cJSON_AddNumberToObject(root, "residuals_k", (double)info->residuals_k);
        cJSON_AddNumberToObject(root, "residuals_v", (double)info->residuals_v);
    }
    cJSON_AddItemToObject(root, "bytes_per_layer", cli_bytes_json(&info->bytes));
    cJSON_AddItemToObject(root, "speed_decode", speed_json(o, shape, info, 1));
    cJSON_AddItemToObject(root, "speed_question", speed_json(o, shape, info, QUESTION));
    cJSON_AddNumberToObject(root, "min_bytes", (double)(info->min_bytes * layers));
    cJSON_AddNumberToObject(root, "min_keep_ratio", info->min_keep_ratio);
    return cli_json_write(root, path);
}

/* From a model, or from the numbers on the command line. */
static int find_shape(const plan_options *o, akv_shape *shape, uint32_t *layers)
{
    if (o->model != NULL)
        return cli_model_shape(o->model, shape, layers);
    shape->num_kv_heads = (uint32_t)o->kv_heads;
    shape->head_dim_k = (uint32_t)o->head_dim;
    shape->head_dim_v = (uint32_t)(o->head_dim_v != 0 ? o->head_dim_v : o->head_dim);
    shape->gqa_group = (uint32_t)(o->gqa_group != 0 ? o->gqa_group : 1);
    shape->rotary_dim = shape->head_dim_k;
    *layers = (uint32_t)o->layers;
    return CLI_OK;
}

static int run(int argc, char **argv)
{
    plan_options o;
    memset(&o, 0, sizeof o);
    o.profile = AKV_PROFILE_DEFAULT;
    cli_size_goal_init(&o.goal);
    int code = parse(argc, argv, &o);
    if (code != CLI_OK)
        return code < 0 ? cli_help(&cli_cmd_plan) : code;

    akv_shape shape;
    uint32_t layers = 0;
    akv_shape_init(&shape);
    shape.dtype = AKV_F16;
    code = find_shape(&o, &shape, &layers);
    if (code != CLI_OK)
        return code;
    shape.num_tokens = o.tokens;
    if (o.gqa_group != 0)
        shape.gqa_group = (uint32_t)o.gqa_group;
    if (o.rotary_given)
        shape.rotary_dim = (uint32_t)o.rotary_dim;

    akv_config config;
    akv_plan_info info;
    akv_diag diag = {AKV_OK, ""};
    akv_config_init(&config);
    akv_plan_info_init(&info);
    config.profile = o.profile;
    config.keep_ratio = o.goal.keep_ratio;
    config.budget_bytes = o.goal.budget_bytes / layers;
    if (o.goal.budget_bytes != 0 && config.budget_bytes == 0)
        return cli_fail(CLI_INFEASIBLE, "%llu bytes for %u layers are not even one byte each",
                        (unsigned long long)o.goal.budget_bytes, layers);
    akv_status status = akv_plan(&shape, &config, &info, &diag);
    if (status != AKV_OK)
        return cli_fail_diag(status, &diag, NULL);
    code = o.json != NULL ? write_json(&o, &shape, layers, &info) : CLI_OK;
    if (code == CLI_OK && (o.json == NULL || strcmp(o.json, "-") != 0))
        code = print_plan(&o, &shape, layers, &info);
    return code;
}

const cli_command cli_cmd_plan = {
    "plan", "say exactly how many bytes a document will take", run,
    "usage: akv plan -m MODEL --tokens N [options]\n"
    "       akv plan --layers L --kv-heads H --head-dim D --tokens N [options]\n"
    "\n"
    "Computes the bytes of the compressed cache before reading anything; the result is exact, not an estimate.\n"
    "Says too whether attention from it is faster than dense attention on this machine, as far as that was measured.\n"
    "With a model whose layers partly use a sliding window the figures are an upper bound: those layers stay native.\n"
    "\n"
    "  -m, --model FILE     GGUF model to take the shape from\n"
    "      --layers L       or the shape by hand: attention layers,\n"
    "      --kv-heads H     KV heads in each,\n"
    "      --head-dim D     dimensions of a key,\n"
    "      --head-dim-v D   of a value, if different,\n"
    "      --gqa-group G    query heads per KV head (1),\n"
    "      --rotary-dim R   rotated dimensions of a key (all)\n"
    "      --tokens N       length of the document\n"
    "      --keep R         keep ratio: bytes to keep / dense bytes (0.1)\n"
    "      --ratio X        the same the other way round: X times smaller\n"
    "      --budget BYTES   the same in bytes, all layers together; K, M, G are powers of 1024\n"
    "      --profile NAME   default; paper: the method exactly as published\n"
    "      --gaps           the positions will have gaps (tokens left out): attention then takes a slower way\n"
    "      --json FILE      write the figures as JSON (\"-\": to standard output, instead of the text)\n"
    "  -h, --help           this text\n"
    "\n"
    "examples:\n"
    "  akv plan -m model.gguf --tokens 32768 --ratio 20\n"
    "  akv plan --layers 32 --kv-heads 8 --gqa-group 4 --head-dim 128 --tokens 131072 --ratio 20\n"};
