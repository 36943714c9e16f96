#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check.sh - build and run every test: the release build, then the core and its tests under ASan and UBSan. All of them
# run even when some fail; the last line counts both builds together, and the exit status is 0 only when none failed.
#
#   tools/check.sh [PRESET...]      default: release asan
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${AKV_JOBS:-$(nproc 2>/dev/null || echo 2)}
[ $# -gt 0 ] || set -- release asan
# Tests run side by side. libllama's threads would otherwise spin while they wait for each other, each taking a processor
# from the very thread it waits for.
export OMP_WAIT_POLICY=passive
unset AKV_TEST_THIN # every round of every test
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

total=0 failed=0 broken=0
attribute() { sed -n "s/^[[:space:]]*$1=\"\([0-9]*\)\".*/\1/p" "$2" | head -n 1; } # of the report's testsuite element
for preset in "$@"; do
    tools/build.sh "$preset"
    report=$PWD/build/$preset/report.xml
    rm -f "$report"
    ctest --preset "$preset" -j "$jobs" --output-junit "$report" </dev/null || broken=1
    [ -f "$report" ] || { echo "check: ctest wrote no report for $preset" >&2; exit 1; }
    total=$((total + $(attribute tests "$report")))
    failed=$((failed + $(attribute failures "$report")))
done
[ "$total" -gt 0 ] || { echo "check: no test ran" >&2; exit 1; }
echo "check: $((total - failed)) passed, $failed failed"
[ "$broken" -eq 0 ] && [ "$failed" -eq 0 ]
