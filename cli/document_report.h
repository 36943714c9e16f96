/* SPDX-License-Identifier: Apache-2.0 */
/* document_report.h - a report about a .akv file, from the file alone. */
#ifndef AKV_CLI_DOCUMENT_REPORT_H
#define AKV_CLI_DOCUMENT_REPORT_H

#include "cli.h"

/*
 * Opens every segment (so damage is found) and fills the report. report->layers comes from malloc; texts are borrowed
 * from the document. Returns an exit code and prints the reason.
 */
int cli_report_of_document(const char *path, const akv_document *document, cli_report *report);

/* Only what the document says about itself; no segment is opened. report->layers stays NULL. */
void cli_report_of_properties(const char *path, const akv_document *document, cli_report *report);

/* The sum of a layer's segments -> out->segment. */
void cli_layer_of_segments(akv_segment *const *segments, uint32_t count, cli_layer_report *out);

#endif
