#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# join_piece.sh - append piece N of split.sh to a file, once, in order.
#
#   bench/quality/join_piece.sh N PIECE FILE
#
# FILE.next holds the number of the piece that is due, so a repeated call does nothing and a skipped one is an error.
set -euo pipefail

number=$1 piece=$2 file=$3
mkdir -p "$(dirname "$file")"
due=$(cat "$file.next" 2>/dev/null || echo 1)
if [ "$number" -lt "$due" ]; then
    echo "piece $number is already there"
elif [ "$number" -gt "$due" ]; then
    echo "piece $due is due, not $number" >&2
    exit 1
else
    cat "$piece" >>"$file"
    echo $((due + 1)) >"$file.next"
    echo "piece $number: $(stat -c %s "$file") bytes"
fi
