# SPDX-License-Identifier: Apache-2.0
"""What each part of the codec is worth: its removal measured on a text, at equal bytes, beside the whole.

A piece is read once with exact attention; every variant compresses that cache. `error` is the relative squared error of
the layers' attention outputs while the model reads on from the exact cache (mean over layers; no error reaches a later
layer). KLD, top-1 and perplexity are of the model reading on from the variant's cache alone.
"""

import random
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

from ..transformers_cache import AnchorKVCache
from ..transformers_cache.cache import shared_budget
from .calibrate import Comparing, comparing_cache
from .report import mean

# (name, profile, what is removed from or changed in the profile); the profile itself comes first.
VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("paper", "paper", {}),
    ("rank by cosine", "paper", {"rank": "cosine"}),
    ("rank by residual norm", "paper", {"rank": "norm"}),
    ("rank by attention", "paper", {"rank": "attention"}),
    ("rank at random", "paper", {"rank": "random"}),
    ("anchors after the rotary embedding", "paper", {"anchor_space": "post_rope"}),
    ("no random anchors", "paper", {"no_random_anchors": 1}),
    ("random anchors only", "paper", {"rho": 0.0}),
    ("equal budgets of the heads", "paper", {"equal_head_budgets": 1}),
    ("no rotation, uniform levels", "paper", {"code_rule": "plain_uniform"}),
    ("least-squares scale", "paper", {"scale_rule": "least_squares"}),
    ("no residuals (fewer bytes)", "paper", {"anchors_only": 1}),
    ("default", "default", {}),
    ("no sinks", "default", {"sinks": 0}),
    ("a quarter of the anchors", "default", {"tokens_per_anchor": 128}),
    ("free anchors at random", "default", {"uniform_anchors": 1}),
    ("no centroids", "default", {"anchor_rounds": 0}),
    ("no key basis", "default", {"slow_angle": 0.0}),
    ("no query weighting", "default", {"query_mix": 1.0}),
    ("one level of 108 bits", "default", {"level_bits": [108]}),
    ("no pooled utility", "default", {"pool_weight": 0.0}),
    ("observed key error only", "default", {"incoherent": 0.0}),
    ("no prior", "default", {"floor": 0.0}),
    ("no value boost", "default", {"value_boost": 1.0}),
)
BINS = 10


