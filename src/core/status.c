/* SPDX-License-Identifier: Apache-2.0 */
/* status.c - names of the error codes, messages, and the _init functions of the public structs. */
#include "core/base.h"
#include "anchorkv/akv_experimental.h"

#include <stdarg.h>
#include <stdio.h>

#define AKV_TEXT_(x) #x
#define AKV_TEXT(x) AKV_TEXT_(x)

const char *akv_version(void)
{
    return AKV_TEXT(AKV_VERSION_MAJOR) "." AKV_TEXT(AKV_VERSION_MINOR) "." AKV_TEXT(AKV_VERSION_PATCH);
}

const char *akv_status_str(akv_status status)
{
    switch (status) {
    case AKV_OK: return "ok";
    case AKV_E_INVALID_ARGUMENT: return "invalid argument";
    case AKV_E_UNSUPPORTED: return "unsupported";
    case AKV_E_BAD_STATE: return "not possible in this state";
    case AKV_E_NO_MEMORY: return "out of memory";
    case AKV_E_NO_SPACE: return "buffer too small";
    case AKV_E_INFEASIBLE: return "budget too small";
    case AKV_E_NON_FINITE: return "NaN or infinity in the input";
    case AKV_E_CORRUPT: return "corrupt data";
    case AKV_E_VERSION: return "unknown format version";
    case AKV_E_CHECKSUM: return "checksum mismatch";
    case AKV_E_MISMATCH: return "made for another model or shape";
    case AKV_E_IO: return "input/output error";
    case AKV_E_CANCELLED: return "cancelled";
    case AKV_E_DEVICE: return "device error";
    }
    return "unknown status";
}

akv_status (akv_fail)(akv_diag *diag, akv_status status, const char *format, ...)
{
    if (diag != NULL) {
        va_list args;
        va_start(args, format);
        vsnprintf(diag->message, sizeof diag->message, format, args);
        va_end(args);
        diag->status = status;
    }
    return status;
}

#define AKV_INIT(ptr)                                                                                                  \
    do {                                                                                                               \
        memset((ptr), 0, sizeof *(ptr));                                                                               \
        (ptr)->struct_size = sizeof *(ptr);                                                                            \
    } while (0)

void akv_config_init(akv_config *config)
{
    AKV_INIT(config);
    config->profile = AKV_PROFILE_DEFAULT;
    config->keep_ratio = 0.1;
}

void akv_shape_init(akv_shape *shape)
{
    AKV_INIT(shape);
    shape->gqa_group = 1;
    shape->num_queries = 32;
    shape->dtype = AKV_F16;
}

void akv_layer_init(akv_layer *layer)
{
    AKV_INIT(layer);
    akv_shape_init(&layer->shape);
    layer->rope.magnitude = 1.0;
}

void akv_plan_info_init(akv_plan_info *info)
{
    AKV_INIT(info);
}

void akv_segment_info_init(akv_segment_info *info)
{
    AKV_INIT(info);
    akv_shape_init(&info->shape);
}

void akv_attend_params_init(akv_attend_params *params)
{
    AKV_INIT(params);
    params->gqa_group = 1;
    params->num_queries = 1;
}

void akv_experiment_init(akv_experiment *experiment)
{
    AKV_INIT(experiment);
    experiment->rho = 0.7;
    experiment->pool_width = 7;
    experiment->tokens_per_anchor = 128;
}

void akv_experiment_init_default(akv_experiment *experiment)
{
    static const uint16_t level_bits[] = {24, 48, 72, 108, 168, 256, 512};
    akv_experiment_init(experiment);
    experiment->scale_rule = AKV_SCALE_LEAST_SQUARES;
    experiment->rho = 0.4;
    experiment->most_attended = 40;
    experiment->tokens_per_anchor = 32;
    experiment->anchor_rounds = 4;
    experiment->sinks = 4;
    experiment->pool_tokens = 12;
    experiment->pool_weight = 0.3;
    experiment->incoherent = 0.6;
    experiment->floor = 0.3;
    experiment->value_boost = 3.0;
    experiment->query_mix = 0.4;
    experiment->slow_angle = 6.0;
    experiment->basis_cols = 1024; /* all: cutting at 96 of 128 doubles the error */
    experiment->num_levels = sizeof level_bits / sizeof *level_bits;
    memcpy(experiment->level_bits, level_bits, sizeof level_bits);
}
