# SPDX-License-Identifier: Apache-2.0
"""akv calibrate: the file it writes, what --shares does with it in ask, pack and eval, and files that are refused."""

import argparse
import json
import os
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import Harness  # noqa: E402


def load(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def store(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)
    return path


def test_file(t, folder, model, book):
    path = os.path.join(folder, "model.shares")
    done = t.run("calibrate", "-m", model, "-f", book, "--ctx", "600", "--continuation", "32", "--pieces", "1", "-t", "2", "-o", path,
                 err="600 tokens cannot be made")
    f = load(path)
    t.check(f["format"] == "anchorkv-layer-errors" and f["version"] == 1 and f["profile"] == "default", "file: head")
    ratios, errors = f["ratios"], f["errors"]
    t.check(ratios == sorted(ratios) and len(ratios) >= 3 and len(errors) == len(ratios), f"file: ratios {ratios}")
    t.check(all(len(row) == f["model"]["num_layers"] == 30 for row in errors), "file: not a number for every layer")
    t.check(all(0 < e < 1 for row in errors for e in row), "file: an error outside 0..1")
    sums = [sum(row) for row in errors]
    t.check(sums == sorted(sums) and sums[-1] > 3 * sums[0], f"file: errors do not rise with the ratio: {sums}")
    t.check(sum(line.split()[:1] == [str(i)] for i, line in enumerate(done.out.splitlines()[1:])) == 30, "not a line for every layer")
    return path


def test_use(t, folder, model, book, shares):
    def ask(*more):
        out = os.path.join(folder, "ask.json")
        done = t.run("ask", "-m", model, "-f", short, "--ratio", "6", "-n", "2", "-t", "2", "--json", out, *more, "What is this?")
        return load(out), done.err

    short = os.path.join(folder, "short.txt")
    with open(book, encoding="utf-8") as source, open(short, "w", encoding="utf-8") as target:
        target.write(source.read()[:3500])
    equal, _ = ask()
    split, err = ask("--shares", shares)
    t.check("shares" not in equal and len({l["budget_bytes"] for l in equal["layers"]}) == 1, "equal shares are not equal")
    budgets = [l["budget_bytes"] for l in split["layers"]]
    t.check(split["shares"] == shares and 0 < split["share_strength"] <= 1, f"report: {split.get('share_strength')}")
    t.check(max(budgets) > 1.5 * min(budgets), f"budgets hardly differ: {min(budgets)}..{max(budgets)}")
    t.check(sum(budgets) <= sum(l["budget_bytes"] for l in equal["layers"]) + len(budgets), "the sum of the budgets has grown")
    t.check(split["ratio"] >= 6, f"ratio {split['ratio']}: more bytes than asked for")
    t.check("shares       " + shares in err, "the split is not printed")
    _, err = ask("--shares", shares, "--profile", "paper")
    t.check("is for profile default: not used" in err, "another profile: nothing said")
    packed = os.path.join(folder, "doc.akv")
    t.run("pack", "-m", model, "-f", short, "--ratio", "6", "-t", "2", "-q", "--shares", shares, "-o", packed)
    t.run("info", packed, out="shares")
    out = os.path.join(folder, "eval.json")
    rows = []
    for more in ([], ["--shares", shares]):
        t.run("eval", "-m", model, "-f", book, "--ctx", "600", "--continuation", "64", "--pieces", "1", "--samples", "0", "-t", "2", "-q",
              "--method", "akv", "--ratio", "6", "--json", out, *more)
        report = load(out)
        t.check(report["shares"] == (shares if more else None), f"eval: shares {report['shares']}")
        rows.append(report["rows"][-1])
    t.check(rows[0]["kld"] != rows[1]["kld"] and rows[1]["ratio"] >= 6, "eval: the split has no effect, or costs bytes")


def test_chat(t, folder, model, book, shares):
    """A conversation whose old part has to be compressed, and to less than pieces could use: the layers' bytes differ, the budget holds."""
    with open(book, encoding="utf-8") as source:
        said = "Read this: " + source.read()[:6000].replace("\n", " ") + "\nWhat is it about?\n"
    session, out, budget = os.path.join(folder, "talk.akv"), os.path.join(folder, "talk.json"), 12 << 20
    t.run("chat", "-m", model, "-n", "4", "-t", "2", "--shares", shares, "--budget", str(budget), "--session", session, "--json", out,
          stdin=said.encode(), err="turns saved")
    report = load(out)
    t.check(report["rolls"] > 0, f"chat: nothing was compressed: {report}")
    t.check(report["segment_bytes"] + report["cell_bytes"] <= budget, f"chat: more than the budget: {report}")
    t.run("info", "--json", out, session)
    sizes = [layer["bytes"]["total"] - layer["bytes"]["dense"] for layer in load(out)["layers"]]
    t.check(max(sizes) > 1.2 * min(sizes) > 0, f"chat: the layers' bytes hardly differ: {min(sizes)}..{max(sizes)}")


def test_refusals(t, folder, model, book, shares):
    good = load(shares)

    def refused(name, text, code, err):
        path = os.path.join(folder, name)
        if isinstance(text, str):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        else:
            store(path, text)
        t.run("ask", "-m", model, "-f", book, "--shares", path, "Q?", code=code, err=err)

    refused("no.json", "{", 2, "is no JSON")
    refused("other.json", {"a": 1}, 2, "no file of `akv calibrate`")
    refused("newer.json", {**good, "version": 2}, 2, "it knows 1")
    refused("model.json", {**good, "model": {**good["model"], "hash": "0" * 32}}, 5, "another model")
    refused("profile.json", {**good, "profile": "best"}, 2, "best")
    refused("ratios.json", {**good, "ratios": good["ratios"][::-1]}, 2, "rising")
    refused("rows.json", {**good, "errors": good["errors"][1:]}, 2, "rows of 30 numbers")
    refused("row.json", {**good, "errors": [row[1:] for row in good["errors"]]}, 2, "rows of 30 numbers")
    refused("negative.json", {**good, "errors": [[-1] + row[1:] for row in good["errors"]]}, 2, "none negative")
    refused("null.json", {**good, "errors": [[None] + good["errors"][0][1:]] + good["errors"][1:]}, 2, "rows of 30 numbers")
    refused("text.json", {**good, "errors": [["x"] + row[1:] for row in good["errors"]]}, 2, "rows of 30 numbers")
    t.run("ask", "-m", model, "-f", book, "--shares", os.path.join(folder, "missing"), "Q?", code=6, err="missing")

    t.run("calibrate", "--help", out="usage: akv calibrate")
    t.run("calibrate", "-f", book, "-o", "x", code=1, err="-m")
    t.run("calibrate", "-m", model, "-o", "x", code=1, err="which text")
    t.run("calibrate", "-m", model, "-f", book, code=1, err="-o")
    t.run("calibrate", "-m", model, "-f", book, "-o", "/nonexistent/x", code=6, err="/nonexistent/x")
    t.run("calibrate", "-m", model, "-f", book, "-o", os.path.join(folder, "x"), "--ctx", "100", code=1, err="--ctx")
    t.run("calibrate", "-m", model, "-f", book, "-o", os.path.join(folder, "x"), "--ctx", "9000", code=2, err="context of 8192")
    t.run("calibrate", "-m", model, "-f", book, "-o", os.path.join(folder, "x"), "--continuation", "2000", code=1, err="--continuation")
    t.check(not os.path.exists(os.path.join(folder, "x")), "a refused run left a file")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--akv", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    args = parser.parse_args()
    t = Harness(args.akv)
    with tempfile.TemporaryDirectory() as folder:
        shares = test_file(t, folder, args.model, args.text)
        test_use(t, folder, args.model, args.text, shares)
        test_chat(t, folder, args.model, args.text, shares)
        test_refusals(t, folder, args.model, args.text, shares)
        t.check(not [name for name in os.listdir(folder) if name.endswith(".tmp")], "a temporary file was left behind")
    return t.end()


if __name__ == "__main__":
    sys.exit(main())
