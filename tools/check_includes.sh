#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_includes.sh - which folder may include which. Keeps the parts replaceable: compression and attention do not know
# each other, and a host or the command uses the library as any stranger would.
#
#   tools/check_includes.sh [ROOT]
set -euo pipefail
cd "${1:-$(dirname "${BASH_SOURCE[0]}")/..}"
bad=0

# rule FOLDER PATTERN: every #include "..." in FOLDER must match the extended regular expression PATTERN entirely.
# A bare file name is a file of the same folder.
rule() {
    local folder=$1 pattern=$2 file line name
    [ -d "$folder" ] || return 0
    while IFS=: read -r file line name; do
        name=$(sed -E 's/.*"([^"]+)".*/\1/' <<<"$name")
        if [[ $name != */* && -f "$(dirname "$file")/$name" ]]; then
            continue
        fi
        if ! [[ $name =~ ^($pattern)$ ]]; then
            echo "$file:$line: must not include \"$name\"; $folder may include: $pattern" >&2
            bad=1
        fi
    done < <(grep -rnE --include='*.[ch]' --include='*.cpp' --include='*.def' --include='*.cu' --include='*.cuh' '^[[:space:]]*#[[:space:]]*include[[:space:]]*"' "$folder" || true)
}

public='anchorkv/[a-z_]+\.h'
rule include/anchorkv 'anchorkv\.h'
rule src/core "$public|core/.*"
rule src/kernels "$public|core/.*|kernels/.*"
rule src/format "$public|core/.*|format/.*"
rule src/codec "$public|core/.*|kernels/.*|codec/.*"
rule src/attn "$public|core/.*|kernels/.*|attn/.*"
rule src/threads "$public|core/.*|threads/.*"
rule src/cache "$public|core/.*|cache/.*"
rule src/cuda "$public|core/.*|codec/.*|cuda/.*|(span|paper)_instances\.h"
rule hosts/llama_cpp "$public|akv_llama\.h|(llama|ggml|ggml-backend|gguf)\.h"
rule cli "$public|akv_llama\.h|cli/.*|cjson/cJSON\.h"
rule bench "$public|akv_llama\.h|(llama|ggml|ggml-cpu|ggml-backend)\.h"
rule examples "$public"
[ "$bad" -eq 0 ] && echo "include rules hold"
exit "$bad"
