# SPDX-License-Identifier: Apache-2.0
"""How much each layer of a PyTorch model suffers from compression, measured once, as `akv calibrate` does.

A piece of text is read and its cache compressed at several ratios; the text's continuation is read on from the exact
cache while every layer attends with the same queries to the compressed forms too. Kept is the relative squared error of
the layer's
attention output. No error of an early layer reaches a later one.
"""

import random
import sys
import time

import torch

from ..attention import attend
from ..codec import AkvError
from ..shares import LayerErrors, solve
from ..transformers_cache import AnchorKVCache
from ..transformers_cache.cache import model_facts
from ..transformers_cache.document import fingerprint
from ..transformers_cache.layer import INFEASIBLE, AnchorKVLayer

RATIOS = (4, 7, 10, 14, 20, 28, 40)  # from nearly exact to where a large ratio, unevenly split, may put a layer


class Comparing(AnchorKVLayer):
    """Stays dense. The first pass is compressed aside in every way of `codecs`, later ones attend to those too."""

    codecs = ()  # settings of the codec; from the first that the length cannot reach on, they are left out

    def reset(self):
        super().reset()
        self.segments, self.prompt, self.error, self.energy = [], 0, [], 0.0

    def attend(self, underneath, module, query, key, value, mask, options):
        self._check(module, query, options)
        self.pending = False
        self._observe(query, mask, options.get("position_ids"))
        out = underneath(module, query, key, value, mask, **options)
        if not self.segments:
            self._compress_aside()
        else:
            self._compare(query, out[0])
        return out

    def _compress_aside(self):
        self.prompt = self.n
        positions = self._tail_positions()[0].cpu()
        index = torch.cat([i for i, _ in self.sampled])
        sampled = torch.cat([q for _, q in self.sampled], 2)
        for settings in self.codecs:
            try:
                self.segments.append(self._compress_row(0, None, positions, index, sampled, **settings))
            except AkvError as error:
                if error.status != INFEASIBLE or not self.segments:
                    raise
                break
        self.error = [0.0] * len(self.segments)

    def _compare(self, query, exact):
        """exact: [1, t, heads, d_v], what the model goes on with."""
        k, v = self._k[0, :, self.prompt : self.n], self._v[0, :, self.prompt : self.n]
        ours = torch.empty(exact.shape[1:], dtype=torch.float32)
        self.energy += float(exact[0].double().square().sum())
        for i, segment in enumerate(self.segments):
            attend(
                query[0],
                [segment],
                k,
                v,
                out=ours.transpose(0, 1),
                sm_scale=self.sm_scale,
                logit_softcap=self.softcap,
                sinks=self.sinks,
                threads=self.settings.threads,
            )
            self.error[i] += float((ours.double() - exact[0].double()).square().sum())


def comparing_cache(model, codecs, kind=Comparing):
    """(cache that stays dense, its comparing layers)."""
    cache = AnchorKVCache(model.config, ratio=1, when="manual", tail_limit=1 << 30)
    layers = []
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, AnchorKVLayer):
            cache.layers[i] = kind(layer.settings, i, layer.rope)
            cache.layers[i].codecs = codecs
            layers.append(cache.layers[i])
    return cache, layers


@torch.inference_mode()
def measure(model, ids, continuation, profile="default", seed=0, ratios=RATIOS):
    """[reached ratios][layers] relative squared errors of one piece [1, n], None for sliding-window layers."""
    cache, layers = comparing_cache(model, [dict(keep_ratio=1.0 / r, profile=profile, seed=seed) for r in ratios])
    model(ids, past_key_values=cache, logits_to_keep=1)
    at = torch.arange(ids.shape[1], ids.shape[1] + continuation.shape[1])[None]
    model(continuation, past_key_values=cache, position_ids=at, logits_to_keep=1)
    reached = min(len(layer.error) for layer in layers)
    return [
        [layer.error[r] / layer.energy if isinstance(layer, Comparing) else None for layer in cache.layers]
        for r in range(reached)
    ]


def calibrate(bench, text, ctx, continuation, pieces, seed, profile, ratios=RATIOS):
    """LayerErrors over pieces of the text that do not overlap."""
    ids = bench.encode(text)
    length = ctx + continuation
    if len(ids) < pieces * length:
        raise ValueError(f"the text has {len(ids)} tokens; {pieces} pieces of {ctx} + {continuation} are wanted")
    gap = random.Random(f"{seed}/calibrate").randrange(len(ids) - pieces * length + 1)
    sums, began = None, time.time()
    for p in range(pieces):
        start = gap + p * length
        piece = torch.tensor([ids[start : start + length]])
        errors = measure(bench.model, piece[:, :ctx], piece[:, ctx:], profile, seed, ratios)
        sums = errors if sums is None else [
            [None if a is None else a + b for a, b in zip(*rows)] for rows in zip(sums, errors)
        ]  # fmt: skip
        print(f"piece {p + 1} of {pieces}, {time.time() - began:.0f} s", file=sys.stderr)
    if len(sums) < len(ratios):
        first, last = ratios[len(sums)], ratios[len(sums) - 1]
        print(f"{ctx} tokens cannot be made {first:g} times smaller: measured up to {last:g} times", file=sys.stderr)
    config = bench.model.config.get_text_config(decoder=True)
    model = {
        "hash": fingerprint(bench.model),
        "description": f"transformers {config.model_type}",
        "transformers": model_facts(config),
    }
    mean = [[None if e is None else e / pieces for e in row] for row in sums]
    reached, about = [float(r) for r in ratios[: len(mean)]], dict(tokens=ctx, pieces=pieces, continuation=continuation)
    return LayerErrors(reached, mean, profile, model, **about)


def table(errors):
    """Markdown: what was measured, and the split at 10x and 20x."""
    ten, twenty = (solve(errors.ratios, errors.errors, keep) for keep in (0.1, 0.05))
    out = [
        "| layer | " + " | ".join(f"{r:g}x" for r in errors.ratios) + " | share of 10x | of 20x |",
        "|" + " --- |" * (len(errors.ratios) + 3),
    ]
    for i in range(errors.num_layers):
        if errors.errors[0][i] is not None:
            cells = " | ".join(f"{row[i]:.5f}" for row in errors.errors)
            out.append(f"| {i} | {cells} | {ten[i]:.2f} | {twenty[i]:.2f} |")
    return "\n".join(out)
