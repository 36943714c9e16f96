# SPDX-License-Identifier: Apache-2.0
"""Tasks, scores and tables of the evaluation, without a model: words stand for tokens."""

import random
import re
import unittest

import scoring
import tasks

PROSE = " ".join(f"Sentence number {i} speaks of nothing in particular." for i in range(20000))
VOCABULARY = {}


def encode(text):
    return [VOCABULARY.setdefault(w, len(VOCABULARY)) for w in re.findall(r"\s*\S+", text)]


def decode(ids):
    words = {i: w for w, i in VOCABULARY.items()}
    return "".join(words[i] for i in ids)


def contexts(layout="shared", samples=2, seed=1, tokens=3000, chosen=tasks.TASKS):
    return tasks.build_contexts(layout, list(chosen), samples, seed, tokens, PROSE, encode, decode)


class TasksTest(unittest.TestCase):
    def test_length_and_answers(self):
        for context in contexts():
            self.assertEqual([q.task for q in context.questions], tasks.TASKS)
            n = len(encode(context.text))
            self.assertTrue(2900 <= n <= 3000, n)
            for q in context.questions:
                self.assertEqual(len(q.answers), {"multi_value": 4, "multi_query": 4, "tracking": 5}.get(q.task, 1))
                for answer in q.answers:
                    self.assertEqual(
                        len(re.findall(r"\b" + re.escape(answer) + r"\b", context.text)),
                        1 if q.task != "tracking" else context.text.count(answer),
                    )
                    self.assertNotIn(answer, q.ask + q.opening)

    def test_tracking_is_in_order_and_complete(self):
        for context in contexts("separate", 5, chosen=["tracking"]):
            (q,) = context.questions
            value = re.search(r"the value (\d+)\?", q.ask).group(1)
            held = set()
            for target, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", context.text):
                if source == value or source in held:
                    held.add(target)
            self.assertEqual(held, set(q.answers))

    def test_seeds_and_samples_differ_but_repeat(self):
        texts = [c.text for seed in (1, 1000) for c in contexts(seed=seed)]
        self.assertEqual(len(set(texts)), 4)
        self.assertEqual(texts[:2], [c.text for c in contexts(samples=3)][:2])

    def test_separate_layout_has_one_task_a_context(self):
        made = contexts("separate", 2)
        self.assertEqual([[q.task for q in c.questions] for c in made], [[t] for _ in range(2) for t in tasks.TASKS])

    def test_too_small_a_context_is_refused(self):
        with self.assertRaisesRegex(ValueError, "cannot hold"):
            contexts(tokens=200)


class ScoringTest(unittest.TestCase):
    def test_found(self):
        self.assertEqual(scoring.found("It is calm-Lake, 12.", ["calm-lake", "34"]), 0.5)
        self.assertEqual(scoring.found("", ["1"]), 0.0)

    def test_spans_and_forced(self):
        pieces = [" ", "1", "2", ",", " ", "3", "4", "5"]
        spans = scoring.value_spans(pieces, ["12", "345"])
        self.assertEqual(spans, [(1, 3), (5, 8)])
        self.assertEqual(scoring.value_spans([" 12", ",", " 345"], ["12", "345"]), [(0, 1), (2, 3)])
        wanted = list(range(8))
        self.assertEqual(scoring.forced(wanted, wanted, spans), 1.0)
        self.assertEqual(scoring.forced([0, 1, 2, 99, 99, 5, 6, 0], wanted, spans), 0.5)

    def test_summary(self):
        def s(method, factor, task, sample, score, size):
            return {
                "method": method,
                "factor": factor,
                "task": task,
                "sample": sample,
                "bytes": size,
                "dense_bytes": 1000,
                "found": score,
                "forced": score,
            }

        samples = []
        for i in range(4):
            for task, full, got in (("a", 1.0, 1.0), ("b", 0.5, 0.25)):
                samples += [s("dense", None, task, i, full, 1000), s("x", 10, task, i, got, 100)]
        samples += [
            {
                "method": m,
                "factor": f,
                "task": "continuation",
                "sample": i,
                "bytes": size,
                "dense_bytes": 1000,
                "nll": nll,
                "dense_nll": 2.0,
                "kld": nll - 2.0,
                "top1": 1.0,
            }
            for i in range(3)
            for m, f, size, nll in (("dense", None, 1000, 2.0), ("x", 10, 100, 2.1))
        ]
        dense, x = scoring.summarise(samples)
        self.assertEqual((dense["found"], dense["found_share"], dense["kld"]), (0.75, 1.0, 0.0))
        self.assertEqual((x["found"], x["retrieval_samples"]), (0.625, {"a": 4, "b": 4}))
        self.assertAlmostEqual(x["found_share"], 0.625 / 0.75)
        self.assertEqual(x["found_share_90"], (0.625 / 0.75, 0.625 / 0.75))  # no spread in these samples
        self.assertAlmostEqual(x["ppl_rise"], 2.718281828**0.1 - 1.0)
        self.assertAlmostEqual(x["measured_factor"], 10.0)
        text = scoring.table([dense, x])
        self.assertIn("83.3%", text)
        self.assertIn("10.00x", text)

    def test_bootstrap_covers_the_mean(self):
        rng = random.Random(3)
        mine = {"a": [float(rng.random() < 0.5) for _ in range(40)]}
        low, high = scoring.bootstrap_share(mine, {"a": [1.0] * 40})
        self.assertTrue(low < scoring.mean(mine["a"]) < high)
        # Binomial: sd 0.079 for 40 draws, so the 90 % range is about 0.26 wide.
        self.assertTrue(0.15 < high - low < 0.40)


if __name__ == "__main__":
    unittest.main()
