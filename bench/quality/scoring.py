# SPDX-License-Identifier: Apache-2.0
"""From samples to the table: scores, means, spread. Standard library only.

A sample is a dictionary: method, factor (the one asked for; null for dense), sample (index), task, bytes, dense_bytes
and either found/forced (retrieval) or nll/dense_nll/kld/top1 (task "continuation").
"""

import json
import math
import random
import sys


def found(text, answers):
    """Share of the answers that occur in the text, ignoring case."""
    low = text.lower()
    return sum(a.lower() in low for a in answers) / len(answers)


def value_spans(pieces, answers, separator=", "):
    """Token range of every answer in " a, b, c" given the text of each token."""
    spans, start = [], 1
    ends = []
    for piece in pieces:
        ends.append((ends[-1] if ends else 0) + len(piece))
    for a in answers:
        stop = start + len(a)
        inside = [i for i, e in enumerate(ends) if e > start and e - len(pieces[i]) < stop]
        spans.append((inside[0], inside[-1] + 1))
        start = stop + len(separator)
    return spans


def forced(predicted, wanted, spans):
    """Share of the answers all of whose tokens are the most likely ones after the true tokens before them."""
    return sum(all(p == w for p, w in zip(predicted[a:b], wanted[a:b])) for a, b in spans) / len(spans)


def mean(x):
    return sum(x) / len(x)


def deviation(x):
    """Sample standard deviation; 0 for one sample."""
    m = mean(x)
    return math.sqrt(sum((v - m) ** 2 for v in x) / (len(x) - 1)) if len(x) > 1 else 0.0


def macro(by_task):
    """Mean over tasks of the mean over samples."""
    return mean([mean(v) for v in by_task.values()])


def bootstrap_share(by_task, dense_by_task, rounds=1000, seed=0):
    """5th and 95th percentile of score / dense score when samples are redrawn, paired, within each task."""
    rng, shares = random.Random(seed), []
    for _ in range(rounds):
        a, b = {}, {}
        for task, values in by_task.items():
            draw = [rng.randrange(len(values)) for _ in values]
            a[task] = [values[i] for i in draw]
            b[task] = [dense_by_task[task][i] for i in draw]
        if macro(b) > 0:
            shares.append(macro(a) / macro(b))
    shares.sort()
    return (
        (shares[int(0.05 * len(shares))], shares[min(len(shares) - 1, int(0.95 * len(shares)))])
        if shares
        else (0.0, 0.0)
    )


def summarise(samples):
    """One row per method and factor, in order of appearance."""
    groups = {}
    for s in samples:
        groups.setdefault((s["method"], s["factor"]), []).append(s)
    reference = {(s["task"], s["sample"]): s for s in samples if s["method"] == "dense"}
    rows = []
    for (method, factor), group in groups.items():
        row = {
            "method": method,
            "factor": factor,
            "samples": len(group),
            "bytes": mean([s["bytes"] for s in group]),
            "measured_factor": sum(s["dense_bytes"] for s in group) / sum(s["bytes"] for s in group),
        }
        retrieval = [s for s in group if s["task"] != "continuation" and (s["task"], s["sample"]) in reference]
        if retrieval:
            tasks = list(dict.fromkeys(s["task"] for s in retrieval))
            for key in ("found", "forced"):
                mine = {t: [s[key] for s in retrieval if s["task"] == t] for t in tasks}
                full = {t: [reference[t, s["sample"]][key] for s in retrieval if s["task"] == t] for t in tasks}
                row[key] = macro(mine)
                row[key + "_share"] = macro(mine) / macro(full) if macro(full) > 0 else None
                row[key + "_share_90"] = bootstrap_share(mine, full)
                row[key + "_tasks"] = {t: mean(v) for t, v in mine.items()}
            row["retrieval_samples"] = {t: len(v) for t, v in mine.items()}
            row["retrieval_error"] = math.sqrt(sum(deviation(v) ** 2 / len(v) for v in mine.values())) / len(mine)
        plain = [s for s in group if s["task"] == "continuation"]
        if plain:
            rise = [math.exp(s["nll"] - s["dense_nll"]) - 1.0 for s in plain]
            row.update(
                continuations=len(plain),
                ppl=math.exp(mean([s["nll"] for s in plain])),
                dense_ppl=math.exp(mean([s["dense_nll"] for s in plain])),
            )
            row["ppl_rise"] = row["ppl"] / row["dense_ppl"] - 1.0
            row["ppl_rise_error"] = deviation(rise) / math.sqrt(len(rise))
            for key in ("kld", "top1"):
                row[key] = mean([s[key] for s in plain])
                row[key + "_error"] = deviation([s[key] for s in plain]) / math.sqrt(len(plain))
        rows.append(row)
    return rows


def table(rows):
    """Plain text: quality per row, then retrieval per task."""

    def cell(row, key, form):
        return format(row[key], form) if row.get(key) is not None else "-"

    head = (
        f"{'method':24}{'asked':>7}{'bytes/x':>9}{'found':>8}{'of dense':>10}{'90 % range':>14}{'forced':>8}{'n':>6}"
        f"{'ppl rise':>10}{'+-':>7}{'KLD':>9}{'+-':>9}{'top-1':>7}{'n':>5}"
    )
    out = [head]
    for r in rows:
        share = cell(r, "found_share", ".1%")
        low_high = "{:.0%}..{:.0%}".format(*r["found_share_90"]) if "found_share_90" in r else "-"
        out.append(
            f"{r['method'][:23]:24}{(format(r['factor'], 'g') + 'x') if r['factor'] else '-':>7}"
            f"{r['measured_factor']:>8.2f}x{cell(r, 'found', '.3f'):>8}{share:>10}{low_high:>14}"
            f"{cell(r, 'forced', '.3f'):>8}{sum(r.get('retrieval_samples', {}).values()):>6}"
            f"{cell(r, 'ppl_rise', '+.2%'):>10}{cell(r, 'ppl_rise_error', '.2%'):>7}{cell(r, 'kld', '.5f'):>9}"
            f"{cell(r, 'kld_error', '.5f'):>9}{cell(r, 'top1', '.3f'):>7}{r.get('continuations', 0):>5}"
        )
    tasks = list(dict.fromkeys(t for r in rows for t in r.get("found_tasks", {})))
    if tasks:
        out += ["", f"{'found per task':24}{'asked':>7}" + "".join(f"{t:>13}" for t in tasks)]
        out += [
            f"{r['method'][:23]:24}{(format(r['factor'], 'g') + 'x') if r['factor'] else '-':>7}"
            + "".join(f"{r['found_tasks'].get(t, float('nan')):>13.3f}" for t in tasks)
            for r in rows
            if "found_tasks" in r
        ]
    return "\n".join(out)


def main():
    """scoring.py RUN.json... - one table over the samples of several runs (same settings, different sample numbers)."""
    samples, settings = [], None
    for path in sys.argv[1:]:
        with open(path) as f:
            run = json.load(f)
        same = {k: run["settings"][k] for k in ("model", "protocol", "layout", "ctx", "seed", "chat")}
        if settings is not None and same != settings:
            sys.exit(f"{path} was run with {same}, the files before it with {settings}")
        settings = same
        seen = {(s["method"], s["factor"], s["task"], s["sample"]) for s in samples}
        samples += [s for s in run["samples"] if (s["method"], s["factor"], s["task"], s["sample"]) not in seen]
    if not samples:
        sys.exit("no samples: name one or more result files")
    print(settings)
    print(table(summarise(samples)))


if __name__ == "__main__":
    main()
