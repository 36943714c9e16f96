# SPDX-License-Identifier: Apache-2.0
"""One budget split unevenly over a model's layers, from errors measured once: the file of `akv calibrate` and of
`python -m anchorkv.bench calibrate` (docs/method.md, "one budget for all layers").

The rule is that of akv_llama_solve_shares (hosts/llama_cpp/akv_llama.h): the split that minimises the sum of the
layers' relative squared errors; curves straight in log-log between the measured ratios and beyond them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import exp, isfinite, log
from typing import Any

FORMAT, VERSION = "anchorkv-layer-errors", 1
GRID = [4.0 ** (i / 80 - 1) for i in range(161)]  # candidate shares
LEAST_ERROR = 1e-9  # of the logarithm
STEPS = 16  # between equal shares and the whole split

Row = Sequence[float | None]


def curve(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """Value at `at` of the line through the points, continued at both ends; one point: errors rise as ratio^1.8."""
    if len(x) == 1:
        return y[0] + 1.8 * (at - x[0])
    i = 0
    while i + 2 < len(x) and at > x[i + 1]:
        i += 1
    return y[i] + (y[i + 1] - y[i]) / (x[i + 1] - x[i]) * (at - x[i])


def solve(ratios: Sequence[float], errors: Sequence[Row], keep_ratio: float) -> list[float]:
    """[layers] shares of the mean budget, mean 1 over the layers that have errors; 1 for the others (None)."""
    x = [log(r) for r in ratios]
    hosted = [i for i, e in enumerate(errors[0]) if e is not None]
    cost = []
    for layer in hosted:
        y = [log(max(row[layer] or 0.0, LEAST_ERROR)) for row in errors]
        for i in range(1, len(y)):
            y[i] = max(y[i], y[i - 1])  # more bytes never hurt; what says so is noise
        cost.append([exp(curve(x, y, log(max(1.0, 1.0 / (keep_ratio * g))))) for g in GRID])

    def choose(price: float) -> list[float]:
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


def mixed(shares: Sequence[float], strength: float) -> list[float]:
    """Nearer to equal, same mean."""
    return [1.0 + strength * (s - 1.0) for s in shares]


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and isfinite(x)


class LayerErrors:
    """What a calibration measured: `errors[r][l]`, relative squared error of layer l's attention output at `ratios[r]`;
    None for layers that are not compressed (sliding windows)."""

    def __init__(
        self,
        ratios: Sequence[float],
        errors: Sequence[Row],
        profile: str,
        model: Mapping[str, Any],
        path: str = "",
        **about: Any,
    ) -> None:
        self.ratios, self.errors, self.profile = list(ratios), [list(row) for row in errors], profile
        self.model, self.path, self.about = dict(model), path, about
        self.num_layers = len(self.errors[0])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerErrors:
        """ValueError with a sentence when the file is none of a calibration, or damaged."""
        name = os.fspath(path)
        with open(path, encoding="utf-8") as file:
            try:
                report = json.load(file)
            except ValueError as error:
                raise ValueError(f"{name} is no JSON ({error})") from None
        if not isinstance(report, dict) or report.get("format") != FORMAT:
            raise ValueError(f"{name} is no file of `akv calibrate` or `python -m anchorkv.bench calibrate`")
        if report.get("version") != VERSION:
            raise ValueError(f"{name} has version {report.get('version')}; this package knows {VERSION}")
        ratios, errors, model = report.get("ratios"), report.get("errors"), report.get("model")
        if (
            not isinstance(ratios, list)
            or not ratios
            or not all(_is_number(r) and r > 1 for r in ratios)
            or any(b <= a for a, b in zip(ratios, ratios[1:]))
        ):
            raise ValueError(f'{name}: "ratios" must be rising numbers above 1')
        layers = model.get("num_layers") if isinstance(model, dict) else None
        if (
            not isinstance(layers, int)
            or not isinstance(model, dict)
            or not isinstance(errors, list)
            or len(errors) != len(ratios)
            or any(not isinstance(row, list) or len(row) != layers for row in errors)
            or any(e is not None and not (_is_number(e) and e >= 0) for row in errors for e in row)
            or any((e is None) != (first is None) for row in errors for e, first in zip(row, errors[0]))
            or all(e is None for e in errors[0])
        ):
            raise ValueError(
                f'{name}: "errors" must be {len(ratios)} rows of {layers} numbers, none negative, null for the same '
                "layers in every row"
            )
        known = ("format", "version", "ratios", "errors", "profile", "model")
        about = {k: v for k, v in report.items() if k not in known}
        return cls(ratios, errors, str(report.get("profile")), model, name, **about)

    def save(self, path: str | os.PathLike[str]) -> None:
        report = {
            "format": FORMAT,
            "version": VERSION,
            "model": {**self.model, "num_layers": self.num_layers},
            "profile": self.profile,
            **self.about,
            "ratios": self.ratios,
            "errors": self.errors,
        }
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")

    def check(self, hosted: Sequence[bool], profile: str, facts: Mapping[str, Any] | None = None) -> None:
        """ValueError unless the file is for a model whose layers are compressed where `hosted` says. `facts` of it are
        compared where the file has them: those that the Python calibration made do, those of `akv calibrate` do not."""
        if len(hosted) != self.num_layers:
            raise ValueError(
                f"{self.path} is for a model of {self.num_layers} layers ({self.model.get('description', 'no name')}), "
                f"this one has {len(hosted)}: calibrate with this model"
            )
        for i, (here, error) in enumerate(zip(hosted, self.errors[0])):
            if here != (error is not None):
                does = "is compressed here and was not" if here else "has a sliding window here and was compressed"
                raise ValueError(f"{self.path} is for another model: layer {i} {does} there; calibrate with this model")
        if self.profile != profile:
            raise ValueError(
                f"{self.path} was measured with profile {self.profile!r}, this cache has {profile!r}: calibrate with "
                "it, or leave shares out"
            )
        theirs = self.model.get("transformers")
        for name, value in (facts or {}).items():
            if isinstance(theirs, dict) and name in theirs and theirs[name] != value:
                raise ValueError(
                    f"{self.path} is for another model: its {name} is {theirs[name]!r}, this one's {value!r}; "
                    "calibrate with this model"
                )


class SharedBudget:
    """What every layer keeps so that all together keep `keep_ratio`. All hosted layers must have the same shape.

    `feasible(keep_ratio, shape)` says whether a segment of that shape can be so small. Where the smallest share would
    not hold a segment's fixed part, all shares move towards equal just as far as needed, as in the llama.cpp host.
    """

    def __init__(
        self, errors: LayerErrors, keep_ratio: float, feasible: Callable[[float, Hashable], bool]
    ) -> None:
        self.path, self.keep_ratio, self.feasible = errors.path, keep_ratio, feasible
        self.split = solve(errors.ratios, errors.errors, keep_ratio)
        self.hosted = [e is not None for e in errors.errors[0]]
        self._strength: dict[Hashable, float] = {}

    def strength(self, shape: Hashable) -> float:
        """1: the whole split; 0: equal shares."""
        if shape not in self._strength:
            least = min(s for s, hosted in zip(self.split, self.hosted) if hosted)
            for step in range(STEPS, -1, -1):
                self._strength[shape] = step / STEPS
                if step == 0 or self.feasible(self.keep_ratio * mixed([least], step / STEPS)[0], shape):
                    break
        return self._strength[shape]

    def keep_of(self, layer: int, shape: Hashable) -> float:
        """keep_ratio of one layer for a segment of that shape."""
        return min(1.0, self.keep_ratio * mixed([self.split[layer]], self.strength(shape))[0])

    def report(self) -> dict[str, Any]:
        return {
            "file": self.path,
            "strength": min(self._strength.values(), default=None),
            "split": [s if hosted else None for s, hosted in zip(self.split, self.hosted)],
        }
