/* SPDX-License-Identifier: Apache-2.0 */
/* retarget.h - between the two codings of retarget.c. */
#ifndef AKV_CODEC_RETARGET_H
#define AKV_CODEC_RETARGET_H

#include "codec/ladder.h"

/*
 * retarget_plain.c: the header of a PLAIN segment within a budget, AKV_E_INFEASIBLE when there is none; and the
 * segment.
 */
akv_status akv_plan_plain_retarget(const akv_segment *segment, uint64_t budget, akv_header *out, uint64_t *min_bytes);
akv_status akv_run_plain_retarget(const akv_segment *segment, const akv_header *planned, const akv_config *config,
                                  akv_segment **out, akv_retarget_info *info, akv_diag *diag);

#endif
