#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_symbols.sh - the shared library shows exactly the functions that the public headers declare, all named akv_*.
#
#   tools/check_symbols.sh LIBANCHORKV_SO HEADER...
set -euo pipefail
library=$1
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A and the like: absolute symbols are the version script's own.
nm -D --defined-only "$library" | awk '$2 != "A" { print $3 }' | sed 's/@.*//' | sort -u >"$work/exported"
# Comments out, then the name before the first parenthesis of every AKV_API declaration.
sed -e 's|//.*||' "$@" | tr '\n' ' ' | sed -e 's|/\*[^*]*\*\+\([^/*][^*]*\*\+\)*/| |g' -e 's/AKV_API/\nAKV_API/g' |
    grep '^AKV_API' | sed -n 's/^AKV_API[^(;]*[ *]\(akv_[a-z0-9_]*\)(.*/\1/p' | sort -u >"$work/declared"
[ -s "$work/declared" ] || { echo "no AKV_API function found in: $*" >&2; exit 1; }

status=0
if grep -v '^akv_' "$work/exported" >"$work/foreign"; then
    echo "exported without the prefix akv_:" $(cat "$work/foreign") >&2
    status=1
fi
comm -23 "$work/declared" "$work/exported" >"$work/missing"
if [ -s "$work/missing" ]; then
    echo "declared, but not exported:" $(cat "$work/missing") >&2
    status=1
fi
comm -13 "$work/declared" "$work/exported" >"$work/undeclared"
if [ -s "$work/undeclared" ]; then
    echo "exported, but not declared:" $(cat "$work/undeclared") >&2
    status=1
fi
[ "$status" -eq 0 ] && echo "$(wc -l <"$work/exported") functions exported, all declared"
exit "$status"
