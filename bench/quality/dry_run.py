# SPDX-License-Identifier: Apache-2.0
"""Does this machine have what the evaluation needs? Versions, the device, seconds of the C library on a made-up layer.

bash FOLDER/run.sh --python FOLDER/quality/dry_run.py [TOKENS]
"""

import importlib
import os
import sys
import time

import numpy as np

import anchorkv
from workers import SharedFile, Workers, view


def main():
    tokens, H, G, d = int(sys.argv[1]) if len(sys.argv) > 1 else 12000, 2, 6, 128
    for name in ("numpy", "torch", "transformers", "accelerate", "gguf"):
        try:
            print(name, getattr(importlib.import_module(name), "__version__", "present"), flush=True)
        except ImportError as error:
            print(name, "MISSING:", error, flush=True)
    print(
        "anchorkv",
        anchorkv.version(),
        "cores",
        os.cpu_count(),
        "shared memory",
        os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize >> 30,
        "GiB free",
        flush=True,
    )
    rng = np.random.default_rng(0)
    mix = rng.standard_normal((H, 24, d)).astype(np.float32)
    layer = {
        "k": rng.standard_normal((H, tokens, 24), np.float32) @ mix,
        "v": rng.standard_normal((H, tokens, 24), np.float32) @ mix,
        "q": rng.standard_normal((H * G, 64, d), np.float32),
        "m": rng.standard_normal((H * G, 64, d), np.float32),
        "at": np.arange(64, dtype=np.int32) * (tokens // 65),
    }
    layer = {n: x.astype(np.float16) if x.dtype == np.float32 else x for n, x in layer.items()}
    workers = Workers(os.cpu_count())
    source, target = SharedFile(workers.folder, "input"), SharedFile(workers.folder, "slot")
    source.reserve(sum(x.nbytes + 64 for x in layer.values()))
    side, layers, arrays, at = H * tokens * d, 28, {}, 0
    target.reserve(layers * 2 * side * 4)
    for n, x in layer.items():
        arrays[n] = [at, x.dtype.str, list(x.shape)]
        view(source.bytes, arrays[n])[...] = x
        at += (x.nbytes + 63) // 64 * 64
    for profile, factor in (("paper", 10), ("default", 10), ("default", 20), ("default", 20)):
        options = {"rope_inv_freq": anchorkv.inv_freq(1e6, d).tolist(), "keep_ratio": 1 / factor, "profile": profile}
        began = time.time()
        replies = [
            f.result()
            for f in [
                workers.submit(
                    {
                        "input": source.path,
                        "arrays": arrays,
                        "window": 32,
                        "options": options,
                        "output": [target.path, i * 2 * side * 4, side],
                    }
                )
                for i in range(layers)
            ]
        ]
        took = time.time() - began
        errors = [r["error"] for r in replies if "error" in r]
        if errors:
            sys.exit(errors[0])
        print(
            f"{profile} {factor}x, {tokens} tokens: 28 layers in {took:.2f} s on {os.cpu_count()} workers, "
            f"{sum(r['seconds'] for r in replies) / layers:.2f} s a layer, {replies[0]['bytes']} bytes",
            flush=True,
        )
    import torch

    if torch.cuda.is_available():
        x = torch.from_numpy(target.bytes).view(torch.float32)
        status = torch.cuda.cudart().cudaHostRegister(target.bytes.ctypes.data, target.bytes.nbytes, 0)
        torch.cuda.synchronize()
        began = time.time()
        y = x.to("cuda")
        torch.cuda.synchronize()
        print(
            f"{torch.cuda.get_device_name()}: {x.nbytes / 1e9:.2f} GB to the device in {time.time() - began:.2f} s "
            f"(register: {status}); sum {float(y.double().sum()):.6g} against {float(x.double().sum()):.6g}",
            flush=True,
        )


if __name__ == "__main__":
    main()
