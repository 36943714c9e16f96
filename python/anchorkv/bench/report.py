# SPDX-License-Identifier: Apache-2.0
"""From logs to a Markdown table and one HTML page that needs no network."""

import html
import json
import math
import statistics

from .ruler import TASKS
from .runner import Log, read


def mean(x):
    return statistics.fmean(x)


def rows_of(records):
    """One row a method: tasks, macro average and its standard error, measured ratio; or perplexity, KLD, top-1."""
    out = []
    for name in dict.fromkeys(r["method"] for r in records):
        mine = [r for r in records if r["method"] == name]
        row = {"method": name, "samples": len(mine), "nominal": any(r.get("nominal") for r in mine)}
        row["ratio"] = sum(r["dense_bytes"] for r in mine) / sum(r["bytes"] for r in mine)
        scored = [r for r in mine if "score" in r]
        if scored:
            tasks = {
                t: [r["score"] for r in scored if r["task"] == t] for t in dict.fromkeys(r["task"] for r in scored)
            }
            row["tasks"] = {t: 100 * mean(v) for t, v in tasks.items()}
            row["score"] = mean(list(row["tasks"].values()))
            row["error"] = (
                100 * math.sqrt(sum((statistics.pstdev(v) ** 2) / len(v) for v in tasks.values())) / len(tasks)
            )
        plain = [r for r in mine if "nll" in r]
        if plain:
            row["ppl_rise"] = 100 * (math.exp(mean([r["nll"] - r["dense_nll"] for r in plain])) - 1)
            row["kld"], row["top1"] = mean([r["kld"] for r in plain]), mean([r["top1"] for r in plain])
        out.append(row)
    return out


def common(records, methods):
    """Records of these methods, in their order, of the samples that every one of them has."""
    having = {}
    for r in records:
        having.setdefault(r["method"], set()).add((r["task"], r["sample"], r.get("depth")))
    shared = set.intersection(*(having.get(m, set()) for m in methods))
    kept = [r for r in records if r["method"] in methods and (r["task"], r["sample"], r.get("depth")) in shared]
    return sorted(kept, key=lambda r: (methods.index(r["method"]), r["sample"]))


def groups_of(paths, methods=None):
    """{(benchmark, ctx, protocol): records} over the logs, and their settings. What two logs have counts once.
    methods: only these, on the samples that all of them have; where one has none at all, the group is left out."""
    groups, settings, seen = {}, [], set()
    for path in paths:
        first, *records = read(path)
        settings.append(first["settings"])
        run = json.dumps(first["settings"], sort_keys=True)
        for r in records:
            if "task" in r:
                if (run, Log.key(r)) in seen:
                    continue
                seen.add((run, Log.key(r)))
            groups.setdefault((first["settings"]["benchmark"], r["ctx"], r["protocol"]), []).append(r)
    if methods:
        groups = {key: left for key, records in groups.items() if (left := common(records, methods))}
        if not groups:
            raise SystemExit(f"no sample has records of all of {', '.join(methods)}")
    return groups, settings


def columns_of(rows):
    head = ["method", "bytes"]
    if any("score" in r for r in rows):
        tasks, known = list(dict.fromkeys(t for r in rows for t in r.get("tasks", {}))), list(TASKS)
        head += ["score", "+-"] + sorted(tasks, key=lambda t: known.index(t) if t in known else len(known))
    if any("kld" in r for r in rows):
        head += ["perplexity", "KLD", "top-1"]
    return head + ["n"]


def cells_of(row, head):
    values = {
        "method": row["method"],
        "bytes": f"1/{row['ratio']:.2f}" + (" (nominal)" if row["nominal"] else ""),
        "score": f"{row['score']:.1f}" if "score" in row else "",
        "+-": f"{row['error']:.1f}" if "score" in row else "",
        "perplexity": f"{row['ppl_rise']:+.2f} %" if "kld" in row else "",
        "KLD": f"{row['kld']:.4f}" if "kld" in row else "",
        "top-1": f"{row['top1']:.3f}" if "kld" in row else "",
        "n": str(row["samples"]),
        **{t: f"{v:.0f}" for t, v in row.get("tasks", {}).items()},
    }
    return [values.get(h, "") for h in head]


def markdown(paths, methods=None):
    groups, settings = groups_of(paths, methods)
    out = []
    for (benchmark, ctx, protocol), records in groups.items():
        if benchmark == "ablation":
            from . import ablation

            out += [f"ablation, {ctx} tokens", "", ablation.markdown(records), ""]
            continue
        rows = rows_of(records)
        head = columns_of(rows)
        out += [
            f"{benchmark}, {ctx} tokens, question {'known' if protocol == 'aware' else 'not known'} at compression",
            "",
        ]
        out += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        out += ["| " + " | ".join(cells_of(r, head)) + " |" for r in rows] + [""]
    return "\n".join(out)


