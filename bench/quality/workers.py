# SPDX-License-Identifier: Apache-2.0
"""Worker processes that compress and decode layers with the C library; arrays travel through files in shared memory.

Processes, not threads: the library takes one BLAS call at a time per process. `python3 workers.py` is the worker's end:
it reads one JSON request a line and answers one a line, and imports neither torch nor transformers, so that many start
at once.
"""

import atexit
import concurrent.futures
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np


class SharedFile:
    """A file in memory that this process and the workers map; grows when needed."""

    def __init__(self, folder, name):
        self.path, self.bytes = os.path.join(folder, name), None

    def reserve(self, size):
        """True when the mapping is new."""
        if self.bytes is not None and self.bytes.nbytes >= size:
            return False
        size += size // 8  # prompts differ by a few tokens: grow seldom
        self.bytes = np.memmap(self.path, np.uint8, "w+", shape=(size,))
        return True


class Workers:
    """A pool of worker processes. call(request) blocks its thread; submit(request) returns a future."""

    def __init__(self, count):
        base = "/dev/shm" if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 12e9 else None
        self.folder = tempfile.mkdtemp(prefix="anchorkv-", dir=base)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, os.path.abspath(__file__)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for _ in range(count)
        ]
        self.free = queue.SimpleQueue()
        for process in self.processes:
            self.free.put(process)
        self.pool = concurrent.futures.ThreadPoolExecutor(count)
        atexit.register(self.close)

    def call(self, request):
        process = self.free.get()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        finally:
            self.free.put(process)
        if not line:
            raise RuntimeError(f"a worker ended with status {process.wait()}")
        return json.loads(line)

    def submit(self, request):
        return self.pool.submit(self.call, request)

    def close(self):
        if self.folder is None:
            return
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = None


def view(mapped, description):
    offset, dtype, shape = description
    return np.ndarray(tuple(shape), dtype, buffer=mapped, offset=offset)


def serve():
    """Requests: {"input": path, "arrays": {k, v, q, m, at: [offset, dtype, shape]}, "window": W, "output":
    [path, offset, floats of one side], "options": keyword arguments of anchorkv.compress}.
    Replies: {"bytes", "tokens", "seconds"} or {"status", "error"}.
    """
    import anchorkv

    maps = {}

    def mapped(path, mode):
        size = os.path.getsize(path)
        if path not in maps or maps[path].nbytes != size:
            maps[path] = np.memmap(path, np.uint8, mode)
        return maps[path]

    for line in sys.stdin:
        request, began = json.loads(line), time.time()
        try:
            source = mapped(request["input"], "r")
            a = {name: view(source, d) for name, d in request["arrays"].items()}
            options = request["options"]
            if options.get("rope_inv_freq") is not None:
                options["rope_inv_freq"] = np.array(options["rope_inv_freq"])
            q = a["q"][:, -request["window"] :]
            with anchorkv.compress(a["k"], a["v"], q, sampled=a["m"], sampled_positions=a["at"], **options) as segment:
                info = segment.info()
                H, n, dk, dv = (info[x] for x in ("num_kv_heads", "num_tokens", "head_dim_k", "head_dim_v"))
                path, offset, side = request["output"]
                target = mapped(path, "r+")
                segment.decode(
                    view(target, (offset, "<f4", (H, n, dk))), view(target, (offset + 4 * side, "<f4", (H, n, dv)))
                )
            reply = {
                "bytes": info["bytes"]["total"],
                "kinds": info["bytes"],
                "tokens": n,
                "seconds": time.time() - began,
            }
        except Exception as error:  # whatever it is, the parent reports it with the method's name
            reply = {"status": getattr(error, "status", None), "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    serve()
