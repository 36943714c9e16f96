#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build.sh - configure and build presets of CMakePresets.json, quietly unless something goes wrong.
#
#   tools/build.sh PRESET...        AKV_JOBS=N parallel jobs, AKV_DEPS=DIR dependency folder, AKV_VERBOSE=1 all output
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${AKV_JOBS:-$(nproc 2>/dev/null || echo 2)}
options=()
[ -z "${AKV_DEPS:-}" ] || options+=("-DAKV_DEPS=$(cd "$AKV_DEPS" && pwd)")

for preset in "$@"; do
    started=$SECONDS
    mkdir -p build
    log=build/$preset.log
    build() {
        cmake --preset "$preset" "${options[@]}" && cmake --build --preset "$preset" -j "$jobs"
    }
    if [ -n "${AKV_VERBOSE:-}" ]; then
        build
    elif ! build >"$log" 2>&1 </dev/null; then
        cat "$log" >&2
        echo "build: $preset failed; the same output is in $log" >&2
        exit 1
    fi
    grep -h 'warning:' "$log" 2>/dev/null >&2 || true
    echo "build: $preset ready in $((SECONDS - started)) s" >&2
done
