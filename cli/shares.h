/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shares.h - the file of `akv calibrate`: how much each layer of a model suffers at several ratios, measured once.
 *
 * JSON: format "anchorkv-layer-errors", version 1, model (hash and description), profile, tokens, pieces, ratios [R]
 * ascending, errors [R][num_layers] (null: a layer without segments). docs/akv.1 describes the members.
 */
#ifndef AKV_CLI_SHARES_H
#define AKV_CLI_SHARES_H

#include "session.h"

/* Exit code; a file that is broken or of another model is refused with a sentence. */
int cli_shares_load(const char *path, const cli_session *session, cli_shares *out);
/* Writes the file; tokens, pieces and continuation say how it was measured. */
int cli_shares_save(const char *path, const cli_session *session, const cli_shares *shares, uint64_t tokens,
                    uint64_t pieces, uint64_t continuation);
/*
 * From now on the host splits config's budget by these errors; equal shares without a file, and for a profile that the
 * file was not measured with.
 */
akv_status cli_shares_apply(const cli_shares *shares, akv_llama *host, const akv_config *config, akv_diag *diag);
void cli_shares_free(cli_shares *shares);

#endif
