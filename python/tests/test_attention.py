# SPDX-License-Identifier: Apache-2.0
"""attend() against a plain softmax in double precision, and what arrays may look like. numpy alone; torch if there."""

import threading
import time
import unittest

import numpy as np

import anchorkv
from test_codec import D, FREQ, G, H, W, make_layer

try:
    import torch
except ImportError:
    torch = None


def reference(q, k, v, visible, scale, softcap=0.0, sinks=None):
    """q [HG, T, d], k and v [H, n, d], visible [T, n] additive."""
    out = np.zeros(q.shape, np.float64)
    for h in range(q.shape[0]):
        logits = q[h].astype(np.float64) @ k[h // G].astype(np.float64).T * scale
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        logits = logits + visible
        top = logits.max(1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(1, keepdims=True) + (np.exp(sinks[h] - top) if sinks is not None else 0)
        out[h] = weights / total @ v[h // G].astype(np.float64)
    return out


class AttendTest(unittest.TestCase):
    def setUp(self):
        rng = np.random.default_rng(5)
        self.tail = [rng.standard_normal((H, 9, D)).astype(np.float32) for _ in range(2)]
        self.q = rng.standard_normal((H * G, 3, D)).astype(np.float32)

    def check(self, segment, **options):
        k, v = segment.decode()
        k, v = np.concatenate((k, self.tail[0]), 1), np.concatenate((v, self.tail[1]), 1)
        n, T = self.tail[0].shape[1], self.q.shape[1]
        mask = options.get("mask")
        if mask is None:
            mask = np.where(np.arange(n)[None] <= n - T + np.arange(T)[:, None], 0.0, -np.inf)
        visible = np.concatenate((np.zeros((T, k.shape[1] - n)), mask), 1)
        out = np.full((T, H * G, D), np.nan, np.float32).transpose(1, 0, 2)  # written through strides
        anchorkv.attend(self.q, [segment], *self.tail, out=out, **options)
        want = reference(self.q, k, v, visible, D**-0.5, options.get("logit_softcap", 0.0), options.get("sinks"))
        # 1500 float32 products and sums; profile default reads queries in 8-bit steps (docs/numerics.md)
        self.assertLess(np.abs(out - want).max(), 3e-3)

    def test_against_reference(self):
        layer = make_layer(3)
        mask = np.zeros((3, 9), np.float32)
        mask[:, 2:5] = -np.inf
        for options in (
            {},
            {"mask": mask},
            {"logit_softcap": 5.0},
            {"sinks": np.linspace(-1, 2, H * G).astype(np.float32)},
            {"threads": anchorkv.Threads(2)},
        ):
            for method, ratio in (("dense", 1.0), ("anchorkv", 0.15)):
                with self.subTest(method=method, **options):
                    self.check(anchorkv.compress(**layer, keep_ratio=ratio, method=method), **options)

    def test_bad_arguments(self):
        segment, out = anchorkv.compress(**make_layer(3), keep_ratio=0.2), np.empty((H * G, 3, D), np.float32)
        for change, words in (
            (dict(out=np.empty((H * G, 3, D))), "dtype float64"),
            (dict(out=np.empty((H * G, 3, D + 2), np.float32)), "out must be float32"),
            (dict(queries=self.q[:5]), "no multiple of the 2 KV heads"),
            (dict(tail_keys=self.tail[0][:, :5]), "do not fit"),
            (dict(mask=np.zeros((3, 8), np.float32)), "mask must be"),
            (dict(sinks=np.zeros(4, np.float32)), "sinks must be 6"),
            (dict(segments=[], tail_keys=None, tail_values=None), "nothing to attend to"),
        ):
            arguments = dict(
                queries=self.q, segments=[segment], tail_keys=self.tail[0], tail_values=self.tail[1], out=out
            )
            with self.subTest(words), self.assertRaisesRegex((TypeError, ValueError), words):
                anchorkv.attend(**{**arguments, **change})
        segment.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            anchorkv.attend(self.q, [segment], *self.tail, out=out)

    def test_lock_is_released(self):
        """Another Python thread runs while the library compresses."""
        layer, ticks, stop = make_layer(3, 6000), [], threading.Event()

        def tick():
            while not stop.is_set():
                ticks.append(time.perf_counter())
                time.sleep(0.001)

        thread = threading.Thread(target=tick)
        thread.start()
        began = time.perf_counter()
        anchorkv.compress(**layer, keep_ratio=0.1).close()
        ended = time.perf_counter()
        stop.set()
        thread.join()
        self.assertGreater(sum(began < t < ended for t in ticks), 5)


class ArraysTest(unittest.TestCase):
    def setUp(self):
        self.layer = make_layer(2)
        self.bytes = anchorkv.compress(**self.layer, keep_ratio=0.2).data()

    def same(self, **changes):
        self.assertEqual(anchorkv.compress(**{**self.layer, **changes}, keep_ratio=0.2).data(), self.bytes)

    def test_strides(self):
        k = self.layer["keys"]
        self.same(keys=k.transpose(1, 0, 2).copy().transpose(1, 0, 2))  # [tokens, heads, dim] in memory
        wide = np.zeros((H, k.shape[1] + 5, 2 * D), np.float32)
        wide[:, 5:, ::2] = k
        self.same(keys=wide[:, 5:, ::2])
        self.same(values=self.layer["values"][:, ::-1].copy()[:, ::-1])  # negative

    def test_dlpack(self):
        class Exporter:
            def __init__(self, x):
                self.x = x

            def __dlpack__(self, **options):
                return self.x.__dlpack__(**options)

            def __dlpack_device__(self):
                return self.x.__dlpack_device__()

        self.same(keys=Exporter(self.layer["keys"]))

    def test_refused(self):
        for change, words in (
            (dict(keys=self.layer["keys"].astype(np.float64)), "astype"),
            (dict(keys=self.layer["keys"][0]), "2 dimensions"),
            (dict(keys=[[1.0]]), "list"),
            (dict(values=self.layer["values"][:, 1:]), "agree in heads and tokens"),
            (dict(method="h2o"), "unknown"),
            (dict(profile="h2o"), "unknown"),
        ):
            with self.subTest(words), self.assertRaisesRegex((TypeError, ValueError), words):
                anchorkv.compress(**{**self.layer, **change}, keep_ratio=0.2)

    @unittest.skipIf(torch is None, "no torch")
    def test_torch(self):
        k = torch.from_numpy(self.layer["keys"])
        self.same(keys=k)
        self.same(keys=torch.nn.Parameter(k))  # read only: gradients do not matter
        half = anchorkv.compress(**{**self.layer, "keys": k.bfloat16()}, keep_ratio=0.2)
        bits = k.bfloat16().view(torch.uint16).numpy()
        self.assertEqual(half.data(), anchorkv.compress(**{**self.layer, "keys": bits}, keep_ratio=0.2).data())
        with self.assertRaisesRegex(TypeError, r"keys.float\(\)"):
            anchorkv.compress(**{**self.layer, "keys": k.double()}, keep_ratio=0.2)
        with self.assertRaisesRegex(TypeError, "meta.*cpu"):
            anchorkv.compress(**{**self.layer, "keys": k.to("meta")}, keep_ratio=0.2)

    def test_plan(self):
        planned = anchorkv.plan(1500, H, G, D, keep_ratio=0.2)
        made = anchorkv.compress(**self.layer, keep_ratio=0.2)
        self.assertEqual((planned["kind"], planned["bytes"]), ("compressed", made.nbytes))
        with self.assertRaisesRegex(anchorkv.AkvError, "smallest feasible keep ratio"):
            anchorkv.plan(1500, H, G, D, keep_ratio=0.001)
        self.assertEqual(len(FREQ), D // 2)
        self.assertEqual(anchorkv.plan(W, H, G, D)["dense_reason"], "within window")

    def test_open(self):
        again = anchorkv.Segment.open(self.bytes)
        self.assertEqual(again.data(), self.bytes)
        with self.assertRaises(anchorkv.AkvError):
            anchorkv.Segment.open(self.bytes[:-64])


if __name__ == "__main__":
    unittest.main()
