#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""make demo: one real text, one fact hidden in it, the same question answered four ways, and what each one cost.

The text is the GNU General Public License, version 2 (demo/gpl-2.txt, about 4000 tokens), with one sentence put between two
of its paragraphs. The question comes after the document's cache has been compressed: nothing could prepare for it.

  dense      the whole cache, as llama.cpp keeps it
  akv        every token kept, in RATIO times fewer bytes
  snapkv     the same bytes spent on a subset of the tokens, the others dropped

Greedy decoding, fixed seed: the same machine gives the same answers each time. Compressed documents stay in build/demo and
are used again while the akv command, the text and the settings are the same, as `akv pack` is meant to be used.
"""
import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORK = os.path.join(ROOT, "build", "demo")
AKV = os.path.join(ROOT, "build", "release", "cli", "akv")
DEPS = os.environ.get("AKV_DEPS") or os.path.join(ROOT, ".deps")
MODEL = os.path.join(DEPS, "models", "SmolLM2-135M-Instruct.Q4_1.gguf")
SOURCE = os.path.join(ROOT, "demo", "gpl-2.txt")

RATIO = 10
SEED = 1  # of the random anchors; docs/demo.md says what others give
DEPTH = 0.8
FACT = "The lighthouse keeper of Vardo has a green donkey named Admiral Pepper."
QUESTION = "What animal does the lighthouse keeper of Vardo have?"
WANTED = r"\bdonkey\b"


def make_text(path):
    """The licence with the fact as a paragraph of its own; returns where in the text it stands, 0..1."""
    with open(SOURCE, encoding="utf-8") as stream:
        paragraphs = stream.read().split("\n\n")
    at = int(len(paragraphs) * DEPTH)
    text = "\n\n".join(paragraphs[:at] + [FACT] + paragraphs[at:])
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
    return text.index(FACT) / len(text)


def run(arguments):
    """Run akv; its progress stays visible on standard error."""
    # libllama's threads spin while they wait for each other unless told otherwise. On a machine that does something else
    # too, each then takes a processor from the thread it waits for, and an answer takes twenty times as long (docs/demo.md).
    environment = dict(os.environ)
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    done = subprocess.run([AKV] + arguments, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        sys.exit("demo: akv %s ended with status %d" % (arguments[0], done.returncode))


def load(path):
    with open(path, encoding="utf-8") as stream:
        return json.load(stream)


def sha256(*paths):
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as stream:
            digest.update(stream.read())
    return digest.hexdigest()


# Column of the report: method and codec profile of the command.
WAYS = {"dense": ("dense", None), "default": ("akv", "default"), "paper": ("akv", "paper"), "snapkv": ("snapkv", None)}


def packed(way, text, threads):
    """Compress the document in one way, or take the packed file of an earlier run. Returns (file, pack report, reused)."""
    pack, report, key_file = (os.path.join(WORK, way + suffix) for suffix in (".akv", ".pack.json", ".key"))
    key = "%s %s %g %d" % (sha256(AKV, text), way, RATIO, SEED)
    reused = False
    if all(os.path.exists(path) for path in (pack, report, key_file)):
        with open(key_file, encoding="utf-8") as stream:
            reused = stream.read() == key
    if not reused:
        run(["pack", "-m", MODEL, "-f", text, "--ratio", "%g" % RATIO, "--seed", "%d" % SEED, "--threads", threads, "--json", report, "-o", pack]
            + options(way))
        with open(key_file, "w", encoding="utf-8") as stream:
            stream.write(key)
    return pack, load(report), reused


def options(way):
    method, profile = WAYS[way]
    return ["--method", method] + (["--profile", profile] if profile else [])


def ask(way, arguments, threads):
    report = os.path.join(WORK, way + ".ask.json")
    run(["ask", "-m", MODEL, "-n", "40", "--temp", "0", "--threads", threads, "--json", report] + arguments + [QUESTION])
    return load(report)


def main():
    parser = argparse.ArgumentParser(description="the demonstration behind `make demo`")
    parser.add_argument("--threads", default=str(os.cpu_count() or 1))
    threads = parser.parse_args().threads
    os.makedirs(WORK, exist_ok=True)
    text = os.path.join(WORK, "document.txt")
    place = make_text(text)
    started = time.monotonic()

    print("demo: the GPL with one sentence of ours in it, %.0f %% from its start:\n        %s\n      asked afterwards:\n        %s"
          % (100 * place, FACT, QUESTION), file=sys.stderr)
    columns = []
    for way in WAYS:
        print("\ndemo: %s" % way, file=sys.stderr)
        if way == "dense":
            asked = ask(way, ["-f", text] + options(way), threads)
            made, reused = asked, False
        else:
            pack, made, reused = packed(way, text, threads)
            asked = ask(way, ["--from", pack], threads)
        columns.append((way, made, asked, reused))
    print_report(columns, time.monotonic() - started)
    return 0


def shortest(path):
    return min(path, os.path.relpath(path), key=len)


def print_report(columns, seconds):
    mib = 1024.0 * 1024.0
    rows = [
        ("document, tokens", lambda made, asked: "%d" % made["tokens"]),
        ("its cache, MiB", lambda made, asked: "%.2f" % (made["compressed_bytes"] / mib)),
        ("ratio", lambda made, asked: "%.2fx" % made["ratio"]),
        ("process before, MiB RSS", lambda made, asked: "%.0f" % (made["rss_before"] / mib) if made["rss_before"] else "-"),
        ("process after, MiB RSS", lambda made, asked: "%.0f" % (made["rss_after"] / mib) if made["rss_after"] else "-"),
        ("prefill, s", lambda made, asked: "%.1f" % made["prefill_seconds"]),
        ("compress, s", lambda made, asked: "%.2f" % made["compress_seconds"]),
        ("answer, s", lambda made, asked: "%.1f" % sum(asked["answers"][0][part] for part in ("prompt_seconds", "decode_seconds"))),
        ("fact found", lambda made, asked: "yes" if re.search(WANTED, asked["answers"][0]["text"], re.I) else "no"),
    ]
    print("\n%-24s" % "" + "".join("%12s" % name for name, _, _, _ in columns))
    for label, value in rows:
        print("%-24s" % label + "".join("%12s" % value(made, asked) for _, made, asked, _ in columns))
    print()
    for name, _, asked, _ in columns:
        answer = " ".join(asked["answers"][0]["text"].split())
        print(textwrap.fill(answer, 100, initial_indent="%-10s" % name, subsequent_indent=" " * 10))
    reused = [name for name, _, _, again in columns if again]
    print("\n%.0f s%s" % (seconds, "; %s from the packed file of an earlier run, whose prefill and compression times are shown"
                          % " and ".join(reused) if reused else ""))
    print("ask it something else:  %s ask -m %s --from %s 'QUESTION'"
          % tuple(shortest(path) for path in (AKV, MODEL, os.path.join(WORK, "default.akv"))))


if __name__ == "__main__":
    sys.exit(main())
