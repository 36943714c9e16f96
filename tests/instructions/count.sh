#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# count.sh - instructions of one decode step on 64-bit ARM, by function and level of AKV_CPU, per token and KV head. Needs the preset
# aarch64 built (cmake --preset aarch64 && cmake --build build/aarch64) and qemu-user 7.
#
#   tests/instructions/count.sh [RATIO]          default 10
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export QEMU_LD_PREFIX=/usr/aarch64-linux-gnu
cc -O2 -shared -fPIC tests/instructions/count.c -o "$work/count.so"
aarch64-linux-gnu-gcc -std=c11 -O2 -static -no-pie -Wno-override-init -D_POSIX_C_SOURCE=200809L -Iinclude -Isrc -Itests \
    tests/instructions/decode.c build/aarch64/tests/libakv_testing.a build/aarch64/tests/libanchorkv_ref.a build/aarch64/libanchorkv.a \
    -lpthread -lm -o "$work/decode"
AKV_CPU=generic qemu-aarch64 "$work/decode" "$work/segment" "${1:-10}"
for cap in generic neon neondot; do
    AKV_CPU=$cap qemu-aarch64 -d plugin -plugin "$work/count.so" "$work/decode" "$work/segment" 2>"$work/$cap" >"$work/$cap.out"
    awk -v cap=$cap '$1 == "count" && $2 ~ /^(anchor_logits|code_dots|code_sums|mean_logits|turn_rows|unpack_anchors|sort_levels|row_max|exp_sum|histogram|bytes_sum|place_sums|quantise_level|tile_dots|tile_sums|fill_group)/ {
        split($2, name, "."); n[name[1]] += $3; all += $3 }
        END { for (f in n) printf "%-8s %-16s %8.1f\n", cap, f, n[f] / 2048 | "sort -k3,3nr"; close("sort -k3,3nr"); printf "%-8s %-16s %8.1f\n", cap, "kernels", all / 2048 }' \
        "$work/$cap"
done
paste "$work"/*.out