def short(paths, methods=None):
    """For a README: one line a method and benchmark, and what was run."""
    groups, settings = groups_of(paths, methods)
    out = []
    for (benchmark, ctx, protocol), records in groups.items():
        if benchmark == "ablation":
            continue
        rows = rows_of(records)
        tasks = {t for r in rows for t in r.get("tasks", {})}
        head = [h for h in columns_of(rows) if h not in tasks]
        known = "known" if protocol == "aware" else "not known"
        words = f"{benchmark}, {ctx} tokens, question {known} at compression"
        out += [words + (f", {len(tasks)} tasks" if len(tasks) > 1 else ""), ""]
        out += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        out += ["| " + " | ".join(cells_of(r, head)) + " |" for r in rows] + [""]
    for one in settings:
        said = ", ".join(f"{k} {v}" for k, v in one.items() if v not in (None, False))
        out.append(f"Measured by `python -m anchorkv.bench`: {said}.")
    return "\n".join(out) + "\n"


def plot(rows, key, title):
    """Score (or KLD) against the measured ratio, as SVG."""
    points = [(r["ratio"], r[key], r["method"]) for r in rows if r.get(key) is not None]
    if len(points) < 2:
        return ""
    width, height, left, bottom = 640, 300, 60, 40
    x_max = max(math.log2(max(p[0], 1.01)) for p in points) * 1.15 or 1
    y_max = max(p[1] for p in points) * 1.1 or 1
    out = [f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{html.escape(title)}">']
    for i in range(5):
        y = height - bottom - i / 4 * (height - bottom - 20)
        out.append(
            f'<path d="M{left} {y:.1f}H{width - 10}" stroke="#ddd"/>'
            f'<text x="4" y="{y + 4:.1f}">{y_max * i / 4:.3g}</text>'
        )
    for ratio in (1, 2, 4, 8, 16, 32, 64):
        x = left + math.log2(ratio) / x_max * (width - left - 20)
        if x < width - 10:
            out.append(f'<text x="{x:.1f}" y="{height - 18}" text-anchor="middle">{ratio}x</text>')
    for ratio, value, name in points:
        x = left + math.log2(max(ratio, 1)) / x_max * (width - left - 20)
        y = height - bottom - value / y_max * (height - bottom - 20)
        ours = name.startswith(("default", "paper", "press."))
        out.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{"#06c" if ours else "#999"}"><title>{html.escape(name)}: '
        )
        out.append(
            f"{value:.4g} at {ratio:.2f}x</title></circle>"
            f'<text x="{x + 7:.1f}" y="{y - 6:.1f}">{html.escape(name)}</text>'
        )
    return f"<h3>{html.escape(title)}</h3>" + "".join(out) + "</svg>"


def heat(groups):
    """Depth by length, one grid a method, of the passkey test."""
    cells = {}
    for (benchmark, ctx, protocol), records in groups.items():
        for r in records if benchmark == "niah" else ():
            cells.setdefault((protocol, r["method"]), {}).setdefault((r["depth"], ctx), []).append(r["score"])
    out = []
    for (protocol, method), grid in cells.items():
        depths, sizes = sorted({d for d, _ in grid}), sorted({c for _, c in grid})
        out.append(
            f"<h3>{html.escape(method)}, {protocol}: share of the key found, depth by tokens</h3><table><tr><th></th>"
        )
        out += [f"<th>{c}</th>" for c in sizes]
        for d in depths:
            out.append(f"</tr><tr><th>{d:.2f}</th>")
            for c in sizes:
                v = mean(grid[d, c]) if (d, c) in grid else None
                shade = "#eee" if v is None else f"hsl({120 * v:.0f},60%,75%)"
                out.append(f'<td style="background:{shade}">{"" if v is None else f"{v:.2f}"}</td>')
        out.append("</tr></table>")
    return "".join(out)


STYLE = """body{font:15px system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}
td,th{border:1px solid #ccc;padding:.25em .6em;text-align:right}
td:first-child,th:first-child{text-align:left}svg text{font:11px system-ui,sans-serif}pre{white-space:pre-wrap}"""


def page(paths, methods=None):
    groups, settings = groups_of(paths, methods)
    out = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Cache compression</title>",
        f"<style>{STYLE}</style>",
    ]
    out.append("<h1>Cache compression: what it keeps</h1><p>Bytes are of the compressed part, all that a method keeps; "
               "+- is the standard error of the mean of the tasks.</p>")  # fmt: skip
    for (benchmark, ctx, protocol), records in groups.items():
        if benchmark == "ablation":
            from . import ablation

            out.append(f"<h2>ablation, {ctx} tokens</h2><pre>{html.escape(ablation.markdown(records))}</pre>")
            continue
        rows = rows_of(records)
        head = columns_of(rows)
        known = "known" if protocol == "aware" else "not known"
        out.append(f"<h2>{html.escape(benchmark)}, {ctx} tokens, question {known} at compression</h2><table><tr>")
        out += [f"<th>{html.escape(h)}</th>" for h in head] + ["</tr>"]
        for r in rows:
            out += ["<tr>"] + [f"<td>{html.escape(c)}</td>" for c in cells_of(r, head)] + ["</tr>"]
        out.append("</table>")
        out.append(plot(rows, "score", "Score against ratio") + plot(rows, "kld", "KL divergence against ratio"))
    out.append(heat(groups))
    out.append("<h2>Settings</h2>" + "".join(f"<pre>{html.escape(str(s))}</pre>" for s in settings))
    return "\n".join(out) + "</html>\n"
