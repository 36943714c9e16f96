#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# coverage.sh - lines of src that the core's tests run, by folder; src/cuda (needs a GPU) and src/ref (the tests' reference) are not
# counted. Needs gcovr (pip install gcovr). Exit status 1 below 90 %.
#
#   tools/coverage.sh             build, run the tests, report
#   tools/coverage.sh --report    only report what was run already in build/coverage
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "${1:-}" != --report ]; then
    cmake --preset coverage
    cmake --build --preset coverage -j "${AKV_JOBS:-2}"
    find build/coverage -name '*.gcda' -delete
    ctest --preset coverage -j "${AKV_JOBS:-2}" -E '^(tree|build|quality|python)'
fi
# Inner loops run billions of times here, which gcovr takes for a fault of gcov.
gcovr --root . --gcov-ignore-parse-errors suspicious_hits.warn_once_per_file \
    --object-directory build/coverage build/coverage/CMakeFiles/anchorkv_objects.dir --filter 'src/' --exclude 'src/(cuda|ref)/' \
    --json-summary build/coverage/summary.json --txt build/coverage/lines.txt
python3 - build/coverage/summary.json <<'PY'
import collections, json, sys
lines = collections.defaultdict(lambda: [0, 0])
for file in json.load(open(sys.argv[1]))["files"]:
    for key in (file["filename"].split("/")[1], "all"):
        lines[key][0] += file["line_covered"]
        lines[key][1] += file["line_total"]
for key, (covered, total) in sorted(lines.items(), key=lambda x: (x[0] == "all", x[0])):
    print(f"{key:10} {covered:6} of {total:6} lines  {100 * covered / total:5.1f} %")
covered, total = lines["all"]
sys.exit(covered < 0.9 * total)
PY
