# SPDX-License-Identifier: Apache-2.0
"""The report's plots as PNG files, by matplotlib."""

import os

from .report import groups_of, mean, rows_of

OURS = ("default", "paper", "press.")


def _pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(f"--png needs matplotlib (pip install anchorkv[bench]): {error}") from None
    matplotlib.use("Agg")  # files only: no display is wanted
    import matplotlib.pyplot as plt

    return plt


def _against_ratio(plt, rows, key, label, title, path):
    fig, ax = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
    for r in rows:
        x, y = max(r["ratio"], 1), r[key]
        ax.scatter([x], [y], color="#0066cc" if r["method"].startswith(OURS) else "#888888", zorder=2)
        ax.annotate(r["method"], (x, y), (5, 4), textcoords="offset points", fontsize=7)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}x")
    ax.set(xlabel="dense 16-bit bytes / bytes kept", ylabel=label, title=title)
    ax.set_ylim(bottom=0)
    ax.grid(color="#dddddd", zorder=0)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def _heat(plt, records, title, path):
    depths, sizes = sorted({r["depth"] for r in records}), sorted({r["ctx"] for r in records})
    grid = [[float("nan")] * len(sizes) for _ in depths]
    for i, d in enumerate(depths):
        for j, c in enumerate(sizes):
            cell = [r["score"] for r in records if r["depth"] == d and r["ctx"] == c]
            if cell:
                grid[i][j] = mean(cell)
    fig, ax = plt.subplots(figsize=(1.5 + 0.9 * len(sizes), 1.5 + 0.4 * len(depths)), constrained_layout=True)
    image = ax.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    ax.set_xticks(range(len(sizes)), [str(c) for c in sizes])
    ax.set_yticks(range(len(depths)), [f"{d:.2f}" for d in depths])
    ax.set(xlabel="tokens", ylabel="depth", title=title)
    fig.colorbar(image, label="share of the key found")
    fig.savefig(path, dpi=120)
    plt.close(fig)


def write(logs, folder, methods=None):
    """PNG files of what the logs hold; their paths."""
    plt, out = _pyplot(), []
    os.makedirs(folder, exist_ok=True)
    groups, _ = groups_of(logs, methods)
    passkeys = {}
    for (benchmark, ctx, protocol), records in groups.items():
        if benchmark == "ablation":
            continue
        rows = rows_of(records)
        for key, label in (("score", "score"), ("kld", "KL divergence from dense, nats")):
            here = [r for r in rows if r.get(key) is not None]
            if len(here) > 1:
                out.append(os.path.join(folder, f"{benchmark}-{ctx}-{protocol}-{key}.png"))
                _against_ratio(plt, here, key, label, f"{benchmark}, {ctx} tokens", out[-1])
        for r in records if benchmark == "niah" else ():
            passkeys.setdefault((protocol, r["method"]), []).append(r)
    for (protocol, method), records in passkeys.items():
        name = "".join(c if c.isalnum() or c in ".@+-" else "_" for c in method)
        out.append(os.path.join(folder, f"niah-{protocol}-{name}.png"))
        _heat(plt, records, method, out[-1])
    return out
