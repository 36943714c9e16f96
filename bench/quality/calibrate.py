#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much each layer's compression disturbs the model's output, and the shares of a common budget that follow.

    AKV_LIBRARY=.../libanchorkv.so PYTHONPATH=python bench/quality/calibrate.py --model MODEL.gguf --text TEXT.txt \\
        --ctx 27000 --pieces 1 --contexts 1 --out out/shares.json

What `akv calibrate` and `python -m anchorkv.bench calibrate` do, for models that want a GPU: while the model goes on
from the exact cache, every layer attends with the same queries to compressed caches too; kept is the relative squared
error of its output. It goes on with plain text (--pieces) and with questions and their answers (--contexts); both kinds count alike. Seed 1 for shares; figures
are reported on other text. Methods of eval_model.py take the file as "shares".
"""

import argparse
import json
import os
import random
import sys
import time

import numpy as np
import torch

import tasks
from anchorkv import shares
from eval_model import CONTINUATION, SAMPLED, SNAPKV_WINDOW, Pipeline
from model import STATE, Model
from workers import Workers


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

    prompts = []  # (kind, prefix tokens, rows)
    for i in range(a.pieces):
        rng = random.Random(f"{a.seed}/continuation/{i}")
        length = a.ctx + CONTINUATION
        start = rng.randrange(0, len(prose) - length * 8)
        ids = model.encode(prose[start : start + length * 8])[:length]
        prompts.append(("text", ids[: a.ctx], [ids[a.ctx :]]))
    overhead = len(model.encode(before))
    contexts = tasks.build_contexts(
        "shared", list(tasks.TASKS), a.contexts, a.seed, a.ctx - overhead, prose, model.encode, model.decode
    )
    for c in contexts:
        rows = []
        for q in c.questions:
            ask = f"\n\nQuestion: {q.ask}{after}{q.opening}" if after else f"\n\nQuestion: {q.ask}\nAnswer: {q.opening}"
            rows.append(model.encode(ask) + model.encode(" " + ", ".join(q.answers)))
        prompts.append(("retrieval", model.encode(before + c.text), rows))

    L = model.num_layers
    count = {"text": a.pieces, "retrieval": len(contexts)}
    error = {kind: np.zeros((len(ratios), L)) for kind in count}
    for kind, ids, rows in prompts:
        layers, sampled, _ = model.prefill(ids, SNAPKV_WINDOW, SAMPLED)
        caches = [  # copies: on a CPU the pipeline's memory is used again
            [tuple(x if x.is_cuda else x.clone() for x in layer) for layer in prefix]
            for _, _, prefix, _ in pipeline.run(layers, sampled, len(ids), methods)
        ]
        if len(caches) != len(methods):
            raise SystemExit(f"{a.ctx} tokens cannot be made {ratios[-1]:g} times smaller; give smaller --ratios")
        model.begin(caches[0], len(rows))
        STATE.compared, STATE.errors = caches[1:], {}
        with torch.inference_mode():
            model.step(*model._padded(rows, len(ids)))
        STATE.compared = None
        error[kind] += np.array([STATE.errors[layer] for layer in range(L)]).T / count[kind]
        print(f"[{time.time() - began:.0f} s] {kind}: sum over layers so far", (error[kind].sum(1)).round(4).tolist(), flush=True)
        del layers, caches
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
        "errors_by_kind": {k: error[k].tolist() for k in kinds},
    }
    with open(a.out, "w") as f:
        json.dump(report, f, indent=1)
    for target in (10, 20):
        print(f"shares at {target}x", " ".join(f"{x:.2f}" for x in shares.solve(ratios, errors, 1 / target)))
    print(f"{time.time() - began:.0f} s; {a.out}")


if __name__ == "__main__":
    sys.exit(main())
