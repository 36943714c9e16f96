# SPDX-License-Identifier: Apache-2.0
"""One budget split unevenly over the layers, from errors measured once a model (calibrate.py, `akv calibrate`).

The same rule as akv_llama_solve_shares (hosts/llama_cpp/akv_llama.h): the split that minimises the sum of the layers' relative
squared errors; curves straight in log-log between the measured ratios and beyond them.
"""

import json

import numpy as np

GRID = 4.0 ** np.linspace(-1, 1, 161)  # candidate shares


def load(path):
    """(ratios, errors [ratios, layers]); a layer without segments is null in the file, NaN here."""
    with open(path, encoding="utf-8") as f:
        report = json.load(f)
    if report.get("format") != "anchorkv-layer-errors" or report.get("version") != 1:
        raise SystemExit(f"{path} is no file of layer errors that this program knows")
    return np.array(report["ratios"], float), np.array(report["errors"], float)


def solve(ratios, errors, keep_ratio):
    """[layers] shares of the mean budget, mean 1 over the layers with segments."""
    ratios, errors = np.asarray(ratios, float), np.asarray(errors, float)
    x = np.log(ratios)
    hosted = np.flatnonzero(~np.isnan(errors[0]))
    at = np.log(np.maximum(1.0, 1.0 / (keep_ratio * GRID)))
    cost = []
    for layer in hosted:
        y = np.maximum.accumulate(np.log(np.maximum(errors[:, layer], 1e-9)))
        if len(x) == 1:
            cost.append(np.exp(y[0] + 1.8 * (at - x[0])))
            continue
        i = np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2)
        cost.append(np.exp(y[i] + (y[i + 1] - y[i]) / (x[i + 1] - x[i]) * (at - x[i])))
    cost, low, high = np.array(cost), 1e-12, 1e6
    for _ in range(120):  # the price of a byte at which the mean share is 1
        price = (low * high) ** 0.5
        if GRID[np.argmin(cost + price * GRID, 1)].mean() > 1:
            low = price
        else:
            high = price
    chosen = GRID[np.argmin(cost + high * GRID, 1)]
    out = np.ones(errors.shape[1])
    out[hosted] = chosen / chosen.mean()
    return out


def mixed(shares, strength):
    """Nearer to equal, same mean."""
    return 1.0 + strength * (np.asarray(shares) - 1.0)
