#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much each layer's compression disturbs the model's output, and the shares of a common budget that follow.

    AKV_LIBRARY=.../libanchorkv.so PYTHONPATH=python bench/quality/calibrate.py --model MODEL.gguf --text TEXT.txt \\
        --ctx 27000 --pieces 1 --contexts 1 --out out/shares.json

One layer at a time is replaced by its compressed form, all others stay exact. Measured on continuations of plain text
(--pieces) and on the answers of retrieval questions (--contexts): the relative squared error of that layer's attention
output ("errors", what shares are made of), and the Kullback-Leibler divergence of the next token ("kld", to look at: 16-bit
models have a noise of their own there). Seed 1 for shares; figures are reported on other text. What `akv calibrate` does on
llama.cpp, for models that want a GPU; methods of eval_model.py take the file as "shares".
"""

import argparse
import json
import os
import random
import sys
import time

import numpy as np
import torch

import shares
import tasks
from eval_model import CONTINUATION, SAMPLED, SNAPKV_WINDOW, Pipeline
from model import STATE, Model
from workers import Workers

class Judge:
    """Divergence of rows of forced tokens from the dense reference, and each layer's attention output."""

    def __init__(self, model, start, rows, counted):
        self.model, self.start, self.rows, self.counted = model, start, rows, counted

    def log_probs(self, prefix):
        m = self.model
        m.begin(prefix, len(self.rows))
        STATE.outputs = {}
        with torch.inference_mode():
            logits = m.step(*m._padded(self.rows, self.start))
        picked = [torch.log_softmax(logits[b, -1 - n : -1].float(), -1) for b, n in enumerate(self.counted)]
        return torch.cat(picked), STATE.outputs

    def reference(self, prefix):
        self.dense, self.outputs = self.log_probs(prefix)

    def compare(self, prefix, layer):
        lp, outputs = self.log_probs(prefix)
        kld = float((self.dense.exp() * (self.dense - lp)).sum(-1).mean())
        if layer is None:
            return kld, 0.0
        a, b = self.outputs[layer].float(), outputs[layer].float()
        return kld, float(((a - b) ** 2).sum() / (a**2).sum())


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--model-cache")
    p.add_argument("--text", required=True)
    p.add_argument("--ctx", type=int, default=4096)
    p.add_argument("--pieces", type=int, default=2)
    p.add_argument("--contexts", type=int, default=0)
    p.add_argument("--ratios", default="4,7,10,14,20,28,40")
    p.add_argument("--profile", default="default")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--plain", action="store_true")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--out", required=True)
    a = p.parse_args()
    began = time.time()
    with open(a.text, encoding="utf-8", errors="ignore") as f:
        prose = f.read()
    ratios = [float(r) for r in a.ratios.split(",")]
    methods = [("dense", None, {"kind": "full"})]
    methods += [(a.profile, r, {"kind": "anchorkv", "profile": a.profile}) for r in ratios]
    model = Model(a.model, a.device, torch.bfloat16 if a.device == "cuda" else torch.float32, a.model_cache)
    pipeline = Pipeline(model, Workers(a.threads))
    before, after = model.frame(not a.plain)

    prompts = []  # (kind, prefix tokens, rows, tokens counted of each row)
    for i in range(a.pieces):
        rng = random.Random(f"{a.seed}/continuation/{i}")
        length = a.ctx + CONTINUATION
        start = rng.randrange(0, len(prose) - length * 8)
        ids = model.encode(prose[start : start + length * 8])[:length]
        prompts.append(("text", ids[: a.ctx], [ids[a.ctx :]], [CONTINUATION - 1]))
    overhead = len(model.encode(before))
    contexts = tasks.build_contexts(
        "shared", list(tasks.TASKS), a.contexts, a.seed, a.ctx - overhead, prose, model.encode, model.decode
    )
    for c in contexts:
        rows, counted = [], []
        for q in c.questions:
            answer = model.encode(" " + ", ".join(q.answers))
            ask = f"\n\nQuestion: {q.ask}{after}{q.opening}" if after else f"\n\nQuestion: {q.ask}\nAnswer: {q.opening}"
            rows.append(model.encode(ask) + answer)
            counted.append(len(answer))
        prompts.append(("retrieval", model.encode(before + c.text), rows, counted))

    L = model.num_layers
    kld = {kind: np.zeros((len(ratios), L)) for kind in ("text", "retrieval")}
    error = {kind: np.zeros((len(ratios), L)) for kind in ("text", "retrieval")}
    count = {"text": a.pieces, "retrieval": len(contexts)}
    for kind, ids, rows, counted in prompts:
        layers, sampled, _ = model.prefill(ids, SNAPKV_WINDOW, SAMPLED)
        judge, dense = Judge(model, len(ids), rows, counted), None
        for _, factor, prefix, _ in pipeline.run(layers, sampled, len(ids), methods):
            if factor is None:
                dense = list(prefix)
                judge.reference(dense)
                continue
            j = ratios.index(factor)
            for l in range(L):
                one = list(dense)
                one[l] = prefix[l]
                x, y = judge.compare(one, l)
                kld[kind][j, l] += x / count[kind]
                error[kind][j, l] += y / count[kind]
            whole = judge.compare(prefix, None)[0]
            print(f"[{time.time() - began:.0f} s] {kind} {factor:g}x: together {whole:.5f}, sum of layers so far "
                  f"{kld[kind][j].sum():.5f}", flush=True)
        del layers, judge, dense
    kinds = [k for k in count if count[k]]
    errors = np.mean([error[k] for k in kinds], 0)  # every kind of prompt counts alike
    report = {
        "format": "anchorkv-layer-errors",
        "version": 1,
        "model": {"description": os.path.basename(a.model), "num_layers": L},
        "profile": a.profile,
        "tokens": a.ctx,
        "pieces": a.pieces,
        "contexts": len(contexts),
        "ratios": ratios,
        "errors": errors.tolist(),
        "kld": {k: kld[k].tolist() for k in kinds},
        "errors_by_kind": {k: error[k].tolist() for k in kinds},
    }
    with open(a.out, "w") as f:
        json.dump(report, f, indent=1)
    for target in (10, 20):
        print(f"shares at {target}x", " ".join(f"{x:.2f}" for x in shares.solve(ratios, errors, 1 / target)))
    print(f"{time.time() - began:.0f} s; {a.out}")


if __name__ == "__main__":
    sys.exit(main())
