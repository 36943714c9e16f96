# SPDX-License-Identifier: Apache-2.0
"""The command with a model: ask, pack, ask from a packed document, interruption, and what must be refused."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import Harness  # noqa: E402

FACTS = [
    "The lighthouse of Carrow stands on a cliff above the village.",
    "Its keeper is an old woman named Ida Fenwick, who lights the lamp each evening.",
    "In the winter of 1893 a ship called the Marigold ran aground on the rocks.",
    "The mayor, Tobias Lunt, gave her a silver whistle, which she hung above the door.",
]
# Long enough that everything is compressed, short enough for a slow machine: about 450 tokens.
TEXT = "\n".join(f"{fact} This is line {i} of the chronicle of Carrow." for i, fact in enumerate(FACTS * 4))
QUESTIONS = ["What is the ship called?", "Who is the keeper?"]
KEEP = ["--keep", "0.3", "-t", "1"]


class Files:
    def __init__(self, folder):
        self.folder = folder

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, content):
        with open(self.path(name), "wb") as file:
            file.write(content if isinstance(content, (bytes, bytearray)) else content.encode())
        return self.path(name)

    def read(self, name):
        with open(self.path(name), "rb") as file:
            return file.read()

    def json(self, name):
        return json.loads(self.read(name))


def check_report(t, report, answers):
    keys = ("tokens", "ratio", "dense_bytes", "compressed_bytes", "budget_bytes", "rss_before", "rss_after", "layers", "answers",
            "load_seconds", "prefill_seconds", "compress_seconds", "decode_seconds")
    for key in keys:
        t.check(key in report, f"report: no {key}")
    t.check(report["compressed_bytes"] <= report["budget_bytes"] <= report["dense_bytes"], "report: over budget")
    t.check(report["compressed_bytes"] == sum(l["bytes"]["total"] for l in report["layers"]), "report: layers do not add up")
    for layer in report["layers"]:
        kinds = layer["bytes"]
        t.check(sum(v for k, v in kinds.items() if k != "total") == kinds["total"], "report: kinds do not add up")
        t.check(kinds["total"] <= layer["budget_bytes"], "report: a layer is over its budget")
    t.check([a["question"] for a in report["answers"]] == answers, "report: other questions")
    t.check(report["rss_after"] < report["rss_before"], "report: freeing the dense cache freed nothing")


def test_ask(t, files, model):
    """Returns the answers, which other ways of asking must reproduce."""
    book = files.write("book.txt", TEXT)
    both = t.run("ask", "-m", model, "-f", book, *KEEP, "-n", "12", "--json", files.path("both.json"), *QUESTIONS,
                 err="compressed")
    report = files.json("both.json")
    check_report(t, report, QUESTIONS)
    t.check(report["document_tokens_evaluated"] == report["tokens"], "ask: tokens evaluated")
    texts = [a["text"] for a in report["answers"]]
    t.check(both.out == "".join(text + "\n" for text in texts), "ask: standard output is not just the answers")
    t.check("\033" not in both.err, "ask: control sequences although standard error is no terminal")
    alone = t.run("ask", "-m", model, "-f", "-", *KEEP, "-n", "12", "-q", QUESTIONS[1], stdin=TEXT.encode())
    t.check(alone.out == texts[1] + "\n", f"ask: one question leaked into the next: {alone.out!r} is not {texts[1]!r}")
    t.check(alone.err == "", "ask -q: something on standard error")
    return texts


def test_pack(t, files, model, texts):
    first, second = TEXT[: len(TEXT) // 2 + 7], TEXT[len(TEXT) // 2 + 7 :]
    book = files.path("book.txt")
    t.run("pack", "-m", model, "-f", book, *KEEP, "-o", files.path("book.akv"), "--json", files.path("pack.json"))
    report = files.json("pack.json")
    t.check(report["file_bytes"] == len(files.read("book.akv")), "pack: file size")
    check_report(t, report, [])
    t.run("verify", files.path("book.akv"), out="ok")
    t.run("info", files.path("book.akv"), out="book.txt")
    t.run("ask", "-m", model, "--from", files.path("book.akv"), "-n", "12", "-t", "1", "--json", files.path("from.json"), *QUESTIONS)
    report = files.json("from.json")
    t.check(report["document_tokens_evaluated"] == 0, "ask --from: document tokens were evaluated again")
    t.check(report["prefill_seconds"] == 0, "ask --from: there was a prefill")
    t.check([a["text"] for a in report["answers"]] == texts, "ask --from: other answers than straight from the text")

    # Same input, same bytes: on two threads, and over the old file.
    t.run("pack", "-m", model, "-f", book, "--keep", "0.3", "-t", "2", "-q", "-o", files.path("again.akv"))
    t.check(files.read("again.akv") == files.read("book.akv"), "pack: two threads give other bytes than one")
    t.run("pack", "-m", model, "-f", book, *KEEP, "--seed", "1", "-q", "-o", files.path("again.akv"))
    t.check(files.read("again.akv") != files.read("book.akv"), "pack: --seed has no effect")

    files.write("first.txt", first + "\n")
    files.write("second.txt", second)
    t.run("pack", "-m", model, "-f", files.path("first.txt"), "-f", files.path("second.txt"), *KEEP, "-q", "--raw", "--method", "exact",
          "-o", files.path("two.akv"))
    t.run("info", files.path("two.akv"), out="second.txt")
    t.run("ask", "-m", model, "--from", files.path("two.akv"), "-n", "4", "-t", "1", "-q", "The ship is called")


def test_profiles(t, files, model):
    book = files.path("book.txt")
    t.run("info", files.path("book.akv"), out="profile default")
    t.run("pack", "-m", model, "-f", book, *KEEP, "-q", "--profile", "paper", "-o", files.path("paper.akv"), "--json", files.path("paper.json"))
    report = files.json("paper.json")
    check_report(t, report, [])
    t.check(report["profile"] == "paper" and report["bytes"]["model"] == 0, "pack --profile paper: the report says otherwise")
    t.check(files.read("paper.akv") != files.read("book.akv"), "pack: --profile has no effect")
    t.run("verify", files.path("paper.akv"), out="profile paper")
    t.run("ask", "-m", model, "--from", files.path("paper.akv"), "-n", "4", "-t", "1", "--json", files.path("from.json"), QUESTIONS[0],
          err="profile paper")
    t.check(files.json("from.json")["profile"] == "paper", "ask --from: the profile of the document is not reported")
    t.check(files.json("pack.json")["profile"] == "default" and files.json("pack.json")["bytes"]["model"] > 0,
            "pack: default is not the default profile")


def test_methods(t, files, model):
    book = files.path("book.txt")
    for method in ("snapkv", "exact", "dense"):
        size = [] if method == "dense" else ["--keep", "0.3"]
        t.run("ask", "-m", model, "-f", book, *size, "-t", "1", "--method", method, "-n", "4", "--json", files.path("m.json"), QUESTIONS[0])
        report = files.json("m.json")
        wanted = {"snapkv": report["ratio"] > 3, "exact": 0.99 < report["ratio"] <= 1, "dense": report["ratio"] == 1}
        t.check(report["method"] == method and wanted[method], f"--method {method}: ratio {report['ratio']}")
    budget = ["--budget", "4M", "-t", "1"]
    t.run("ask", "-m", model, "-f", book, *budget, "-n", "1", "-q", "--json", files.path("m.json"), QUESTIONS[0])
    t.check(files.json("m.json")["compressed_bytes"] <= 4 << 20, "--budget: over budget")
    draws = [t.run("ask", "-m", model, "--from", files.path("book.akv"), "-t", "1", "-n", "12", "-q", "--temp", "1.5", "--seed", seed,
                   QUESTIONS[0]).out for seed in ("1", "1", "2")]
    t.check(draws[0] == draws[1], "--temp: the same seed gives another answer")
    t.check(draws[0] != draws[2], "--temp: another seed gives the same answer")
    t.run("plan", "-m", model, "--tokens", "4096", "--ratio", "10", out="30 layers, 3 KV heads x 3")


def test_refusals(t, files, model, make_document):
    book, q = files.path("book.txt"), QUESTIONS[0]

    def ask(*args, **wanted):
        t.run("ask", "-m", model, *args, **wanted)

    ask("-f", files.write("empty.txt", b""), q, code=2, err="empty")
    ask("-f", files.write("blank.txt", b"\xef\xbb\xbf \n\n"), q, code=2, err="empty")
    ask("-f", files.write("latin1.txt", b"line one\nbl\xe4tter"), q, code=2, err="line 2")
    ask("-f", files.write("utf16.txt", "text".encode("utf-16-le")), q, code=2, err="NUL")
    ask("-f", files.folder, q, code=2, err="directory")
    ask("-f", files.path("missing.txt"), q, code=6, err="missing.txt")
    ask("-f", files.write("long.txt", "one two three four\n" * 9000), q, code=2, err="context ends at")
    ask("-f", "-", "-f", "-", q, code=1, err="once", stdin=b"x")
    ask("-f", book, "--ratio", "500", "-t", "1", q, code=3, err="smallest feasible keep ratio")
    ask("-f", book, "--ratio", "500", "-t", "1", "--budget", "1M", q, code=1, err="one of them")
    ask("-f", book, code=1, err="no question")
    ask("-f", book, " ", code=2, err="question 1 is empty")
    ask("-f", book, "-n", "0", q, code=1, err="-n")
    ask("-f", book, "--method", "magic", q, code=1, err="magic")
    ask("-f", book, "--json", "-", q, code=1, err="standard output")
    ask("-f", book, "--json", "/nonexistent/a.json", q, code=6, err="/nonexistent/a.json")
    ask("-f", book, "--from", files.path("book.akv"), q, code=1, err="--from")
    ask("--from", files.path("missing.akv"), q, code=6, err="missing.akv")
    ask("--from", book, q, code=4, err="not a compressed document")
    t.run("ask", "-f", book, q, code=1, err="-m")
    t.run("ask", "-m", files.path("missing.gguf"), "-f", book, q, code=6, err="missing.gguf")
    t.run("ask", "-m", book, "-f", book, q, code=6, err="book.txt")
    t.run("pack", "-m", model, "-f", book, code=1, err="-o")
    t.run("pack", "-m", model, "-f", book, "--method", "dense", "-o", files.path("x.akv"), code=1, err="dense")
    t.run("pack", "-m", model, "-f", book, "-o", "/nonexistent/x.akv", code=6, err="/nonexistent/x.akv")
    t.run("pack", "-m", model, "-f", book, "-o", files.folder, code=6, err="directory")

    data = bytearray(files.read("book.akv"))
    data[len(data) // 2] ^= 4
    ask("--from", files.write("flipped.akv", data), q, code=4, err="changed")
    subprocess.run([make_document, files.path("noise.akv")], check=True)
    ask("--from", files.path("noise.akv"), q, code=5, err="noise.akv")
    if os.path.exists("/dev/full"):
        t.run("pack", "-m", model, "-f", book, *KEEP, "-o", "/dev/full", code=6, err="No space")
        with open("/dev/full", "wb") as full:
            t.run("ask", "-m", model, "--from", files.path("book.akv"), "-t", "1", "-n", "4", q, code=6, err="standard output", stdout=full)


def test_bench(t, files, model, make_document):
    """Tokens per second of a model: a row for each of libllama's caches, one of which is the best; wrong options are refused."""
    small = ["bench", "-m", model, "--threads", "1", "--rounds", "1"]
    t.run(*small, "--from", files.path("book.akv"), "--json", files.path("bench.json"), out="tokens/s")
    rows, tokens = files.json("bench.json")["rows"], files.json("pack.json")["tokens"]
    t.check({row["peer"] for row in rows} == {"llama f16 flash", "llama f16", "llama q8_0 flash", "llama q4_0 flash"}, "bench: other peers")
    for row in rows:
        t.check(row["case"] == "model" and row["tokens"] == tokens and row["threads"] == 1, f"bench: {row}")
        t.check(abs(row["ratio"] - files.json("pack.json")["ratio"]) < 1e-3, f"bench: {row}")
        t.check(abs(row["tokens_per_second"] * row["ns_per_token"] / 1e9 - 1) < 1e-6, f"bench: {row}")
        t.check(abs(row["speedup"] - row["peer_ns_per_token"] / row["ns_per_token"]) < 1e-6 * row["speedup"], f"bench: {row}")
        t.check(row["best_peer"] == (row["peer_ns_per_token"] == min(other["peer_ns_per_token"] for other in rows)), f"bench: {row}")
    sizes = {row["peer"]: row["peer_bytes"] for row in rows}
    t.check(sizes["llama f16 flash"] > 1.8 * sizes["llama q8_0 flash"] > 3.2 * sizes["llama q4_0 flash"], f"bench: {sizes}")
    t.check(sizes["llama f16"] >= files.json("pack.json")["dense_bytes"], f"bench: the dense cache has not every token: {sizes}")
    subprocess.run([make_document, files.path("noise.akv")], check=True)
    t.run(*small, "--from", files.path("noise.akv"), code=5, err="noise.akv")
    t.run(*small, code=1, err="--from")
    t.run("bench", "--from", files.path("book.akv"), code=1, err="--model")
    t.run(*small, "--from", files.path("book.akv"), "--tokens", "4096", code=1, err="documents")
    t.run("bench", "-m", files.path("missing.gguf"), "--from", files.path("book.akv"), code=6, err="missing.gguf")


