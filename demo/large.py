# SPDX-License-Identifier: Apache-2.0
"""make demo-large: the main job with a model one would use. A long document is read once, packed, and asked several questions.

The document is this project's own documentation, headers and sources, cut to about TOKENS tokens, with three facts of ours in
it. Nothing could prepare for the questions: they come after the cache was compressed. Every answer names the tokens of the
document that were read again (none) and how long it took. --dense asks the same questions to the whole cache too, for which
the document has to be read once more.

Packed documents stay in build/demo-large and are used again while the akv command, the text and the settings are the same.
"""
import argparse
import glob
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORK = os.path.join(ROOT, "build", "demo-large")
AKV = os.path.join(ROOT, "build", "release", "cli", "akv")
DEPS = os.environ.get("AKV_DEPS") or os.path.join(ROOT, ".deps")
MODEL = os.path.join(DEPS, "models", "qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b-instruct-q4.gguf")

# In this order until the document is long enough: prose first, then headers, then sources.
SOURCES = ["README.md", "docs/method.md", "docs/terms.md", "include/anchorkv/anchorkv.h", "docs/format.md", "docs/numerics.md",
           "docs/hosting-llama-cpp.md", "hosts/llama_cpp/akv_llama.h"]
BYTES_PER_TOKEN = 3.75  # of this text with this model, about; what it really was is printed

# (depth, sentence, question, what a right answer contains)
FACTS = [
    (0.15, "The lighthouse keeper of Vardo has a green donkey named Admiral Pepper.",
     "What animal does the lighthouse keeper of Vardo have, and what is its name?", r"donkey.*Admiral Pepper|Admiral Pepper.*donkey"),
    (0.50, "The access number of the copper lantern is 4817263.", "What is the access number of the copper lantern?", r"4817263"),
    (0.85, "The release rehearsal takes place in the town of Skellig Bay on the ninth of March.",
     "In which town does the release rehearsal take place?", r"Skellig Bay"),
]
QUESTION = "Which function says the exact bytes of a segment before it is made?"  # in the document, not of our making
WANTED = r"akv_plan\b"


def make_text(path, tokens):
    """About `tokens` tokens with the facts at their depths, each between two paragraphs."""
    text, limit = "", int(tokens * BYTES_PER_TOKEN)
    names = SOURCES + sorted(os.path.relpath(name, ROOT) for name in glob.glob(os.path.join(ROOT, "src", "*", "*.c")))
    for name in names:
        if len(text) < limit:
            with open(os.path.join(ROOT, name), encoding="utf-8") as stream:
                text += "\n\n== File %s ==\n\n%s" % (name, stream.read())
    paragraphs = text[:limit].rpartition("\n\n")[0].split("\n\n")
    for depth, sentence, _, _ in reversed(FACTS):
        paragraphs.insert(int(len(paragraphs) * depth), sentence)
    with open(path, "w", encoding="utf-8") as stream:
        stream.write("\n\n".join(paragraphs))


def run(arguments):
    """Run akv; its progress stays visible on standard error."""
    environment = dict(os.environ)
    environment.setdefault("OMP_WAIT_POLICY", "passive")  # docs/demo.md, "Time"
    done = subprocess.run([AKV] + arguments, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        sys.exit("demo-large: akv %s ended with status %d" % (arguments[0], done.returncode))


def load(path):
    with open(path, encoding="utf-8") as stream:
        return json.load(stream)


def packed(text, ratio, threads):
    """The compressed document, made now or by an earlier run; (file, report, reused)."""
    digest = hashlib.sha256()
    for path in (AKV, text):
        with open(path, "rb") as stream:
            digest.update(stream.read())
    name = os.path.join(WORK, "document-%gx-%s" % (ratio, digest.hexdigest()[:16]))
    reused = os.path.exists(name + ".akv") and os.path.exists(name + ".json")
    if not reused:
        run(["pack", "-m", MODEL, "-f", text, "--ratio", "%g" % ratio, "--threads", threads, "--json", name + ".json", "-o", name + ".akv"])
    return name + ".akv", load(name + ".json"), reused


def ask(source, name, threads):
    report = os.path.join(WORK, name + ".json")
    questions = [question for _, _, question, _ in FACTS] + [QUESTION]
    run(["ask", "-m", MODEL, "-n", "48", "--threads", threads, "--json", report] + source + questions)
    return load(report)


def main():
    parser = argparse.ArgumentParser(description="the demonstration behind `make demo-large`")
    parser.add_argument("--tokens", type=int, default=8000, help="length of the document, about (8000; at most 30000)")
    parser.add_argument("--ratio", type=float, default=10, help="how many times smaller (10)")
    parser.add_argument("--threads", default=str(os.cpu_count() or 1))
    parser.add_argument("--dense", action="store_true", help="ask the whole cache too: reads the document once more")
    arguments = parser.parse_args()
    if not 1000 <= arguments.tokens <= 30000 or arguments.ratio < 1:
        parser.error("--tokens from 1000 to 30000 (the model's context is 32768), --ratio at least 1")
    if not os.path.exists(MODEL):
        parser.error("%s is missing; `make demo-large` brings it" % MODEL)
    os.makedirs(WORK, exist_ok=True)
    text = os.path.join(WORK, "document.txt")
    make_text(text, arguments.tokens)
    started = time.monotonic()
    pack, made, reused = packed(text, arguments.ratio, arguments.threads)
    ready = time.monotonic()
    answers = {"%gx" % arguments.ratio: ask(["--from", pack], "compressed", arguments.threads)}
    asked = time.monotonic()
    if arguments.dense:
        answers["dense"] = ask(["-f", text, "--method", "dense"], "dense", arguments.threads)
    print_report(made, reused, answers, pack, ready - started, asked - ready)
    return 0


def print_report(made, reused, answers, pack, pack_seconds, ask_seconds):
    mib = 1024.0 * 1024.0
    print("\ndocument   %d tokens, read %s" % (made["tokens"], "by an earlier run" if reused else "in %.0f s, compressed in %.1f s"
                                               % (made["prefill_seconds"], made["compress_seconds"])))
    print("its cache  %.1f MiB in 16 bits, %.1f MiB compressed, %.2fx smaller; %.1f MiB as a file"
          % (made["dense_bytes"] / mib, made["compressed_bytes"] / mib, made["ratio"], made["file_bytes"] / mib))
    print("process    %.0f MiB resident before the dense cache was freed, %.0f MiB after (weights included)"
          % (made["rss_before"] / mib, made["rss_after"] / mib))
    first = next(iter(answers.values()))
    print("asking     %d questions in %.0f s, model loaded anew; %d tokens of the document were read again; %.0f MiB resident at the end"
          % (len(first["answers"]), ask_seconds, first["document_tokens_evaluated"], first["rss_end"] / mib))
    wanted = [pattern for _, _, _, pattern in FACTS] + [WANTED]
    for i, pattern in enumerate(wanted):
        print("\n%s" % first["answers"][i]["question"])
        for name, report in answers.items():
            answer = " ".join(report["answers"][i]["text"].split())
            mark = "right" if re.search(pattern, answer, re.I | re.S) else "wrong"
            print(textwrap.fill(answer, 100, initial_indent="  %-6s %s  " % (name, mark), subsequent_indent=" " * 16))
    if not reused:
        print("\n%.0f s to pack; a second run asks the packed file" % pack_seconds)
    print("ask it something else:  %s ask -m %s --from %s 'QUESTION'"
          % tuple(min(path, os.path.relpath(path), key=len) for path in (AKV, MODEL, pack)))


if __name__ == "__main__":
    sys.exit(main())
