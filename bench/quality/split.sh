#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# split.sh - cut the model into pieces that each fit one transfer to a machine reached only by small copies.
#
#   bench/quality/split.sh [MODEL.gguf [FOLDER]]        makes FOLDER/p01/piece .. FOLDER/p20/piece, 56 MB each
#
# FOLDER defaults to .cache/model, which git ignores. Joining the pieces in order gives the file back:
# bench/quality/join_piece.sh on the other machine appends one piece a call and checks the whole at the end.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
model=${1:-$root/.deps/models/qwen2.5-coder-1.5b/qwen2.5-coder-1.5b-instruct-q4.gguf}
folder=${2:-$root/.cache/model}
piece=56000000 # 20 pieces; leaves room for the working tree beside one piece in a 64 MiB transfer

mkdir -p "$folder"
bytes=$(stat -c %s "$model")
pieces=$(((bytes + piece - 1) / piece))
for i in $(seq "$pieces"); do
    target=$folder/$(printf 'p%02d' "$i")
    mkdir -p "$target"
    dd if="$model" of="$target/piece" bs="$piece" skip=$((i - 1)) count=1 status=none
done
sha256sum <"$model" | cut -d' ' -f1 >"$folder/sha256"
echo "$pieces pieces in $folder; the whole is $bytes bytes, sha256 $(cat "$folder/sha256")"
