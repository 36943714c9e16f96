#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_install.sh - a program of somebody else builds against the installed library, by pkg-config and by find_package,
# shared and static, and runs.
#
#   tools/check_install.sh BUILD_DIR
set -euo pipefail
build=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix
cmake --install "$build" --prefix "$prefix" >/dev/null
pc=$(find "$prefix" -name anchorkv.pc)
libdir=$(dirname "$(dirname "$pc")")
export PKG_CONFIG_PATH=$(dirname "$pc")

# shellcheck disable=SC2046  # pkg-config answers with words
{
    cc -std=c11 -Wall -Wextra -Werror examples/minimal.c -o "$work/shared" $(pkg-config --cflags --libs anchorkv) -lm
    cc -std=c11 -Wall -Wextra -Werror examples/minimal.c -o "$work/static" $(pkg-config --cflags anchorkv) \
        "$libdir/libanchorkv.a" $(pkg-config --static --libs-only-l anchorkv | sed 's/-lanchorkv//') -lm
}
LD_LIBRARY_PATH=$libdir "$work/shared" >"$work/shared.txt"
"$work/static" >"$work/static.txt"

cmake -S examples/find_package -B "$work/consumer" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$work/consumer" >/dev/null
"$work/consumer/consumer_shared" >"$work/cmake_shared.txt"
"$work/consumer/consumer_static" >"$work/cmake_static.txt"

# The same code on the same data: the same report, however it was linked.
for other in static cmake_shared cmake_static; do
    cmp "$work/shared.txt" "$work/$other.txt"
done
cat "$work/shared.txt"
