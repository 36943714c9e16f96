# SPDX-License-Identifier: Apache-2.0
"""The binding on synthetic layers: budgets, exact dense, decoding, dtypes, errors, threads."""

import unittest

import numpy as np

import anchorkv

H, G, S, D, W = 2, 3, 1500, 64, 32
FREQ = anchorkv.inv_freq(10000.0, D)


def rotate(x, positions):
    angle = np.outer(positions, FREQ)
    c, s, half = np.cos(angle), np.sin(angle), D // 2
    return np.concatenate((x[..., :half] * c - x[..., half:] * s, x[..., half:] * c + x[..., :half] * s), -1).astype(
        np.float32
    )


def make_layer(seed, tokens=S):
    """Keys around a mean, both sides near a low-dimensional set of directions, as real caches are."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((H, 8, D)) / 3
    k = (
        rng.standard_normal((H, tokens, 8)) @ mix
        + rng.standard_normal((H, tokens, D)) * 0.1
        + rng.standard_normal((H, 1, D))
    )
    v = rng.standard_normal((H, tokens, 8)) @ mix[::-1] + rng.standard_normal((H, tokens, D)) * 0.1
    q = rng.standard_normal((H * G, tokens, D))
    at = np.arange(tokens)
    k, q = rotate(k, at), rotate(q, at)
    sampled = at[:-W:97]
    return dict(
        keys=k,
        values=v.astype(np.float32),
        queries=q[:, -W:].copy(),
        sampled=q[:, sampled].copy(),
        sampled_positions=sampled,
        rope_inv_freq=FREQ,
    )


def error(a, b):
    return float(((a - b) ** 2).sum() / (b**2).sum())


class CodecTest(unittest.TestCase):
    def test_budget_and_error(self):
        layer = make_layer(1)
        for profile in ("paper", "default"):
            previous = (0.0, 0.0)
            for ratio in (0.3, 0.15):
                with (
                    self.subTest(profile=profile, ratio=ratio),
                    anchorkv.compress(**layer, keep_ratio=ratio, profile=profile) as segment,
                ):
                    info = segment.info()
                    self.assertEqual((info["kind"], info["profile"]), ("compressed", profile))
                    self.assertEqual(info["dense_bytes"], H * S * 2 * D * 2)
                    self.assertLessEqual(info["bytes"]["total"], ratio * info["dense_bytes"])
                    parts = sum(n for kind, n in info["bytes"].items() if kind != "total")
                    self.assertEqual(parts, info["bytes"]["total"])
                    self.assertEqual(len(segment.data()), info["bytes"]["total"] - info["bytes"]["object"])
                    k, v = segment.decode()
                    errors = error(k, layer["keys"]), error(v, layer["values"])
                    # 8 directions explain nearly all of it, so even the smaller budget must keep most of the energy;
                    # fewer bytes must not be better on both sides.
                    self.assertLess(max(errors), 0.5)
                    self.assertGreater(sum(errors), sum(previous))
                    previous = errors

    def test_window_is_nearly_exact(self):
        layer = make_layer(2)
        k, v = anchorkv.compress(**layer, keep_ratio=0.2, profile="paper").decode()
        # The paper's anchors are bf16: half an ulp is 2^-9 relative per coordinate, so 2^-18 = 4e-6 in energy at most.
        self.assertLess(error(k[:, -W:], layer["keys"][:, -W:]), 4e-6)
        self.assertLess(error(v[:, -W:], layer["values"][:, -W:]), 4e-6)

    def test_dense_is_exact_in_every_dtype(self):
        layer = make_layer(3, 300)
        bits = {n: (layer[n].view(np.uint32) >> 16).astype(np.uint16) for n in ("keys", "values", "queries")}
        for name, cast, back in (
            ("f32", lambda n: layer[n], lambda x: x),
            ("f16", lambda n: layer[n].astype(np.float16), lambda x: x.astype(np.float32)),
            ("bf16", lambda n: bits[n], lambda x: (x.astype(np.uint32) << 16).view(np.float32)),
        ):
            with self.subTest(dtype=name):
                given = {n: cast(n) for n in ("keys", "values", "queries")}
                segment = anchorkv.compress(**given, rope_inv_freq=FREQ, method="dense")
                k, v = segment.decode()
                np.testing.assert_array_equal(k, back(given["keys"]))
                np.testing.assert_array_equal(v, back(given["values"]))
                self.assertEqual(segment.info()["kind"], "dense")

    def test_strided_views_give_the_same_bytes(self):
        layer = make_layer(4)
        a = anchorkv.compress(**layer, keep_ratio=0.2).data()
        swapped = {
            n: np.ascontiguousarray(layer[n].transpose(1, 0, 2)).transpose(1, 0, 2)
            for n in ("keys", "values", "queries", "sampled")
        }
        self.assertFalse(swapped["keys"].flags.c_contiguous)
        self.assertEqual(a, anchorkv.compress(**{**layer, **swapped}, keep_ratio=0.2).data())

    def test_threads_give_the_same_bytes(self):
        layers = [make_layer(10 + i) for i in range(4)]
        run = lambda i, layer: anchorkv.compress(**layer, keep_ratio=0.2, layer_index=i).data()
        self.assertEqual(anchorkv.map_layers(run, layers, 1), anchorkv.map_layers(run, layers, 4))

    def test_eviction_keeps_tokens_exactly(self):
        layer = make_layer(5)
        segment = anchorkv.compress(**layer, keep_ratio=0.25, method="snapkv")
        self.assertLessEqual(segment.info()["bytes"]["total"], 0.25 * H * S * 2 * D * 2)
        k, v = segment.decode()
        self.assertLess(k.shape[1], S)
        np.testing.assert_array_equal(k[:, -W:], layer["keys"][:, -W:])
        for h in range(H):
            source = {row.tobytes() for row in layer["keys"][h]}
            self.assertTrue(all(row.tobytes() in source for row in k[h]))

    def test_overrides_reach_the_library(self):
        layer = make_layer(6)
        few = anchorkv.compress(**layer, keep_ratio=0.3, overrides={"tokens_per_anchor": 30}).info()["num_anchors"]
        many = anchorkv.compress(**layer, keep_ratio=0.3, overrides={"tokens_per_anchor": 15}).info()["num_anchors"]
        self.assertEqual((few, many), (S // 30, S // 15))
        with self.assertRaisesRegex(TypeError, "no field 'anchors'"):
            anchorkv.compress(**layer, overrides={"anchors": 3})
        self.assertEqual(list(anchorkv.experiment("default", level_bits=[32, 64]).level_bits[:3]), [32, 64, 0])

    def test_errors_are_sentences(self):
        layer = make_layer(7)
        with self.assertRaises(anchorkv.AkvError) as caught:
            anchorkv.compress(**layer, keep_ratio=0.001)
        self.assertEqual(caught.exception.status, -20)
        bad = layer["keys"].copy()
        bad[1, 77, 5] = np.nan
        with self.assertRaises(anchorkv.AkvError) as caught:
            anchorkv.compress(**{**layer, "keys": bad})
        self.assertEqual(caught.exception.status, -21)
        self.assertRegex(str(caught.exception), "77")
        with self.assertRaisesRegex(ValueError, "multiple of 2 heads"):
            anchorkv.compress(**{**layer, "queries": layer["queries"][:5]})
        with self.assertRaisesRegex(TypeError, "float64"):
            anchorkv.compress(**{**layer, "keys": layer["keys"].astype(np.float64)})

    def test_decode_into_given_arrays(self):
        layer = make_layer(8, 200)
        segment = anchorkv.compress(**layer, method="dense")
        k = np.full((H, 200, D), np.nan, np.float32)
        out, _ = segment.decode(keys=k)
        self.assertIs(out, k)
        np.testing.assert_array_equal(k, layer["keys"])
        with self.assertRaisesRegex(ValueError, "contiguous float32"):
            segment.decode(keys=np.empty((H, 199, D), np.float32))
        segment.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            segment.decode()


if __name__ == "__main__":
    unittest.main()
