# SPDX-License-Identifier: Apache-2.0
"""The command without a model: help, plan, info, verify, wrong options, damaged and unwritable files."""

import argparse
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import Harness  # noqa: E402

SHAPE = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--gqa-group", "4"]


def test_help(t):
    t.run(code=1, err="usage: akv")
    t.run("help", out="commands:")
    t.run("--help", out="commands:")
    t.run("version", out="akv ")
    t.run("--version", out="akv ")
    t.run("nonsense", code=1, err="no command")
    t.run("help", "nonsense", code=1, err="no command")
    os.environ["AKV_CPU"] = "avx3"
    t.run("plan", *SHAPE, "--tokens", "4096", code=1, err="AKV_CPU")
    os.environ["AKV_CPU"] = "generic"
    t.run("plan", *SHAPE, "--tokens", "4096", out="compressed")
    del os.environ["AKV_CPU"]
    for command in ("plan", "info", "verify", "repack"):
        t.run(command, "--help", out="usage: akv " + command)
        t.run("help", command, out="usage: akv " + command)
        t.run(command, "--nonsense", code=1, err="--help")


def check_speed(t):
    """A plan says where attention from the compressed form is slower than dense attention."""

    def speed(*args, cpu=None):
        if cpu is not None:
            os.environ["AKV_CPU"] = cpu
        done = t.run("plan", *SHAPE, *args, "--json", "-")
        os.environ.pop("AKV_CPU", None)
        plan = json.loads(done.out)
        return plan["speed_decode"], plan["speed_question"]

    for one in speed("--tokens", "8192", cpu="generic"):
        t.check(one["verdict"] == "slower" and one["kernels"] == "plain C" and one["times_dense"] < 0.95, f"plan: plain C is {one}")
    for one in speed("--tokens", "8192", "--gaps", cpu="generic"):
        t.check(one["verdict"] == "unmeasured" and "gaps" in one["why"], f"plan: gaps in plain C are {one}")
    best, question = speed("--tokens", "8192")
    if best["kernels"] == "AVX-512 VNNI":
        for one in speed("--tokens", "8192", "--gaps"):
            t.check(one["verdict"] == "slower" and "gaps" in one["why"], f"plan: gaps are {one}")
        t.run("plan", *SHAPE, "--tokens", "8192", "--gaps", out="slower than dense f16")
        t.check(best["verdict"] == "faster" and best["times_dense"] > 1 and best["times_ggml_f16"] > 1, f"plan: one token is {best}")
        t.check(question["verdict"] == "faster" and question["times_dense"] > 1, f"plan: 128 tokens are {question}")
        capped, question = speed("--tokens", "8192", cpu="avx512")  # these kernels ask for VNNI, else they are AVX2's
        t.check(question["verdict"] == "slower" and question["times_dense"] < 1, f"plan: 128 tokens without VNNI are {question}")
        t.check(capped["kernels"] == "AVX2" and capped["times_dense"] < best["times_dense"], f"plan: without VNNI {capped}")
    for args, why in ((("--tokens", "512"), "1024"), (("--tokens", "8192", "--profile", "paper"), "profile")):
        t.check([one["verdict"] for one in speed(*args) if why in one["why"]] == ["unmeasured"] * 2, f"plan {args}: {speed(*args)}")
    t.check([one["verdict"] for one in speed("--tokens", "16")] == ["dense"] * 2, "plan: within the window it is dense attention")


