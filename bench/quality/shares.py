# SPDX-License-Identifier: Apache-2.0
"""One budget split unevenly over the layers, from errors measured once a model (calibrate.py, `akv calibrate`).

The same rule as akv_llama_solve_shares (hosts/llama_cpp/akv_llama.h): the split that minimises the sum of the layers' relative
squared errors; curves straight in log-log between the measured ratios and beyond them.
"""

import json
from math import exp, log

GRID = [4.0 ** (i / 80 - 1) for i in range(161)]  # candidate shares
LEAST_ERROR = 1e-9  # of the logarithm


def load(path):
    """(ratios, errors [ratios][layers]); a layer without segments is None."""
    with open(path, encoding="utf-8") as f:
        report = json.load(f)
    if report.get("format") != "anchorkv-layer-errors" or report.get("version") != 1:
        raise SystemExit(f"{path} is no file of layer errors that this program knows")
    return report["ratios"], report["errors"]


def curve(x, y, at):
    """Value at `at` of the line through the points, continued at both ends; one point: errors rise as ratio^1.8."""
    if len(x) == 1:
        return y[0] + 1.8 * (at - x[0])
    i = 0
    while i + 2 < len(x) and at > x[i + 1]:
        i += 1
    return y[i] + (y[i + 1] - y[i]) / (x[i + 1] - x[i]) * (at - x[i])


def solve(ratios, errors, keep_ratio):
    """[layers] shares of the mean budget, mean 1 over the layers with segments; 1 for the others."""
    x = [log(r) for r in ratios]
    hosted = [i for i, e in enumerate(errors[0]) if e is not None]
    cost = []
    for layer in hosted:
        y = [log(max(row[layer], LEAST_ERROR)) for row in errors]
        for i in range(1, len(y)):
            y[i] = max(y[i], y[i - 1])  # more bytes never hurt; what says so is noise
        cost.append([exp(curve(x, y, log(max(1.0, 1.0 / (keep_ratio * g))))) for g in GRID])

    def choose(price):
        return [min(zip((c + price * g for c, g in zip(one, GRID)), GRID))[1] for one in cost]

    low, high = 1e-12, 1e6
    for _ in range(120):  # the price of a byte at which the mean share is 1
        price = (low * high) ** 0.5
        if sum(choose(price)) > len(hosted):
            low = price
        else:
            high = price
    chosen = choose(high)
    mean = sum(chosen) / len(chosen)
    out = [1.0] * len(errors[0])
    for layer, share in zip(hosted, chosen):
        out[layer] = share / mean
    return out


def mixed(shares, strength):
    """Nearer to equal, same mean."""
    return [1.0 + strength * (s - 1.0) for s in shares]
