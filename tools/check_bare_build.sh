#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_bare_build.sh - the core builds with the one compiler line of README.md, no build system, without a warning, and
# works.
#
#   tools/check_bare_build.sh [CC]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cc=${1:-cc}
out=$(mktemp)
trap 'rm -f "$out"' EXIT
line=$(sed -n 's/^    cc \(-std=c11 .* prog\.c .*\)$/\1/p' README.md)
[ -n "$line" ] || { echo "README.md has no line that begins with \"cc -std=c11\" and compiles prog.c" >&2; exit 1; }
eval "\"$cc\" ${line//prog.c/examples\/engine.c} -O1 -Wall -Wextra -Werror -o \"$out\"" # braces and stars as a reader's shell sees them
"$out"
