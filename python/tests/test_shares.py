# SPDX-License-Identifier: Apache-2.0
"""Layer shares: the split, the file of a calibration, what is refused. Read without the package: needs no numpy."""

import importlib.util
import json
import os
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
installed = importlib.util.find_spec("anchorkv")
folder = installed.submodule_search_locations[0] if installed else os.path.join(HERE, "..", "anchorkv")
spec = importlib.util.spec_from_file_location("anchorkv_shares_alone", os.path.join(folder, "shares.py"))
shares = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shares)


class SolveTest(unittest.TestCase):
    def test_known_optimum(self):
        """errors c * ratio^fall are least in sum at shares ~ c^(1 / (1 + fall)), as tests/host/shares.c checks of the C
        solver."""
        ratios, c = [4.0, 8.0, 16.0, 32.0], [1e-3, 1e-3, 4e-3, 2.5e-4, 8e-3]
        errors = [[x * (r / 10) ** 1.8 for x in c] for r in ratios]
        best = [x ** (1 / 2.8) for x in c]
        for rows in (slice(0, 4), slice(1, 2)):
            found = shares.solve(ratios[rows], errors[rows], 0.1)
            for mine, wanted in zip(found, best):
                self.assertAlmostEqual(mine, wanted / sum(best) * len(best), delta=0.03 * mine)

    def test_bounds(self):
        found = shares.solve([4, 8], [[0.0, None, 0.5], [0.0, None, 0.9]], 0.05)
        self.assertEqual(found[1], 1.0)
        self.assertAlmostEqual((found[0] + found[2]) / 2, 1.0)
        self.assertGreater(found[0], 0.05)
        self.assertAlmostEqual(shares.mixed(found, 0.5)[0], (1 + found[0]) / 2)


ERRORS = [[1e-3, None, 8e-3], [4e-3, None, 3e-2]]
FILE = {
    "format": "anchorkv-layer-errors",
    "version": 1,
    "model": {"hash": "0" * 32, "description": "a model", "num_layers": 3, "transformers": {"hidden_size": 64}},
    "profile": "default",
    "tokens": 4096,
    "ratios": [5.0, 10.0],
    "errors": ERRORS,
}


class FileTest(unittest.TestCase):
    def load(self, report):
        with tempfile.TemporaryDirectory() as work:
            path = os.path.join(work, "model.shares")
            with open(path, "w") as file:
                file.write(report if isinstance(report, str) else json.dumps(report))
            return shares.LayerErrors.load(path)

    def test_round_trip(self):
        read = self.load(FILE)
        self.assertEqual((read.ratios, read.errors, read.num_layers, read.about), ([5, 10], ERRORS, 3, {"tokens":
        4096}))
        with tempfile.TemporaryDirectory() as work:
            path = os.path.join(work, "again")
            read.save(path)
            with open(path) as file:
                self.assertEqual(json.load(file), FILE)

    def test_damaged(self):
        for change, words in (
            ("{", "is no JSON"),
            ("[]", "is no file of"),
            ({"format": "other"}, "is no file of"),
            ({"version": 2}, "version 2; this package knows 1"),
            ({"ratios": []}, '"ratios" must be'),
            ({"ratios": [10.0, 5.0]}, '"ratios" must be'),
            ({"ratios": [1.0, 5.0]}, '"ratios" must be'),
            ({"ratios": [5.0, float("nan")]}, '"ratios" must be'),
            ({"errors": ERRORS[:1]}, '"errors" must be 2 rows of 3'),
            ({"errors": [[1, 2], [3, 4]]}, '"errors" must be'),
            ({"errors": [[1, None, 2], [3, 4, 5]]}, '"errors" must be'),
            ({"errors": [[1, None, -2], [3, None, 5]]}, '"errors" must be'),
            ({"errors": [[1, None, True], [3, None, 5]]}, '"errors" must be'),
            ({"errors": [[None] * 3] * 2}, '"errors" must be'),
            ({"model": None}, '"errors" must be'),
        ):
            with self.assertRaises(ValueError) as caught:
                self.load(change if isinstance(change, str) else {**FILE, **change})
            self.assertIn(words, str(caught.exception))

    def test_other_models(self):
        read = self.load(FILE)
        hosted = [True, False, True]
        read.check(hosted, "default", {"hidden_size": 64, "vocab_size": 9})
        for arguments, words in (
            ((hosted + [True], "default"), "for a model of 3 layers (a model), this one has 4"),
            (([True, True, True], "default"), "layer 1 is compressed here and was not there"),
            (([True, False, False], "default"), "layer 2 has a sliding window here and was compressed there"),
            ((hosted, "paper"), "measured with profile 'default', this cache has 'paper'"),
            ((hosted, "default", {"hidden_size": 65}), "its hidden_size is 64, this one's 65"),
        ):
            with self.assertRaises(ValueError) as caught:
                read.check(*arguments)
            self.assertIn(words, str(caught.exception))


class BudgetTest(unittest.TestCase):
    def test_split_and_strength(self):
        errors = shares.LayerErrors(FILE["ratios"], ERRORS, "default", {}, "a file")
        asked = []

        def feasible(keep, shape):
            asked.append(shape)
            return keep >= {"long": 0.01, "short": 0.08, "tiny": 1.0}[shape]

        budget = shares.SharedBudget(errors, 0.1, feasible)
        whole = budget.keep_of(0, "long"), budget.keep_of(2, "long")
        self.assertLess(whole[0], 0.07)
        self.assertAlmostEqual(sum(whole), 0.2)
        self.assertEqual(budget.strength("long"), 1.0)
        part = budget.keep_of(0, "short"), budget.keep_of(2, "short")
        self.assertTrue(0.08 <= part[0] < 0.085 and 0 < budget.strength("short") < 1)
        self.assertAlmostEqual(sum(part), 0.2)
        self.assertEqual((budget.keep_of(0, "tiny"), budget.keep_of(2, "tiny")), (0.1, 0.1))
        times = len(asked)
        budget.keep_of(2, "short")
        self.assertEqual(len(asked), times)  # remembered
        report = budget.report()
        self.assertEqual((report["file"], report["strength"], report["split"][1]), ("a file", 0.0, None))

    def test_never_more_than_everything(self):
        errors = shares.LayerErrors(FILE["ratios"], ERRORS, "default", {}, "")
        self.assertEqual(shares.SharedBudget(errors, 0.9, lambda *_: True).keep_of(2, 0), 1.0)


if __name__ == "__main__":
    unittest.main()