def test_plan(t, folder):
    t.run("plan", *SHAPE, "--tokens", "131072", "--ratio", "20", out="compressed")
    path = os.path.join(folder, "plan.json")
    t.run("plan", *SHAPE, "--tokens", "131072", "--ratio", "20", "--json", path)
    with open(path, encoding="utf-8") as file:
        plan = json.load(file)
    t.check(plan["dense_bytes"] == 32 * 8 * 128 * 2 * 2 * 131072, "plan: dense bytes")
    t.check(plan["compressed_bytes"] <= plan["budget_bytes"], "plan: over budget")
    t.check(plan["budget_bytes"] <= plan["dense_bytes"] / 20, "plan: budget is not a twentieth")
    t.check(plan["ratio"] >= 20, "plan: ratio")
    only = t.run("plan", *SHAPE, "--tokens", "4096", "--keep", "0.1", "--json", "-")
    t.check(json.loads(only.out)["tokens"] == 4096, "plan --json -: not only JSON on standard output")
    budget = t.run("plan", *SHAPE, "--tokens", "4096", "--budget", "64M", "--json", "-")
    t.check(json.loads(budget.out)["compressed_bytes"] <= 64 << 20, "plan --budget: over budget")
    plans = {p: json.loads(t.run("plan", *SHAPE, "--tokens", "8192", "--profile", p, "--json", "-").out) for p in ("default", "paper")}
    unnamed = json.loads(t.run("plan", *SHAPE, "--tokens", "8192", "--json", "-").out)
    t.check(unnamed == plans["default"], "plan: --profile default is not the default")
    for name, plan in plans.items():
        kinds = plan["bytes_per_layer"]
        t.check(plan["profile"] == name, f"plan: profile {plan['profile']} instead of {name}")
        t.check(sum(v for k, v in kinds.items() if k != "total") == kinds["total"], "plan: kinds do not add up")
        t.check(("residuals_k" in plan) == (name == "paper"), f"plan: a number of residuals that nobody can know, or none, in {name}")
        t.check((kinds["model"] > 0) == (name == "default"), f"plan: {kinds['model']} bytes of means, bases and tables in {name}")
    t.run("plan", *SHAPE, "--tokens", "8192", out="profile      default")
    check_speed(t)
    tight = t.run("plan", *SHAPE, "--tokens", "4096", "--ratio", "1000", code=3)
    smallest = json.loads(t.run("plan", *SHAPE, "--tokens", "4096", "--ratio", "4", "--json", "-").out)["min_keep_ratio"]
    t.check(f"{smallest:.3f}"[:5] in tight.err, f"plan: the smallest keep ratio {smallest} is not named: {tight.err}")
    t.run("plan", *SHAPE, "--tokens", "20", "--ratio", "10", out="dense")
    for wrong in (
        ["--ratio", "0.5"], ["--ratio", "nan"], ["--ratio", "inf"], ["--ratio", "x"], ["--ratio", ""], ["--keep", "0"],
        ["--keep", "-1"], ["--keep", "1.5"], ["--budget", "0"], ["--budget", "-3"], ["--budget", "3X"],
        ["--keep", "0.1", "--ratio", "10"], ["--profile", "best"], ["stray"],
    ):
        t.run("plan", *SHAPE, "--tokens", "4096", *wrong, code=1)
    for tokens in ("0", "-5", "1e3", "99999999999999999999"):
        t.run("plan", *SHAPE, "--tokens", tokens, code=1, err="--tokens")
    t.run("plan", *SHAPE, code=1, err="--tokens")
    t.run("plan", "--tokens", "5", code=1, err="-m")
    t.run("plan", "--layers", "2", "--kv-heads", "2", "--head-dim", "63", "--tokens", "4096", code=2, err="even")
    t.run("plan", *SHAPE, "--tokens", "4096", "--json", "/nonexistent/plan.json", code=6, err="/nonexistent/plan.json")


