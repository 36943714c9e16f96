#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# stage.sh - everything but the model that the evaluation needs on another x86-64 machine, in one folder.
#
#   bench/quality/stage.sh LIBANCHORKV.so [FOLDER [WHEEL...]]      FOLDER defaults to .cache/eval, ignored by git
#
# Pure-Python wheels that are missing there (gguf, often) are unpacked into FOLDER/site.
# Nothing is built or installed there:
#   bash FOLDER/run.sh --model MODEL.gguf ... runs eval_model.py with the staged library.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
library=$1
folder=${2:-$root/.cache/eval}

rm -rf "$folder"
mkdir -p "$folder/lib"
cp -r "$here" "$folder/quality"
cp -r "$root/python" "$folder/python"
find "$folder" -name __pycache__ -prune -exec rm -rf {} +
cp -L "$library" "$folder/lib/libanchorkv.so"
for wheel in "${@:3}"; do python3 -m zipfile -e "$wheel" "$folder/site"; done
cp "$root/.deps/text/manuals.txt" "$folder/manuals.txt"
cat >"$folder/run.sh" <<'RUN'
#!/usr/bin/env bash
# Made by stage.sh: the evaluation with the library and the text beside this file.
here=$(cd "$(dirname "$0")" && pwd)
export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} AKV_LIBRARY=$here/lib/libanchorkv.so
export PYTHONPATH=$here/python:$here/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1
if [ "${1:-}" = --python ]; then
    shift
    exec python3 "$@"
fi
exec python3 "$here/quality/eval_model.py" --text "$here/manuals.txt" "$@"
RUN
du -sh "$folder" | cut -f1
