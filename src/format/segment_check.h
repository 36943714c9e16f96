/* SPDX-License-Identifier: Apache-2.0 */
/* segment_check.h - the checks of untrusted segment bytes that live in files of their own. */
#ifndef AKV_SEGMENT_CHECK_H
#define AKV_SEGMENT_CHECK_H

#include "core/segment.h"

#define CORRUPT(...) akv_fail(diag, AKV_E_CORRUPT, __VA_ARGS__)
#define F16_EXPONENT 0x7c00u
#define BF16_EXPONENT 0x7f80u

/* segment_open.c: AKV_OK when no 16-bit float of the section has all exponent bits set. */
akv_status akv_check_finite16(const akv_segment *segment, int id, uint16_t exponent, akv_diag *diag);

/* ladder_check.c: header fields (before the table is checked), then the sections, of the LADDER coding. */
akv_status akv_check_ladder_header(const akv_header *header, uint64_t bytes, akv_diag *diag);
akv_status akv_check_ladder(const akv_segment *segment, akv_diag *diag);

#endif