def test_documents(t, folder, make_document):
    good = os.path.join(folder, "good.akv")
    subprocess.run([make_document, good], check=True)
    with open(good, "rb") as file:
        data = file.read()

    def variant(name, content):
        path = os.path.join(folder, name)
        with open(path, "wb") as file:
            file.write(content)
        return path

    t.run("verify", good, out="ok, 400 tokens, 3 segments, profile default")
    paper = os.path.join(folder, "paper.akv")
    subprocess.run([make_document, paper, "paper"], check=True)
    t.run("verify", paper, out="ok, 400 tokens, 3 segments, profile paper")
    t.run("info", paper, out="profile paper")
    for path, name in ((good, "default"), (paper, "paper")):
        report = json.loads(t.run("info", "--json", "-", path).out)
        t.check(report["profile"] == name, f"info --json: profile {report['profile']} instead of {name}")
        t.check([l["profile"] for l in report["layers"]] == [name] * 3, "info --json: profile of the layers")
        t.check((report["bytes"]["model"] > 0) == (name == "default"), "info --json: bytes of means, bases and tables")
    t.run("verify", "-q", good)
    t.run("info", good, out="noise.txt")
    t.run("info", "--layers", "--sections", good, out="xxh3")
    report = json.loads(t.run("info", "--json", "-", good).out)
    t.check(report["tokens"] == 400 and len(report["layers"]) == 3, "info --json: tokens or layers")
    t.check(report["file_bytes"] == len(data), "info --json: file size")
    t.check(sum(v for k, v in report["bytes"].items() if k != "total") == report["bytes"]["total"], "info: kinds do not add up")
    t.check(report["compressed_bytes"] <= report["budget_bytes"], "info: over budget")

    t.run("verify", variant("empty.akv", b""), code=4, err="empty")
    t.run("verify", variant("text.akv", b"This is a text. " * 100), code=4, err="not a compressed document")
    t.run("verify", variant("short.akv", data[:60]), code=4, err="too few")
    t.run("verify", variant("cut.akv", data[:-64]), code=4, err="truncated")
    t.run("verify", variant("long.akv", data + bytes(64)), code=4, err="padded")
    t.run("verify", variant("swapped.akv", data[3::-1] + data[4:]), code=4, err="byte order")
    t.run("verify", variant("major.akv", data[:4] + b"\x07\x00" + data[6:]), code=4, err="format 7.0")
    for at in range(0, len(data), 997):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        t.run("verify", variant("flipped.akv", flipped), code=4)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    t.run("info", variant("flipped.akv", flipped), code=4, err="changed")
    t.run("verify", good, variant("flipped.akv", flipped), good, code=4, err="flipped.akv")
    t.run("verify", folder, code=2, err="directory")
    t.run("verify", os.path.join(folder, "missing.akv"), code=6, err="missing.akv")
    t.run("verify", "/dev/null", code=2, err="regular file")
    t.run("verify", code=1, err="which file")
    t.run("info", code=1, err="one .akv file")
    t.run("info", good, good, code=1)


