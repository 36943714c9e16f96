#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`akv serve` under wrk: good and bad requests mixed, beside clients that say nothing or leave in the middle.

Afterwards the server must be alive, must not have grown, must end by SIGTERM with 0, and must have said nothing on standard error -
with a program built with AddressSanitizer that includes its reports:

    cmake --preset asan -DAKV_LLAMA=ON && cmake --build build/asan --target akv
    python3 bench/serve/load.py --akv build/asan/cli/akv --model model.gguf --text demo/gpl-2.txt --seconds 300 --growth 25

wrk is a Debian package. The first quarter does not count for growth: buffers, threads' stacks and ASan's quarantine fill up. ASan keeps
a record of every thread that ever was, and a connection is a thread: judge growth by a release build, with --growth 25 for ASan.
"""

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request


def ask(port, path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=None if body is None else json.dumps(body).encode(),
                                     headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def resident(pid):
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def rude(port, until):
    """Half requests, bytes that are no HTTP, clients that go away while their answer is made."""
    parts = [b"", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
             b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 46\r\n\r\n{"prompt":"Once","max_tokens":99,"stream":true}']
    rng, kept = random.Random(1), []
    while time.monotonic() < until:
        try:
            c = socket.create_connection(("127.0.0.1", port), timeout=10)
            c.sendall(rng.choice(parts))
            kept.append(c)
        except OSError:
            pass
        while len(kept) > 100:
            kept.pop(rng.randrange(len(kept))).close()
        time.sleep(0.05)
    for c in kept:
        c.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--akv", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--connections", type=int, default=12)
    parser.add_argument("--growth", type=float, default=5.0, help="percent that the resident memory may grow after the first quarter")
    args = parser.parse_args()
    env = dict(os.environ, ASAN_OPTIONS="quarantine_size_mb=8:detect_leaks=1:exitcode=99", UBSAN_OPTIONS="print_stacktrace=1:exitcode=99")
    server = subprocess.Popen([args.akv, "serve", "-m", args.model, "--port", "0", "--slots", "2", "--queue", "4", "--max-body", "200K", "-q", "-t", "1"],
                              stderr=subprocess.PIPE, text=True, env=env)
    lines = [server.stderr.readline()]
    port = int(re.search(r":(\d+)$", lines[0].strip()).group(1))
    threading.Thread(target=lambda: lines.extend(server.stderr), daemon=True).start()
    with open(args.text, encoding="utf-8") as file:
        document = json.loads(ask(port, "/v1/documents", {"text": file.read()[:2600], "ratio": 4}))["id"]
    while json.loads(ask(port, "/v1/documents/" + document))["status"] not in ("ready", "failed"):
        time.sleep(1)
    threading.Thread(target=rude, args=(port, time.monotonic() + args.seconds), daemon=True).start()
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "load.lua")
    load = subprocess.Popen(["wrk", "-t", "1", "-c", str(args.connections), "-d", f"{args.seconds}s", "--timeout", "60s", "-s", script,
                             f"http://127.0.0.1:{port}"], env=dict(os.environ, AKV_DOCUMENT=document), stdout=subprocess.PIPE, text=True)
    begun, sizes = time.monotonic(), []
    while load.poll() is None and server.poll() is None:
        sizes.append((time.monotonic() - begun, resident(server.pid)))
        print(f"{sizes[-1][0]:5.0f} s  {sizes[-1][1] / 1e6:7.1f} MB", flush=True)
        time.sleep(min(10, args.seconds / 20))
    faults = []
    if server.poll() is None:
        print(load.stdout.read())
        time.sleep(2)
        metrics = ask(port, "/metrics")
        print("\n".join(line for line in metrics.split("\n") if re.match("akv_(http_answers|answers|generated_tokens_total|slots_busy|queue_length)", line)))
        if json.loads(ask(port, "/health")) != {"status": "ok"}:
            faults.append("not healthy afterwards")
        server.terminate()
    try:
        server.wait(timeout=120)
    except subprocess.TimeoutExpired:
        faults.append("did not end")
        server.kill()
    if server.returncode != 0:
        faults.append(f"ended with {server.returncode}")
    said = [line for line in lines[1:] if line.strip()]
    if said:
        faults.append("it said: " + "".join(said[:60]))
    settled = [size for at, size in sizes if args.seconds / 4 <= at < args.seconds / 2]
    end = [size for at, size in sizes if at >= args.seconds * 3 / 4]
    if settled and end:
        growth = 100 * (max(end) / max(settled) - 1)
        print(f"largest in the second quarter {max(settled) / 1e6:.1f} MB, in the last {max(end) / 1e6:.1f} MB: {growth:+.1f} %")
        if growth > args.growth:
            faults.append(f"it grew by {growth:.1f} %")
    print("\n".join(faults) if faults else "nothing found")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
