# SPDX-License-Identifier: Apache-2.0
"""akv eval: the rows, the controls and the peers on a small model; the JSON and the page; bad input; interruption."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.dom.minidom

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import Harness  # noqa: E402

WAYS = [("dense", None), ("exact", None), ("akv", 4), ("snapkv", 4), ("rotated2", None), ("rotated4", None), ("q4_0", None)]
NUMBERS = ("ratio", "bytes", "dense_bytes", "ppl", "dense_ppl", "ppl_rise", "ppl_rise_error", "kld", "kld_error", "top1", "top1_error",
           "retrieval", "retrieval_error", "dense_retrieval", "samples", "compress_seconds")
# Of one short run (600 tokens; 2 pieces x 64 tokens): the engine's noise with 4-bit weights is 0.003 to 0.005 nats a token.
NOISE = 0.02


def load(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def check_schema(t, report):
    t.check(report["command"] == "eval" and report["complete"] is True, "json: command, complete")
    t.check(report["ctx"] == 600 and report["pieces"] == 2 and report["samples"] == 1, "json: settings")
    wanted = [(protocol, *way) for protocol in ("agnostic", "aware") for way in WAYS]
    t.check([(r["protocol"], r["method"], r["ratio_asked"]) for r in report["rows"]] == wanted, "json: other rows than asked for")
    for r in report["rows"]:
        name = f"{r['method']} {r['profile']} {r['protocol']}"
        for key in NUMBERS:
            t.check(isinstance(r[key], (int, float)), f"json: {name}: {key} is {r[key]!r}")
        t.check(r["samples"] == 1 and r["num_pieces"] == 2 and r["num_questions"] == 1, f"json: {name}: samples")
        t.check(len(r["pieces"]) == 2 and len(r["retrieval_by_depth"]) == 4, f"json: {name}: pieces, depths")
        t.check(set(r["retrieval_by_task"]) == {"number"}, f"json: {name}: tasks {r['retrieval_by_task']}")
        t.check(r["reason"] is None, f"json: {name}: left out: {r['reason']}")
        t.check(0 <= r["top1"] <= 1 and 0 <= r["retrieval"] <= 1 and r["ppl"] > 1, f"json: {name}: impossible figures")
        t.check((r["profile"] is not None) == (r["method"] == "akv"), f"json: {name}: profile")
        t.check(abs(r["ratio"] - r["dense_bytes"] / r["bytes"]) < 1e-9, f"json: {name}: ratio is not bytes over bytes")
        mean = sum(p["kld"] for p in r["pieces"]) / 2
        t.check(abs(r["kld"] - mean) < 1e-12, f"json: {name}: KLD is not the mean of the pieces")


def check_figures(t, report):
    rows = {(r["method"], r["profile"], r["protocol"]): r for r in report["rows"]}

    def get(method, profile=None, protocol="agnostic"):
        return rows[method, profile, protocol]

    dense, exact = get("dense"), get("exact")
    t.check(dense["kld"] < NOISE and dense["ratio"] == 1, f"dense: {dense['kld']} from itself")
    # The control: the library's path with everything kept stays at the engine's noise.
    t.check(abs(exact["kld"]) < NOISE and exact["top1"] > 0.85, f"exact: KLD {exact['kld']}, top-1 {exact['top1']}")
    t.check(0.99 < exact["ratio"] <= 1, f"exact: ratio {exact['ratio']}")
    t.check(exact["retrieval"] == dense["retrieval"] > 0, f"exact finds {exact['retrieval']}, dense {dense['retrieval']}")
    for method, profile in (("akv", "default"), ("snapkv", None)):
        r = get(method, profile)
        t.check(r["bytes"] <= r["dense_bytes"] / 4 and r["ratio"] >= 4, f"{method} {profile}: more bytes than asked for")
        t.check(r["kld"] > exact["kld"], f"{method} {profile}: no worse than everything kept: it was not compressed")
    # Peers that are known to be in this order; a peer that is broken, or measured on something else, is not.
    t.check(get("rotated2")["kld"] > 2 * get("rotated4")["kld"], "rotated: 2 bits are not clearly worse than 4")
    t.check(get("rotated4")["kld"] < 5 * NOISE, f"rotated4: KLD {get('rotated4')['kld']}")
    t.check(get("q4_0")["kld"] > exact["kld"] and get("q4_0")["kld"] < 10 * NOISE, f"q4_0: KLD {get('q4_0')['kld']}")
    t.check(get("snapkv")["kld"] > get("akv", "default")["kld"], "eviction is no worse than the default profile at equal bytes")
    # 600 tokens, 472 of them coded: 64 coordinates in b bits and a 16-bit scale; libllama: blocks of 32 with a 16-bit scale
    for bits in (2, 4):
        wanted = 600 * 128 / (472 * (8 * bits + 2) + 128 * 128)
        t.check(abs(get(f"rotated{bits}")["ratio"] / wanted - 1) < 0.001, f"rotated{bits}: ratio {get(f'rotated{bits}')['ratio']}")
    t.check(abs(get("q4_0")["ratio"] - 64 / 18) < 0.001, f"q4_0: ratio {get('q4_0')['ratio']}")
    for way in rows:  # a continuation has no question: one measurement for both protocols
        t.check(rows[way]["kld"] == get(way[0], way[1])["kld"], f"{way}: the protocols disagree on the continuation")


def check_page(t, text):
    t.check(text.startswith("<!doctype html>"), "html: no document type")
    for never in ("http:", "https:", "<script", "@import", "url(", "src=", "href="):
        t.check(never not in text, f"html: {never} in a page that shall be self-contained")
    t.check("prefers-color-scheme:dark" in text, "html: no dark mode")
    plots = re.findall(r"<svg viewBox.*?</svg>", text, re.S)
    t.check(len(plots) == 4, f"html: {len(plots)} plots")
    for plot in plots:
        xml.dom.minidom.parseString(plot)
        t.check("nan" not in plot and "inf" not in plot, "html: a coordinate is no number")
    for way, _ in WAYS:
        t.check(f"<td>{way}" in text, f"html: no row {way}")
    t.check("a&lt;b" in text and "a<b" not in text, "html: a file name is not escaped")


def test_run(t, folder, model, book):
    hostile = os.path.join(folder, "a<b.txt")
    os.symlink(os.path.abspath(book), hostile)
    out, page = os.path.join(folder, "eval.json"), os.path.join(folder, "eval.html")
    done = t.run("eval", "-m", model, "-f", hostile, "--ctx", "600", "--continuation", "64", "--pieces", "2", "--samples", "1",
                 "--needles", "number", "--agnostic", "--aware", "--ratio", "4", "--method", "akv,snapkv,rotated2,rotated4,q4_0",
                 "-t", "2", "--json", out, "--html", page, err="text 2/2  q4_0")
    report = load(out)
    check_schema(t, report)
    check_figures(t, report)
    with open(page, encoding="utf-8") as file:
        check_page(t, file.read())
    lines = done.out.splitlines()
    t.check(sum(line.startswith("akv default") for line in lines) == 2, "table: not one line for each protocol")
    t.check("question-agnostic" in done.out and "question-aware" in done.out, "table: no headings")
    t.check("\033" not in done.err + done.out, "control sequences although there is no terminal")


def test_lists(t, folder, model, book):
    """Equal bytes; another seed, other samples; -q is silent; --json - prints nothing else."""
    common = ["-m", model, "-f", book, "--ctx", "300", "--continuation", "8", "--pieces", "1", "--samples", "0", "-t", "2", "-q",
              "--json", "-"]
    done = t.run("eval", *common, "--method", "rotated3", "--equal-bytes")
    t.check(done.err == "", f"eval -q: on standard error: {done.err!r}")
    rows = {r["method"]: r for r in json.loads(done.out)["rows"]}
    t.check(set(rows) == {"dense", "exact", "rotated3", "akv"}, f"--equal-bytes: rows {list(rows)}")
    t.check(abs(rows["akv"]["ratio_asked"] / rows["rotated3"]["ratio"] - 1) < 1e-6 and rows["akv"]["bytes"] <= rows["rotated3"]["bytes"],
            f"--equal-bytes: {rows['akv']['ratio_asked']} asked, {rows['rotated3']['ratio']} wanted")
    t.check(rows["dense"]["retrieval"] is None and rows["dense"]["kld"] is not None, "--samples 0: something was found")
    other = json.loads(t.run("eval", *common, "--method", "snapkv", "--ratio", "4", "--seed", "1").out)
    t.check(other["rows"][0]["dense_ppl"] != rows["dense"]["dense_ppl"], "--seed has no effect on the pieces")
    # A ratio that cannot be reached leaves that row out; when nothing else was asked for, the run has failed.
    done = t.run("eval", *common, "--method", "snapkv", "--ratio", "4,100")
    rows = json.loads(done.out)["rows"]
    t.check([r["reason"] is None for r in rows] == [True, True, True, False], "an impossible ratio: not only its own row is out")
    t.check("fewer than the window" in rows[3]["reason"] and rows[3]["kld"] is None, f"an impossible ratio: {rows[3]['reason']}")
    t.check("left out" in done.err, "an impossible ratio: no warning")
    t.run("eval", *common, "--method", "snapkv", "--ratio", "100", code=3, err="left out")


def test_refusals(t, folder, model, book):
    def refused(*args, **wanted):
        t.run("eval", *args, **wanted)

    def both(*args, **wanted):
        refused("-m", model, "-f", book, *args, **wanted)

    refused("--help", out="usage: akv eval")
    refused("-f", book, code=1, err="-m")
    refused("-m", model, code=1, err="which text")
    refused("-m", os.path.join(folder, "missing.gguf"), "-f", book, code=6, err="missing.gguf")
    refused("-m", model, "-f", os.path.join(folder, "missing.txt"), code=6, err="missing.txt")
    for ratios in ("0.5", "10,", "", "10,x", "nan", "-3", "10;20"):
        both("--ratio", ratios, code=1, err="--ratio")
    both("--profile", "default,best", code=1, err="best")
    both("--method", "akv,magic", code=1, err="magic")
    both("--needles", "words", code=1, err="multi_query")
    both("--ctx", "10", code=1, err="--ctx")
    both("--pieces", "0", "--needles", "none", code=1, err="nothing is left")
    both("--budget", "3M", code=1)
    both("stray", code=1, err="stray")
    both("--json", "-", "--html", "-", code=1, err="both")
    both("--json", "/nonexistent/a.json", code=6, err="/nonexistent/a.json")
    both("--html", "/nonexistent/a.html", code=6, err="/nonexistent/a.html")
    both("--ctx", "9000", code=2, err="this model's context of 8192")
    both("--ctx", "7000", code=2, err="give a longer text or a smaller --ctx")
    both("--ctx", "1000", "--pieces", "50", code=2, err="--pieces asks for 50")
    short = os.path.join(folder, "short.txt")
    with open(short, "w", encoding="utf-8") as file:
        file.write("Too short. ")
    refused("-m", model, "-f", short, code=2, err="the text has 4 tokens")
    both("--ctx", "128", "--pieces", "0", "--samples", "1", "--method", "akv", code=2, err="fewer --needles")


def test_interruption(t, folder, model, book):
    """Ctrl-C after the first figure: what was measured is shown and written."""
    out = os.path.join(folder, "part.json")
    process = subprocess.Popen([t.akv, "eval", "-m", model, "-f", book, "--ctx", "512", "--continuation", "32", "--pieces", "4", "--json", out,
                                "-t", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stderr:
        if b"text 1/4  akv default" in line:
            break
    process.send_signal(signal.SIGINT)
    text, err = process.communicate(timeout=300)
    t.check(process.returncode == 130, f"interrupted: exit code {process.returncode}: {err!r}")
    t.check(b"INCOMPLETE" in text and b"akv default" in text, f"interrupted: no table of what there is: {text!r}")
    t.check(b"error" not in err, f"interrupted: an interruption is no error: {err!r}")
    report = load(out)
    counts = [r["num_pieces"] for r in report["rows"]]
    t.check(report["complete"] is False and counts[:3] == [1, 1, 1] and counts[-1] == 0, f"interrupted: {counts}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--akv", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    args = parser.parse_args()
    t = Harness(args.akv)
    with tempfile.TemporaryDirectory() as folder:
        for test in (test_run, test_lists, test_refusals, test_interruption):
            test(t, folder, args.model, args.text)
        t.check(not [name for name in os.listdir(folder) if name.endswith(".tmp")], "a temporary file was left behind")
    return t.end()


if __name__ == "__main__":
    sys.exit(main())