def test_repack(t, folder, make_document):
    for profile in ("default", "paper"):
        path, small = (os.path.join(folder, f"{n}-{profile}.akv") for n in ("from", "small"))
        subprocess.run([make_document, path] + (["paper"] if profile == "paper" else []), check=True)
        before = json.loads(t.run("info", "--json", "-", path).out)
        tight = t.run("repack", path, "--ratio", "1000", "-o", small, code=3, err="even without residuals")
        t.check(not os.path.exists(small), "repack: an infeasible ratio left a file")
        least = float(tight.err.split("a ratio of ")[1].split(")")[0])
        t.check(least > before["ratio"], f"repack: the least ratio {least} is not beyond {before['ratio']}")
        ratio = (before["ratio"] + least) / 2
        report = json.loads(t.run("repack", path, "--ratio", str(ratio), "-o", small, "--json", "-", err="smaller").out)
        t.run("verify", small, out="ok, 400 tokens, 3 segments, profile " + profile)
        after = json.loads(t.run("info", "--json", "-", small).out)
        t.check(after["ratio"] >= ratio, f"repack: {after['ratio']} instead of {ratio}")
        t.check(after["compressed_bytes"] == report["compressed_bytes"], "repack: the report is not about the file")
        t.check(all(l["bytes"]["total"] <= l["budget_bytes"] for l in after["layers"]), "repack: a layer over its budget")
        t.check(after["file_bytes"] == os.path.getsize(small) == report["file_bytes"], "repack: file size")
        t.check(0 < report["residual_energy_lost_k"] < 1 and 0 < report["residual_energy_lost_v"] < 1, "repack: what was lost")
        t.run("info", small, out="repacked_from")
        t.run("repack", small, "--ratio", "2", "-o", small, "-q")  # fits: a copy, over itself
        t.run("verify", small, out="ok")
        budget = str(after["compressed_bytes"] * 49 // 50)
        t.run("repack", small, "--budget", budget, "-o", small, "-q")
        t.check(json.loads(t.run("info", "--json", "-", small).out)["compressed_bytes"] <= int(budget), "repack --budget: over budget")
    t.run("repack", path, "-o", small, code=1, err="how small")
    t.run("repack", path, "--ratio", "20", code=1, err="-o")
    t.run("repack", "--ratio", "20", "-o", small, code=1, err="one .akv file")
    t.run("repack", path, "--ratio", "20", "--keep", "0.1", "-o", small, code=1)
    t.run("repack", path, "--ratio", "20", "-o", "/nonexistent/x.akv", code=6)
    t.run("repack", os.path.join(folder, "missing.akv"), "--ratio", "20", "-o", small, code=6)
    with open(path, "rb") as file:
        data = bytearray(file.read())
    data[len(data) // 2] ^= 1
    broken = os.path.join(folder, "broken.akv")
    with open(broken, "wb") as file:
        file.write(data)
    t.run("repack", broken, "--ratio", "5", "-o", small, code=4, err="changed")


def test_full_disk(t, folder):
    if not os.path.exists("/dev/full"):
        return
    with open("/dev/full", "wb") as full:
        t.run("plan", *SHAPE, "--tokens", "4096", code=6, err="standard output", stdout=full)
        t.run("info", os.path.join(folder, "good.akv"), code=6, err="standard output", stdout=full)
    t.run("plan", *SHAPE, "--tokens", "4096", "--json", "/dev/full", code=6, err="No space")
    t.check(not [name for name in os.listdir(folder) if name.endswith(".tmp")], "a temporary file was left behind")


def test_bench(t, folder):
    """A small shape: every row is there and says what it claims; wrong options are refused."""
    small = ["bench", "--tokens", "1024", "--head-dim", "64", "--threads", "1", "--rounds", "1"]
    if "not in this build" in t.run("help", "bench").out:
        t.check(t.run(*small, code=8, err="libllama").out == "", "a bench without libllama prints rows")
        return
    path = os.path.join(folder, "bench.json")
    done = t.run(*small, "--json", path, out="ggml q4_0")
    t.check(len(done.out.strip().splitlines()) == 8, "not 2 ratios x 4 peers:\n" + done.out)
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    t.check(report["command"] == "bench" and len(report["rows"]) == 8, "the report has other rows")
    t.check({row["peer"] for row in report["rows"]} == {"ggml f16", "ggml q8_0", "ggml q4_0", "akv dense f16"}, "other peers")
    for row in report["rows"]:
        t.check(row["case"] == "decode" and row["tokens"] == 1024 and row["threads"] == 1 and row["ratio"] in (10, 20), str(row))
        t.check(row["ns_per_token"] > 0 and row["peer_ns_per_token"] > 0, str(row))
        t.check(abs(row["speedup"] - row["peer_ns_per_token"] / row["ns_per_token"]) < 1e-6 * row["speedup"], str(row))
        dense = 1024 * row["kv_heads"] * row["head_dim"] * 2 * 2
        t.check(row["bytes"] <= dense / row["ratio"], f"{row['bytes']} bytes are more than a {row['ratio']}th")
        t.check(row["peer_bytes"] == dense or "q" in row["peer"], str(row))
    report = json.loads(t.run(*small, "--json", "-").out.split("\n", 8)[-1])
    t.check(len(report["rows"]) == 8, "no report on standard output")
    flat = ["bench", "--flat", "--tokens", "8192", "--threads", "1", "--rounds", "1", "--json", "-"]
    rows = json.loads(t.run(*flat).out.split("\n", 4)[-1])["rows"]
    t.check([(row["tokens"], row["ratio"]) for row in rows] == [(2048, 10), (8192, 10), (2048, 20), (8192, 20)], str(rows))
    for row, first in zip(rows, (rows[0], rows[0], rows[2], rows[2])):
        t.check(row["case"] == "flat" and row["peer_ns_per_token"] == first["ns_per_token"] > 0, str(row))
    t.run("bench", "--tokens", "1", code=1, err="--tokens")
    t.run("bench", "--threads", "0", code=1, err="--threads")
    t.run("bench", "--rounds", "1000", code=1, err="--rounds")
    t.run("bench", "extra", code=1, err="one argument too many")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--akv", required=True)
    parser.add_argument("--make-document", required=True)
    args = parser.parse_args()
    t = Harness(args.akv)
    with tempfile.TemporaryDirectory() as folder:
        test_help(t)
        test_plan(t, folder)
        test_documents(t, folder, args.make_document)
        test_repack(t, folder, args.make_document)
        test_full_disk(t, folder)
        test_bench(t, folder)
    return t.end()


if __name__ == "__main__":
    sys.exit(main())
