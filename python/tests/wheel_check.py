# SPDX-License-Identifier: Apache-2.0
"""The installed package in an environment with numpy alone: run as a program, it says what is wrong or nothing."""

import glob
import os
import re
import subprocess
import sys

import anchorkv
import numpy as np

folder = os.path.dirname(anchorkv.__file__)
assert "site-packages" in folder, f"not the installed package: {folder}"
library = anchorkv._ffi.library_path()
assert os.path.dirname(library) == folder, f"not the package's own library: {library}"
assert os.path.exists(os.path.join(folder, "py.typed")), "py.typed is not in the wheel"
assert "torch" not in sys.modules and "transformers" not in sys.modules
# Seconds of processor time, so that a busy machine does not matter; numpy takes 0.08 of them.
clock = "import time, numpy; t = time.process_time(); import anchorkv; print(time.process_time() - t)"
own = min(float(subprocess.check_output([sys.executable, "-c", clock])) for _ in range(5))
assert own < 0.1, f"import takes {own:.2f} s beyond numpy"
with open(glob.glob(os.path.join(folder, "..", "anchorkv-*.dist-info", "WHEEL"))[0]) as file:
    tags = [line.split()[1] for line in file if line.startswith("Tag:")]
assert tags and all(re.fullmatch(r"py3-none-manylinux_2_\d+_\w+", t) for t in tags), f"not for many machines: {tags}"
needed = subprocess.run(["ldd", library], capture_output=True, text=True).stdout
assert "openblas" not in needed and "not found" not in needed, needed

rng = np.random.default_rng(0)
k, v, q = (rng.standard_normal((h, n, 64)).astype(np.float32) for h, n in ((2, 1000), (2, 1000), (6, 32)))
with anchorkv.compress(k, v, q, keep_ratio=0.2, rope_inv_freq=anchorkv.inv_freq(1e4, 64)) as segment:
    assert segment.nbytes <= 0.2 * 2 * 2 * 1000 * 64 * 2
    out = np.empty((6, 1, 64), np.float32)
    anchorkv.attend(q[:, -1:], [segment], out=out)
    assert np.isfinite(out).all() and np.abs(out).max() > 0
try:
    anchorkv.AnchorKVCache
except ImportError as error:
    assert "torch" in str(error) or "transformers" in str(error), error
else:
    raise AssertionError("no torch here, and yet there is a cache")
print(f"wheel: anchorkv {anchorkv.version()} ({', '.join(tags)}) imported in {own:.3f} s beyond numpy, works")
