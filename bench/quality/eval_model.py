#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quality of compressed caches on a real model: retrieval, perplexity, KL divergence, top-1, at counted bytes.

    AKV_LIBRARY=.../libanchorkv.so PYTHONPATH=python bench/quality/eval_model.py --model MODEL.gguf --text TEXT.txt \\
        --ctx 27000 --samples 10 --methods bench/quality/methods.json --out out/agnostic.json

One prefill of a context serves all methods. Every layer's keys and values go through the C library (anchorkv, snapkv)
and come back decoded; the model then continues over them. Protocols: agnostic (default) - the context is compressed,
the question comes after; aware (--aware) - the question and the opening of the answer are part of the compressed prompt and
the first answer token comes from the exact prefill. Seeds: 1 for tuning, 1000 for figures that are reported.
"""

import argparse
import json
import math
import os
import random
import sys
import time

import numpy as np
import torch

import anchorkv
import rotated
import scoring
import tasks
from anchorkv import shares
from model import Model
from workers import SharedFile, Workers, view

WINDOW = 32  # observation queries of anchorkv
SNAPKV_WINDOW = 64  # of the eviction peer, as kvpress runs it
SAMPLED = 64  # further prompt queries a layer
SLOTS = 3  # decoded caches in flight: one is judged while the next are compressed
CONTINUATION = 256
INFEASIBLE = -20  # AKV_E_INFEASIBLE: the budget cannot hold the fixed part at this length


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="GGUF file, or a folder that transformers reads")
    p.add_argument("--model-cache", help="folder that keeps the unpacked model for the next run")
    p.add_argument("--text", required=True)
    p.add_argument("--methods", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "methods.json"))
    p.add_argument("--only", help="comma-separated method names of that file")
    p.add_argument("--ctx", type=int, default=12000)
    p.add_argument("--samples", type=int, default=2, help="samples of every task")
    p.add_argument("--first", type=int, default=0, help="number of the first sample, to continue an earlier run")
    p.add_argument("--continuations", type=int, default=0)
    p.add_argument("--tasks", default=",".join(tasks.TASKS))
    p.add_argument(
        "--layout",
        choices=("shared", "separate"),
        default="shared",
        help="one context carries all tasks (default), or one each",
    )
    p.add_argument("--aware", action="store_true")
    p.add_argument("--plain", action="store_true", help="no chat template around context and question")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--threads", type=int, default=os.cpu_count(), help="worker processes of the C library")
    p.add_argument("--limit", type=float, default=1e9, help="seconds after which no further context is begun")
    p.add_argument("--show", action="store_true", help="print what each row answered")
    p.add_argument("--out", required=True)
    return p.parse_args()


def expand(methods):
    """[(name, factor, specification)] of a methods file, dense first."""
    out = [("dense", None, {"kind": "full"})]
    for m in methods:
        for factor in m.get("factors") or [None]:
            for bits in m.get("bits") or [None]:
                out.append((m["name"] + (f" {bits} bits" if bits else ""), factor, {**m, "one_bits": bits}))
    return out


class Pipeline:
    """Runs the methods of one prompt in order; the C library works ahead on all cores while the device judges."""

    def __init__(self, model, workers):
        self.model, self.workers = model, workers
        self.input = SharedFile(workers.folder, "input")
        self.slots = [SharedFile(workers.folder, f"slot{i}") for i in range(SLOTS)]
        self.core_seconds = 0.0

    def _share(self, layers, sampled):
        """Put a prompt's captured arrays where the workers see them; [(layer's name -> description)]."""

        def host(x):
            x = x.contiguous()
            return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x.float()).cpu().numpy()

        size = (
            sum(x.numel() * x.element_size() for l in layers for x in l) + 64 * (4 * len(layers) + 1) + sampled.nbytes
        )
        self.input.reserve(size)
        at = 0

        def put(x):
            nonlocal at
            where = [at, x.dtype.str, list(x.shape)]
            view(self.input.bytes, where)[...] = x
            at = (at + x.nbytes + 63) // 64 * 64
            return where

        positions = put(sampled)
        return [{"at": positions, **{name: put(host(x)) for name, x in zip("kvqm", l)}} for l in layers]

    def _submit(self, slot, spec, factor, arrays, S, strength=1.0):
        m = self.model
        side = m.H * S * m.d  # floats
        before = self.slots[slot].bytes
        if self.slots[slot].reserve(m.num_layers * 2 * side * 4) and m.device == "cuda":
            if before is not None:  # a longer prompt: the new mapping may overlap the old one's addresses
                torch.cuda.cudart().cudaHostUnregister(before.ctypes.data)
            bytes_ = self.slots[slot].bytes  # pinned where the machine lets us: faster copies, nothing else
            torch.cuda.cudart().cudaHostRegister(bytes_.ctypes.data, bytes_.nbytes, 0)
        window = SNAPKV_WINDOW if spec["kind"] == "snapkv" else WINDOW
        split = [1.0] * m.num_layers
        if spec.get("shares"):
            measured = shares.LayerErrors.load(spec["shares"])
            split = shares.mixed(shares.solve(measured.ratios, measured.errors, 1 / factor), strength)
        futures = []
        for i, a in enumerate(arrays):
            options = {
                "rope_inv_freq": m.inv_freq.tolist(),
                "rope_magnitude": m.magnitude,
                "layer_index": i,
                "seed": spec.get("seed", 0),
                "profile": spec.get("profile", "default"),
                "overrides": spec.get("overrides"),
                "keep_ratio": min(1.0, split[i] / factor) if factor else 1.0,
                "method": {"anchorkv": "anchorkv", "snapkv": "snapkv", "identity": "dense"}[spec["kind"]],
            }
            futures.append(
                self.workers.submit(
                    {
                        "input": self.input.path,
                        "arrays": a,
                        "window": window,
                        "options": options,
                        "output": [self.slots[slot].path, i * 2 * side * 4, side],
                    }
                )
            )
        return futures

    def run(self, layers, sampled, S, methods):
        """Yields (name, factor, prefix on the device, bytes) for every method."""
        m = self.model
        arrays = self._share(layers, sampled)
        work = [i for i, (_, _, spec) in enumerate(methods) if spec["kind"] in ("anchorkv", "snapkv", "identity")]
        jobs = {}

        def submit(position):
            if position < len(work):
                _, factor, spec = methods[work[position]]
                jobs[work[position]] = position % SLOTS, self._submit(position % SLOTS, spec, factor, arrays, S)

        for position in range(SLOTS - 1):
            submit(position)
        for i, (name, factor, spec) in enumerate(methods):
            total = 0
            if spec["kind"] == "full":
                prefix = [(l[0].float(), l[1].float()) for l in layers]
                total = m.num_layers * 4 * m.H * S * m.d
            elif spec["kind"] == "rotated":
                prefix = []
                for j, l in enumerate(layers):
                    r = rotated.rotation_of(m.d, j, m.device)
                    prefix.append(tuple(rotated.quantise(x.float(), spec["one_bits"], r) for x in l[:2]))
                    total += rotated.bytes_of(m.H, S, m.d, spec["one_bits"])
            else:
                submit(work.index(i) + SLOTS - 1)
                slot, futures = jobs.pop(i)
                replies = [f.result() for f in futures]
                failed = next((r for r in replies if "error" in r), None)
                strength = 1.0
                while failed is not None and failed["status"] == INFEASIBLE and spec.get("shares") and strength > 0.1:
                    strength -= 0.25  # the smallest share would not hold its fixed part
                    print(f"   {name} {factor:g}x: shares at {strength:g} of their strength", flush=True)
                    replies = [f.result() for f in self._submit(slot, spec, factor, arrays, S, strength)]
                    failed = next((r for r in replies if "error" in r), None)
                if failed is not None:
                    if failed["status"] != INFEASIBLE:
                        raise SystemExit(f"{name} {factor}: {failed['error']}")
                    print(f"   {name} {factor:g}x left out: {failed['error']}", flush=True)
                    continue
                prefix, whole = [], torch.from_numpy(self.slots[slot].bytes)
                for j, r in enumerate(replies):
                    total += r["bytes"]
                    self.core_seconds += r["seconds"]
                    n, side = r["tokens"], m.H * S * m.d * 4
                    part = [whole[(2 * j + k) * side : (2 * j + k) * side + m.H * n * m.d * 4] for k in (0, 1)]
                    prefix.append(tuple(x.view(torch.float32).view(m.H, n, m.d).to(m.device) for x in part))
            yield name, factor, prefix, total


def judge_retrieval(model, prefix, start, questions, first, stop, show):
    """[(found, forced, text)] of questions over one prefix. `first`: the answer's first token when the prompt held the
    question (aware), else None."""
    rows = [q["ids"] for q in questions] if first is None else [[first] for _ in questions]
    length = max(len(q["answer_ids"]) for q in questions) + 16
    texts = [
        model.decode(([] if first is None else [first]) + ids)
        for ids in model.greedy(prefix, start, rows, length, stop)
    ]
    # Token by token: the true answer is fed; what the model expects next is compared.
    fed = [(q["ids"] if first is None else []) + q["answer_ids"] for q in questions]
    best = model.forced(prefix, start, fed)
    out = []
    for q, text, b in zip(questions, texts, best):
        n = len(q["answer_ids"])
        predicted = b[-n - 1 : -1] if first is None else [first] + b[:-1]
        out.append((scoring.found(text, q["answers"]), scoring.forced(predicted, q["answer_ids"], q["spans"]), text))
        if show:
            print(f"      {q['task']}: wanted {q['answers']}, got {text!r}", flush=True)
    return out


def main():
    a = arguments()
    began = time.time()
    # Whatever can be wrong with the arguments shows before the minute that the model takes.
    with open(a.text, encoding="utf-8", errors="ignore") as f:
        prose = f.read()
    with open(a.methods) as f:
        methods = json.load(f)
    if a.only:
        methods = [m for m in methods if m["name"] in a.only.split(",")]
    methods = expand(methods)
    os.makedirs(os.path.dirname(os.path.abspath(a.out)), exist_ok=True)
    model = Model(a.model, a.device, torch.bfloat16 if a.device == "cuda" else torch.float32, a.model_cache)
    before, after = model.frame(not a.plain)
    stop = model.stop_tokens()
    settings = {
        "model": os.path.basename(a.model),
        "protocol": "aware" if a.aware else "agnostic",
        "layout": a.layout,
        "ctx": a.ctx,
        "seed": a.seed,
        "chat": not a.plain,
        "window": WINDOW,
        "sampled_queries": SAMPLED,
        "library": anchorkv.version(),
        "device": torch.cuda.get_device_name() if a.device == "cuda" else "cpu",
        "threads": a.threads,
        "date": time.strftime("%Y-%m-%d"),
        "methods": methods,
    }
    print(
        f"loaded in {time.time() - began:.0f} s: {model.num_layers} layers, {model.H} KV heads x "
        f"{model.HQ // model.H}, "
        f"d = {model.d}; stop {stop}; {json.dumps({k: v for k, v in settings.items() if k != 'methods'})}",
        flush=True,
    )
    pipeline, samples = Pipeline(model, Workers(a.threads)), []

    def save():
        rows = scoring.summarise(samples)
        os.makedirs(os.path.dirname(os.path.abspath(a.out)), exist_ok=True)
        with open(a.out + ".tmp", "w") as f:
            json.dump({"settings": settings, "rows": rows, "samples": samples}, f, indent=1)
        os.replace(a.out + ".tmp", a.out)
        return rows

    # ------------------------------------------------- prompts: (sample, context tokens, questions or continuation)
    encode, chosen = model.encode, a.tasks.split(",")
    overhead = len(encode(before))
    prompts = []
    contexts = tasks.build_contexts(
        a.layout, chosen, a.first + a.samples, a.seed, a.ctx - overhead, prose, encode, model.decode
    )
    per_sample = len(contexts) // max(1, a.first + a.samples)
    for i, context in enumerate(contexts[a.first * per_sample :]):
        questions = []
        for q in context.questions:
            answer_ids = encode(" " + ", ".join(q.answers))
            questions.append(
                {
                    "task": q.task,
                    "answers": q.answers,
                    "answer_ids": answer_ids,
                    "ids": encode(
                        f"\n\nQuestion: {q.ask}{after}{q.opening}"
                        if after
                        else f"\n\nQuestion: {q.ask}\nAnswer: {q.opening}"
                    ),
                    "spans": scoring.value_spans([model.decode([t]) for t in answer_ids], q.answers),
                }
            )
        ids = encode(before + context.text)
        sample = a.first + i // per_sample
        if a.aware:  # every question makes a prompt of its own
            prompts += [(sample, ids + q["ids"], [q]) for q in questions]
        else:
            prompts.append((sample, ids, questions))
    for i in range(a.first, a.first + a.continuations):
        rng = random.Random(f"{a.seed}/continuation/{i}")
        length = a.ctx + CONTINUATION
        start = rng.randrange(0, len(prose) - length * 8)
        ids = encode(prose[start : start + length * 8])[:length]
        prompts.append((i, ids[: a.ctx], ids[a.ctx :]))

    # ------------------------------------------------------------------ run
    longest = 0.0
    for number, (sample, ids, what) in enumerate(prompts):
        if time.time() - began + longest > a.limit:
            print(f"stopped before prompt {number} of {len(prompts)}: the limit of {a.limit:.0f} s is near", flush=True)
            break
        started, S, plain = time.time(), len(ids), not isinstance(what[0], dict)
        layers, sampled, logits = model.prefill(ids, SNAPKV_WINDOW, SAMPLED)
        first = int(logits.argmax()) if a.aware and not plain else None
        kind = "continuation" if plain else "+".join(q["task"] for q in what)
        print(
            f"[{time.time() - began:6.1f} s] prompt {number + 1}/{len(prompts)}, sample {sample}, {S} tokens, {kind}; "
            f"prefill {time.time() - started:.1f} s",
            flush=True,
        )
        dense_bytes, reference = model.num_layers * 4 * model.H * S * model.d, None
        pipeline.core_seconds = 0.0
        for name, factor, prefix, total in pipeline.run(layers, sampled, S, methods):
            row = {"method": name, "factor": factor, "sample": sample, "bytes": total, "dense_bytes": dense_bytes}
            if plain:
                lp = model.log_probs(prefix, S, what)[:-1]
                target = torch.tensor(what[1:], device=lp.device)
                nll = float(-lp.gather(1, target[:, None]).mean())
                if reference is None:
                    reference, dense_nll = lp, nll
                kld = float((reference.exp() * (reference - lp)).sum(-1).mean())
                top1 = float((reference.argmax(-1) == lp.argmax(-1)).float().mean())
                samples.append(
                    {**row, "task": "continuation", "nll": nll, "dense_nll": dense_nll, "kld": kld, "top1": top1}
                )
                text = f"nll {nll:.4f}, KLD {kld:.5f}, top-1 {top1:.3f}"
            else:
                scores = judge_retrieval(model, prefix, S, what, first, stop, a.show)
                for q, (found, forced, answer) in zip(what, scores):
                    samples.append({**row, "task": q["task"], "found": found, "forced": forced, "answer": answer})
                text = (
                    "found "
                    + " ".join(f"{s[0]:.2f}" for s in scores)
                    + "  forced "
                    + " ".join(f"{s[1]:.2f}" for s in scores)
                )
            print(
                f"   {name[:22]:22} {(format(factor, 'g') + 'x') if factor else '':>5} {dense_bytes / total:6.2f}x  "
                f"{text}  "
                f"[{time.time() - started:.1f} s]",
                flush=True,
            )
            del prefix
        longest = max(longest, time.time() - started)
        print(
            f"   prompt took {time.time() - started:.1f} s; the C library {pipeline.core_seconds:.1f} core seconds",
            flush=True,
        )
        save()
    rows = save()
    print(
        f"\n{settings['model']}, {settings['protocol']}, {a.ctx} tokens, seed {a.seed}, layout {a.layout}\n"
        + scoring.table(rows)
    )
    print(f"{time.time() - began:.0f} s in all; {a.out}")


if __name__ == "__main__":
    sys.exit(main())