def test_interruption(t, files, model):
    """Ctrl-C in the middle of the prefill: soon over, and the file of before is still there."""
    long = files.write("chronicle.txt", (TEXT + "\n") * 12)
    old = files.write("old.akv", b"what was here before")
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = subprocess.Popen([t.akv, "pack", "-m", model, "-f", long, *KEEP, "-o", old], stderr=subprocess.PIPE)
        time.sleep(1.5)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        t.check(process.returncode == code, f"signal {number}: exit code {process.returncode} instead of {code}: {err!r}")
        t.check(b"error" not in err and b"failed" not in err, f"signal {number}: an interruption is no error: {err!r}")
        t.check(b"interrupted" in err, f"signal {number}: it does not say that it was interrupted: {err!r}")
    t.check(files.read("old.akv") == b"what was here before", "an interrupted pack changed the old file")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--akv", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--make-document", required=True)
    args = parser.parse_args()
    t = Harness(args.akv)
    with tempfile.TemporaryDirectory() as folder:
        files = Files(folder)
        texts = test_ask(t, files, args.model)
        test_pack(t, files, args.model, texts)
        test_profiles(t, files, args.model)
        test_methods(t, files, args.model)
        test_refusals(t, files, args.model, args.make_document)
        test_bench(t, files, args.model, args.make_document)
        test_interruption(t, files, args.model)
        t.check(not [name for name in os.listdir(folder) if name.endswith(".tmp")], "a temporary file was left behind")
    return t.end()


if __name__ == "__main__":
    sys.exit(main())
