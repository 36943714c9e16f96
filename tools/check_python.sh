#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# check_python.sh - build the wheel, install it, and run the Python tests against what was installed.
#
# Three environments in .deps/python (or AKV_DEPS/python): `main` with PyTorch and the newest transformers, `kvpress` laid
# over it with the older transformers that kvpress wants, `clean` with numpy alone. PyTorch is large (2.5 GB to fetch, 6 GB
# on disk), so this is not part of `make check`. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
deps=${AKV_DEPS:-$PWD/.deps}/python
export OMP_WAIT_POLICY=passive PIP_DISABLE_PIP_VERSION_CHECK=1
export AKV_CUDA=${AKV_CUDA:-OFF} # the GPU part takes minutes to compile, and cannot run where there is no GPU
unset AKV_LIBRARY PYTHONPATH

say() { printf 'check-python: %s\n' "$*" >&2; }
usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }
find_python() {
    local candidate
    for candidate in ${AKV_PYTHON:-python3.11 /usr/bin/python3.11 python3}; do
        if usable "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}
# Debian keeps venv apart from Python itself.
find_python >/dev/null || tools/deps.sh venv
python=$(find_python) || {
    say "the pinned wheels are those for Python 3.11, and venv is needed; none was found. Name one with AKV_PYTHON"
    exit 1
}
mkdir -p "$deps"

# An environment counts as there when the requirements it was made from are the present ones.
environment() { # name, requirement files...
    local name=$1 stamp
    shift
    stamp=$("$python" --version; cat "$@" | sha256sum)
    if [ "$(cat "$deps/$name/.stamp" 2>/dev/null)" = "$stamp" ]; then
        return 1
    fi
    say "making the environment \"$name\""
    rm -rf "${deps:?}/$name"
    "$python" -m venv "$deps/$name"
    echo "$stamp" >"$deps/$name/.new"
}
ready() { mv "$deps/$1/.new" "$deps/$1/.stamp"; }

started=$SECONDS
if environment main tools/python-requirements.txt; then
    "$deps/main/bin/python" -m pip install -q --no-cache-dir --no-compile --require-hashes --no-deps -r tools/python-requirements.txt
    ready main
fi
site=$("$deps/main/bin/python" -c 'import site; print(site.getsitepackages()[0])')
if environment kvpress tools/python-requirements.txt tools/python-requirements-kvpress.txt; then
    "$deps/kvpress/bin/python" -m pip install -q --no-cache-dir --no-compile --require-hashes --no-deps -r tools/python-requirements-kvpress.txt
    ready kvpress
fi
# Every time: the checkout may have moved.
echo "$site" >"$("$deps/kvpress/bin/python" -c 'import site; print(site.getsitepackages()[0])')/main.pth"
if environment clean tools/python-requirements.txt; then
    ready clean
fi
say "environments ready after $((SECONDS - started)) s"

rm -rf "$deps/wheel"
AKV_PYTHON=$python tools/build_wheel.sh "$deps/wheel" >/dev/null
# "clean" shall have numpy and nothing else: its files are copied from "main", without another download.
numpy=$(sed -n 's/^numpy==\([0-9.]*\).*/\1/p' tools/python-requirements.txt)
clean=$("$deps/clean/bin/python" -c 'import site; print(site.getsitepackages()[0])')
cp -a "$site/numpy" "$site/numpy-$numpy.dist-info" "$site/numpy.libs" "$clean/"
for name in main kvpress clean; do
    "$deps/$name/bin/python" -m pip install -q --no-deps --no-index --force-reinstall "$deps"/wheel/*.whl
done
say "wheel built and installed after $((SECONDS - started)) s"
"$deps/clean/bin/python" python/tests/wheel_check.py

failed=0
"$deps/main/bin/python" -m pytest -q --no-header -W ignore -p no:cacheprovider python/tests \
    --ignore=python/tests/test_bench.py "$@" || failed=1
"$deps/kvpress/bin/python" -m pytest -q --no-header -W ignore -p no:cacheprovider python/tests/test_cache.py \
    python/tests/test_press.py python/tests/test_bench.py "$@" || failed=1
say "done after $((SECONDS - started)) s"
exit "$failed"
