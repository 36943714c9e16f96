#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh - libFuzzer over every target of tests/fuzz, from the seeds and what earlier runs kept in build/fuzz/corpus.
#
#   tools/fuzz.sh [SECONDS [TARGET...]]        60 seconds each; targets: segment document compress
#
# A finding ends the run; its input lies in build/fuzz/found. Put it into tests/fuzz/found once it is understood.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=${1:-60}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- segment document compress
command -v clang >/dev/null || { echo "fuzz: clang is needed (Debian package clang)" >&2; exit 1; }
tools/build.sh fuzz
build/fuzz/tests/fuzz/fuzz_seeds build/fuzz/seeds
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
for target in "$@"; do
    corpus=build/fuzz/corpus/$target
    mkdir -p "$corpus" build/fuzz/found
    shopt -s nullglob
    found=(tests/fuzz/found/"$target"-*)
    [ ${#found[@]} -eq 0 ] || cp "${found[@]}" "$corpus/"
    echo "fuzz: $target for $seconds s"
    build/fuzz/tests/fuzz/fuzz_"$target" -max_total_time="$seconds" -artifact_prefix="build/fuzz/found/$target-" -rss_limit_mb=3000 \
        -timeout=60 -max_len=40000 -print_final_stats=1 -verbosity=0 "$corpus" build/fuzz/seeds/"$target" 2>&1 |
        grep -v '^INFO' | tail -n 40
done
