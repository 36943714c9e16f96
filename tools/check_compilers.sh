#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_compilers.sh - the code under other compilers, another C library and static analysis. Minutes; run by hand.
#
#   tools/check_compilers.sh [STEP...]        default: all of them, in this order
#
#   warnings  library, host, command and examples: gcc and clang, -std=c11 -pedantic -Wall -Wextra and more, no warning
#   refused   32-bit and big-endian targets stop with a sentence
#   clang     the core built by clang passes its tests
#   musl      the core built against musl passes its tests
#   aarch64   the core cross-compiled for 64-bit ARM passes its tests under qemu-user, which is 20 to 40 times slower
#   tidy      clang-tidy with .clang-tidy, no finding
#   cppcheck  cppcheck with tools/cppcheck.txt, no finding
#
# tools/deps.sh compilers brings what they need. Binaries under build/clang, build/musl and build/aarch64. AKV_JOBS=N parallel
# jobs; AKV_TESTS=REGEX runs only these tests of clang, musl and aarch64; AKV_TEST_THIN=N lets long loops of random cases and
# damaged bytes do an N-th of their rounds (tests/akv_test.h).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${AKV_JOBS:-$(nproc 2>/dev/null || echo 2)}
deps=${AKV_DEPS:-$PWD/.deps}
export OMP_WAIT_POLICY=passive

say() { printf 'check-compilers: %s\n' "$*" >&2; }
sources() { git ls-files "$@" | grep -v '^src/cuda/'; } # needs CUDA's headers
need() { command -v "$1" >/dev/null || { say "$1 not found: tools/deps.sh compilers"; exit 1; }; }

step_warnings() {
    local cc define options="-std=c11 -pedantic -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Werror"
    local headers="-I. -Iinclude -Isrc -Ihosts/llama_cpp -isystem $deps/llama/include -DAKV_HAVE_EDIT=1"
    for cc in gcc clang; do
        need $cc
        # shellcheck disable=SC2086  # lists of options
        for define in _POSIX_C_SOURCE=200809L _GNU_SOURCE; do
            if [ $define = _GNU_SOURCE ]; then set -- 'cli/*.c'; else set -- 'src/*.c' 'hosts/llama_cpp/*.c' 'examples/*.c'; fi
            sources "$@" | xargs -P "$jobs" -I{} $cc $options $headers -D$define -O2 -c {} -o /dev/null
        done
        # The public headers alone, each first, in C and in C++.
        for header in include/anchorkv/*.h hosts/llama_cpp/akv_llama.h; do
            # shellcheck disable=SC2086
            $cc $options $headers -x c -fsyntax-only -include "$header" /dev/null
            # shellcheck disable=SC2086
            $cc -std=c++17 -pedantic -Wall -Wextra -Werror $headers -x c++ -fsyntax-only -include "$header" /dev/null
        done
        say "warnings: none from $($cc --version | head -n 1)"
    done
}

step_refused() {
    local found compiler
    for compiler in "gcc -m32" s390x-linux-gnu-gcc; do
        need ${compiler%% *}
        found=$($compiler -std=c11 -Iinclude -Isrc -fsyntax-only src/core/status.c 2>&1) && {
            say "refused: $compiler compiles the core, but must not"
            exit 1
        }
        grep -q 'AnchorKV needs a .* target' <<<"$found" || {
            say "refused: $compiler fails without the sentence that says why:"
            echo "$found" >&2
            exit 1
        }
        say "refused: $compiler: $(sed -n 's/.*\(AnchorKV needs[^"]*\)".*/\1/p' <<<"$found" | head -n 1)"
    done
}

core_under() { # name, options of cmake: the core and its tests
    local name=$1
    shift
    cmake -S . -B "build/$name" -DCMAKE_BUILD_TYPE=Release -DAKV_LLAMA=OFF -DAKV_CLI=OFF -DAKV_CUDA=OFF \
        "$@" >"build/$name.log" 2>&1 </dev/null || { cat "build/$name.log" >&2; exit 1; }
    cmake --build "build/$name" -j "$jobs" >>"build/$name.log" 2>&1 </dev/null || { tail -n 40 "build/$name.log" >&2; exit 1; }
    if grep 'warning:' "build/$name.log" >&2; then
        say "$name: warnings, see above"
        exit 1
    fi
    # Checks of the tree, of the installed library and from Python (of another C library) belong to the build of make check.
    ctest --test-dir "build/$name" -R "${AKV_TESTS:-.}" -E '^(tree|build)\.|^python|^quality' --timeout 7200 -j "$jobs" --output-on-failure >"build/$name.tests" 2>&1 </dev/null || {
        cat "build/$name.tests" >&2
        say "$name: tests failed"
        exit 1
    }
    say "$name: $(grep 'tests passed' "build/$name.tests")"
}

step_clang() {
    need clang
    core_under clang -DCMAKE_C_COMPILER=clang
}

step_musl() {
    # The one header of somebody else's that the core needs; the folder it lies in holds another C library's headers too.
    local header
    need musl-gcc
    header=$(cc -E -include xxhash.h -xc /dev/null | sed -n 's/^# 1 "\(.*xxhash\.h\)".*/\1/p' | head -n 1)
    mkdir -p build/musl-include
    cp "$header" build/musl-include/
    core_under musl -DCMAKE_C_COMPILER=musl-gcc -DAKV_XXHASH_INCLUDE="$PWD/build/musl-include"
}

step_aarch64() {
    need aarch64-linux-gnu-gcc
    need qemu-aarch64
    core_under aarch64 -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-linux-gnu.cmake"
}

step_tidy() {
    need clang-tidy
    [ -f build/release/compile_commands.json ] || { say "tidy: make build first; it writes down how files are compiled"; exit 1; }
    # One file a process: several at once make clang 14's analyzer see uninitialised argument lists.
    sources 'src/*.c' 'hosts/llama_cpp/*.c' 'cli/*.c' | grep -Ev '^(src/ref/|cli/no_llama)' |
        xargs -P "$jobs" -n 1 clang-tidy -p build/release --quiet >build/tidy.log 2>/dev/null || {
        cat build/tidy.log >&2
        say "tidy: findings, see above"
        exit 1
    }
    say "tidy: no finding"
}

step_cppcheck() {
    need cppcheck
    # shellcheck disable=SC2046  # a list of files
    cppcheck --std=c11 --language=c --enable=warning,performance,portability --inline-suppr --quiet -j "$jobs" --error-exitcode=1 \
        --suppressions-list=tools/cppcheck.txt -I. -Iinclude -Isrc -Ihosts/llama_cpp -D__GNUC__=12 -D__x86_64__=1 -DAKV_HAVE_EDIT=1 \
        $(sources 'src/*.c' 'hosts/llama_cpp/*.c' 'cli/*.c' 'examples/*.c')
    say "cppcheck: no finding"
}

mkdir -p build
[ $# -gt 0 ] || set -- warnings refused clang musl aarch64 tidy cppcheck
for step in "$@"; do
    case $step in
    warnings | refused | clang | musl | aarch64 | tidy | cppcheck)
        started=$SECONDS
        "step_$step"
        say "$step: done in $((SECONDS - started)) s"
        ;;
    *) say "unknown step '$step'"; exit 1 ;;
    esac
done