def before_rotation(keys, positions, rope):
    """Keys [H, n, d] after the rotary embedding -> before it (up to its magnitude)."""
    angle = positions[:, None].double() * torch.from_numpy(rope.inv_freq)
    cos, sin, d = angle.cos(), angle.sin(), rope.dim
    out = keys.double().clone()
    halves = (slice(0, d // 2), slice(d // 2, d)) if rope.style == "half_split" else (slice(0, d, 2), slice(1, d, 2))
    a, b = (out[..., h].clone() for h in halves)
    out[..., halves[0]], out[..., halves[1]] = a * cos + b * sin, b * cos - a * sin
    return out.float()


def paper_anchors(queries, keys, scale, generator, rho=0.7, pool=7):
    """[H, k] positions that profile paper takes as anchors: the window, the most attended, the rest at random."""
    H, n, d = keys.shape
    window = queries.shape[1]
    k = min(n, max(n // 128, window + window // 2))
    logits = queries.view(H, -1, window, d) @ keys[:, None].transpose(2, 3) * scale
    late = torch.arange(n) > torch.arange(n - window, n)[:, None]
    score = logits.masked_fill(late, float("-inf")).softmax(-1).sum(2).mean(1)[:, : n - window]
    score = torch.nn.functional.avg_pool1d(score[:, None], pool, 1, pool // 2)[:, 0]
    top = int(rho * (k - window))
    out = []
    for h in range(H):
        order = score[h].argsort(descending=True)
        rest = order[top:][torch.randperm(n - window - top, generator=generator)[: k - window - top]]
        out.append(torch.cat((torch.arange(n - window, n), order[:top], rest)))
    return torch.stack(out)


def cosines(keys, anchors):
    """|cosine| of every other key [H, n, d] to its nearest anchor [H, k]."""
    out = []
    for x, at in zip(keys, anchors):
        unit = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-20)
        others = torch.ones(len(x), dtype=torch.bool)
        others[at] = False
        out.append((unit[others] @ unit[at].T).abs().amax(1))
    return torch.cat(out)


class Observing(Comparing):
    """Also looks at how near keys are to their anchors before and after the rotary embedding; same anchors for both."""

    nearest = None

    def _compress_aside(self):
        keys, queries = self._k[0, :, : self.n].float(), self.last_queries()[0, :, -self.settings.window :].float()
        generator = torch.Generator().manual_seed(self.index)
        anchors = paper_anchors(queries, keys, self.sm_scale, generator)
        turned_back = before_rotation(keys, self._tail_positions()[0].cpu(), self.rope)
        self.nearest = cosines(turned_back, anchors), cosines(keys, anchors)
        super()._compress_aside()


def variants_of(model, ratio, shares=None):
    """[(name, settings of the codec)]"""
    out = []
    for name, profile, overrides in VARIANTS:
        out.append((name, dict(keep_ratio=1 / ratio, profile=profile, overrides=overrides or None, shared=None)))
    if shares:
        config = model.config.get_text_config(decoder=True)
        budget = shared_budget(shares, config, 1 / ratio, "default")
        out.append(("with layer shares", dict(keep_ratio=1 / ratio, profile="default", overrides=None, shared=budget)))
    return out


def read_on(model, segments, layers, continuation, prompt):
    """Logits [n, vocabulary] over the continuation, from a cache that holds these segments."""
    cache = AnchorKVCache(model.config, ratio=1, when="manual", tail_limit=1 << 30)
    for layer, (segment, like) in zip(cache.hosted, zip(segments, layers)):
        layer.adopt([segment], model, SimpleNamespace(sm_scale=like.sm_scale, logit_softcap=like.softcap))
        layer.sinks = like.sinks
    at = torch.arange(prompt, prompt + continuation.shape[1])[None]
    return model(continuation, past_key_values=cache, position_ids=at).logits[0]


@torch.inference_mode()
def piece(model, ids, continuation, variants):
    """(records, how near keys are): one record a variant."""
    cache, layers = comparing_cache(model, [settings for _, settings in variants], Observing)
    model(ids, past_key_values=cache, logits_to_keep=1)
    for layer in layers:
        if len(layer.segments) < len(variants):
            name = variants[len(layer.segments)][0]
            raise ValueError(f"{ids.shape[1]} tokens cannot hold the variant {name!r} so small; give a larger --ctx")
    prompt = ids.shape[1]
    at = torch.arange(prompt, prompt + continuation.shape[1])[None]
    exact = torch.log_softmax(model(continuation, past_key_values=cache, position_ids=at).logits[0, :-1].float(), -1)
    wanted, records = continuation[0, 1:, None], []
    for i, (name, _) in enumerate(variants):
        segments = [layer.segments[i] for layer in layers]
        ours = read_on(model, segments, layers, continuation, prompt)[:-1].float().log_softmax(-1)
        records.append(
            dict(
                method=name,
                error=mean([layer.error[i] / layer.energy for layer in layers]),
                kld=float((exact.exp() * (exact - ours)).sum(1).mean()),
                top1=float((exact.argmax(1) == ours.argmax(1)).float().mean()),
                nll=-float(ours.gather(1, wanted).mean()),
                dense_nll=-float(exact.gather(1, wanted).mean()),
                bytes=sum(s.nbytes for s in segments),
                dense_bytes=sum(s.info()["dense_bytes"] for s in segments),
            )
        )
    near = []
    for side in range(2):
        x = torch.stack([layer.nearest[side].quantile(torch.tensor([0.1, 0.5, 0.9])) for layer in layers]).mean(0)
        bins = torch.stack([torch.histc(y := layer.nearest[side], BINS, 0, 1) / y.numel() for layer in layers])
        near.append({"quantiles": x.tolist(), "bins": bins.mean(0).tolist()})
    return records, {"method": "cosine", "before": near[0], "after": near[1]}


def run(bench, log, text, ctx, samples, seed, length, ratio, shares=None):
    ids = bench.encode(text)
    if len(ids) < ctx + length:
        raise SystemExit(f"the text has {len(ids)} tokens; {ctx} + {length} are needed")
    variants = variants_of(bench.model, ratio, shares)
    for i in tqdm(range(samples), disable=None):
        common = {"task": "ablation", "ctx": ctx, "sample": i, "protocol": "agnostic"}
        missing = [v for v in variants if log.key({**common, "method": v[0]}) not in log.done]
        if not missing:
            continue
        start, began = random.Random(f"{seed}/ppl/{i}").randrange(len(ids) - ctx - length + 1), time.time()
        at = torch.tensor([ids[start : start + ctx + length]])
        records, near = piece(bench.model, at[:, :ctx], at[:, ctx:], missing)
        for r in [*records, near]:
            log.write({**common, **r})
        print(f"piece {i + 1} of {samples}, {time.time() - began:.0f} s", file=sys.stderr)


def markdown(records):
    """The table of a log, and the cosines."""
    out, base = [], None
    head = ["", "bytes", "attention error", "of the profile's", "KLD", "of the profile's", "+-", "top-1", "n"]
    out += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name in dict.fromkeys(r["method"] for r in records if r["method"] != "cosine"):
        mine = [r for r in records if r["method"] == name]
        error, kld = mean([r["error"] for r in mine]), mean([r["kld"] for r in mine])
        if name in ("paper", "default"):
            base = {r["sample"]: r for r in mine}
            whole, name = (error, kld), f"**profile {name}**"
        # Variants see the same pieces: the ratio's spread over pieces says more than that of the divergence.
        each = [r["kld"] / base[r["sample"]]["kld"] for r in mine if base and r["sample"] in base]
        spread = ""
        if len(each) > 1:
            spread = f"{(mean([(x - mean(each)) ** 2 for x in each]) / (len(each) - 1)) ** 0.5:.2f}"
        ratio = sum(r["dense_bytes"] for r in mine) / sum(r["bytes"] for r in mine)
        out.append(
            f"| {name} | 1/{ratio:.2f} | {error:.5f} | {error / whole[0]:.2f} | {kld:.4f} | {kld / whole[1]:.2f} | "
            f"{spread} | {mean([r['top1'] for r in mine]):.3f} | {len(mine)} |"
        )
    near = [r for r in records if r["method"] == "cosine"]
    if near:
        out += ["", "|cosine| of a key to its nearest anchor, share of the keys (mean over layers)", ""]
        out[-2] = out[-2].replace("|", "\\|")
        edges = [f"{b / BINS:.1f}..{(b + 1) / BINS:.1f}" for b in range(BINS)]
        head = ["keys", "10 %", "median", "90 %", *edges]
        out += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        for side, words in (("before", "before the rotary embedding"), ("after", "after it")):
            quantiles = [mean([r[side]["quantiles"][q] for r in near]) for q in range(3)]
            bins = [mean([r[side]["bins"][b] for r in near]) for b in range(BINS)]
            cells = [f"{q:.2f}" for q in quantiles] + [f"{100 * b:.0f} %" for b in bins]
            out.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(out)
