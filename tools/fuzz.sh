#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh - libFuzzer over the targets of tests/fuzz, from the seeds and what earlier runs kept in build/fuzz/corpus.
#
#   tools/fuzz.sh [SECONDS [TARGET...]]        60 seconds each; targets: segment segment_open document document_open compress
#                                              request http
#   FAST=1 tools/fuzz.sh ...                   without ASan, UBSan as traps: more executions; the corpus is the same, so that a
#                                              later run with ASan looks at what this one found
#
# A finding ends the run; its input lies in build/fuzz/found. Put it into tests/fuzz/found once it is understood.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=${1:-60}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- segment segment_open document document_open compress request http
command -v clang >/dev/null || { echo "fuzz: clang is needed (Debian package clang)" >&2; exit 1; }
preset=fuzz${FAST:+-fast}
tools/build.sh "$preset"
programs=build/$preset/tests/fuzz
"$programs"/fuzz_seeds build/fuzz/seeds
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
shopt -s nullglob
for target in "$@"; do
    seeds=build/fuzz/seeds/${target%_open} longest=40000 options=()
    case $target in
    request | http) seeds=tests/fuzz/requests/$target longest=6000 options=(-dict=tests/fuzz/request.dict) ;;
    esac
    if [ ! -x "$programs/fuzz_$target" ]; then
        echo "fuzz: there is no target $target in this build (request and http need libcjson-dev and libmicrohttpd-dev)" >&2
        exit 1
    fi
    corpus=build/fuzz/corpus/$target
    mkdir -p "$corpus" build/fuzz/found
    found=(tests/fuzz/found/"$target"-*)
    [ ${#found[@]} -eq 0 ] || cp "${found[@]}" "$corpus/"
    echo "fuzz: $target for $seconds s"
    "$programs/fuzz_$target" -max_total_time="$seconds" -artifact_prefix="build/fuzz/found/$target-" -rss_limit_mb=3000 \
        -timeout=60 -max_len="$longest" -print_final_stats=1 -verbosity=0 "${options[@]}" "$corpus" "$seeds" 2>&1 |
        grep -v '^INFO' | tail -n 40
done
