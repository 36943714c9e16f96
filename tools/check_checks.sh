#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_checks.sh - the checks of this folder do report what they are for: each is shown one small offence.
set -euo pipefail
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

must_fail() { # expected-text command...
    local expected=$1
    shift
    if "$@" >"$work/out" 2>&1; then
        echo "passed, but should have failed: $*" >&2
        exit 1
    fi
    grep -q "$expected" "$work/out" || { echo "failed without saying '$expected': $*" >&2; cat "$work/out" >&2; exit 1; }
}

mkdir -p "$work/tree/src/codec" "$work/tree/src/attn"
echo '#include "attn/attend.h"' >"$work/tree/src/codec/offender.c"
must_fail 'must not include "attn/attend.h"' "$tools/check_includes.sh" "$work/tree"

printf '#ifndef A\n#define A\n#define AKV_API\n\nAKV_API int akv_one(void);\n#endif\n' >"$work/bare.h"
must_fail 'akv_one has no comment' python3 "$tools/api.py" "$work/bare.h"
printf '#ifndef A\n/* One. */\ntypedef struct akv_one {\n    int first; /* of two */\n\n    int second;\n} akv_one;\n/* f */\nAKV_API int akv_f(void);\n#endif\n' >"$work/field.h"
must_fail 'akv_one.second has no comment' python3 "$tools/api.py" "$work/field.h"
must_fail 'is not what the headers say' python3 "$tools/api.py" --page "$tools/../README.md" "$tools/../include/anchorkv/anchorkv.h"

printf 'See [this](nowhere.md), `src/nowhere.c` and `akv_nowhere`.\n\n    make nothing\n    akv ask --nonsense\n    akv nothing\n' >"$work/page.md"
for finding in 'link to nowhere.md' 'src/nowhere.c is not there' 'akv_nowhere is nowhere' 'no target nothing' 'akv ask --nonsense is not' 'akv nothing is not'; do
    must_fail "$finding" python3 "$tools/check_docs.py" "$work/page.md"
done

printf '/* One. */\nAKV_API int akv_one(void);\n/* Two. */\nAKV_API int akv_two(void);\n' >"$work/two.h"
printf 'int akv_one(void);\nint akv_one(void) { return 1; }\n' >"$work/one.c"
cc -shared -fPIC -o "$work/one.so" "$work/one.c"
must_fail 'declared, but not exported: akv_two' "$tools/check_symbols.sh" "$work/one.so" "$work/two.h"
printf 'int akv_two(void) { return 2; }\nint other(void) { return 3; }\n' >>"$work/one.c"
cc -shared -fPIC -o "$work/one.so" "$work/one.c"
must_fail 'without the prefix akv_: other' "$tools/check_symbols.sh" "$work/one.so" "$work/two.h"

sed 's/    uint64_t seed;/    uint32_t seed;/' "$tools/../include/anchorkv/anchorkv.h" >"$work/anchorkv.h"
must_fail '^-  32 8 uint64_t seed' python3 "$tools/abi.py" "$work/anchorkv.h"

# Targets that the library refuses, as any compiler would name them.
core="cc -std=c11 -fsyntax-only -I$tools/../include -I$tools/../src $tools/../src/core/status.c"
# shellcheck disable=SC2086  # a list of words
must_fail 'AnchorKV needs a 64-bit target' $core -U__SIZEOF_POINTER__ -D__SIZEOF_POINTER__=4
# shellcheck disable=SC2086
must_fail 'AnchorKV needs a little-endian target' $core -U__BYTE_ORDER__ -D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__

echo "the checks report what they are for"
