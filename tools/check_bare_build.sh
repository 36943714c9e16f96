#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_bare_build.sh - the core builds with one compiler line, no build system, without a warning, and works.
#
#   tools/check_bare_build.sh [CC]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cc=${1:-cc}
out=$(mktemp)
trap 'rm -f "$out"' EXIT
# shellcheck disable=SC2046  # a list of files
"$cc" -std=c11 -O1 -Wall -Wextra -Werror -Iinclude -Isrc $(find src -name '*.c' -not -path 'src/ref/*' -not -path 'src/cuda/*' | sort) \
    examples/minimal.c -lm -lpthread -o "$out"
"$out"
