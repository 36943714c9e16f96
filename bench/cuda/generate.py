# SPDX-License-Identifier: Apache-2.0
"""A whole model on the GPU through transformers' `generate`: AnchorKVCache beside DynamicCache, speed and memory.

usage: generate.py [--tokens 27000] [--ratio 20] [--new 16] [--rounds 40] [--pin 4] [--profile] [--attention sdpa,flash]
                   [--ratio-of device] [--ours plain,graphs]

The model has the shape of Qwen2.5-1.5B and random weights, bfloat16: enough for time and memory, not for quality. All
caches read the same prompt; then `generate` goes on from each in turn, the dense one with every attention that torch
has for it (--attention): "sdpa" as torch chooses, or one back end alone; ours plainly and with graphs=True. Time is
from the call to its end, the device idle at both; memory is what torch's allocator has handed out. A step is time of
the processor, which differs from moment to moment: so turns are short and many, everybody comes once a round, in
another order each time, and what is compared are the times of one round.
"""
import argparse
import contextlib
import cProfile
import gc
import os
import pstats
import random
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from anchorkv import AnchorKVCache

MIB = 1 << 20
OURS = {"plain": False, "graphs": True}  # AnchorKVCache(graphs=...)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
SHAPE = dict(
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    vocab_size=151936,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)


def attending(name):
    return contextlib.nullcontext() if name in ("sdpa", *OURS) else sdpa_kernel([BACKENDS[name]])


def usable(model, ids, name):
    """Has torch such a kernel for this model? Tried on a cache of its own: a failing step leaves one half filled."""
    try:
        with attending(name), torch.inference_mode():
            cache = DynamicCache(config=model.config)
            for piece in (ids[:, :100], ids[:, 100:101]):
                model(piece, past_key_values=cache)
    except RuntimeError as error:
        print(f"{name}: cannot ({str(error).splitlines()[0][:100]})", flush=True)
        return False
    return True


def timed(run):
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = run()
    torch.cuda.synchronize()
    return time.perf_counter() - began, out


def read(model, ids, cache):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        seconds, _ = timed(lambda: model(ids, past_key_values=cache, logits_to_keep=1))
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    name = type(cache).__name__
    print(f"{name}: prompt {seconds:.2f} s, holds {held / MIB:.1f} MiB after it, peak {peak / MIB:.1f} MiB", flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--tokens", type=int, default=27000)
    p.add_argument("--ratio", type=float, default=20.0)
    p.add_argument("--ratio-of", default="file", choices=("file", "device"))
    p.add_argument("--ours", default="plain,graphs", help="AnchorKVCache: " + ", ".join(OURS))
    p.add_argument("--new", type=int, default=16, help="tokens of a turn")
    p.add_argument("--rounds", type=int, default=40)
    p.add_argument("--pin", type=int, help="the processor's core that generates")
    p.add_argument("--attention", default="sdpa,flash", help="of the dense cache: sdpa, " + ", ".join(BACKENDS))
    p.add_argument("--profile", action="store_true")
    a = p.parse_args()
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **SHAPE)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    ids = torch.randint(1, 150000, (1, a.tokens), device="cuda")  # no padding: a mask would cost the dense cache its kernel
    options = dict(do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        model.generate(ids[:, :100], max_new_tokens=8, **options)  # what libraries set up once
    caches, sequences = {"dense": DynamicCache(config=config)}, {}
    for name in a.ours.split(","):
        caches[name] = AnchorKVCache(config, ratio=a.ratio, ratio_of=a.ratio_of, graphs=OURS[name])
    for name, cache in caches.items():
        read(model, ids, cache)
        begun, more = torch.cuda.memory_allocated(), torch.cat((ids, ids[:, :1]), 1)
        sequences[name] = model.generate(more, past_key_values=cache, max_new_tokens=16, **options)
        print(f"  16 tokens later {(torch.cuda.memory_allocated() - begun) / MIB:+.1f} MiB", flush=True)
    dense = (a.tokens + 16) * config.num_hidden_layers * 2 * 128 * 2 * 2
    for name in a.ours.split(","):
        held, report = caches[name].nbytes(), caches[name].report()
        print(f"keys and values {dense / MIB:.1f} MiB; {name} {held / MIB:.2f} MiB, 1/{dense / held:.2f}; compressed on "
              f"{report['compressed_on']}, why by the CPU: {report['why_cpu']}")
        print(f"of it segments {report['device_bytes'] / MIB:.2f} MiB (in the file's form "
              f"{report['segment_bytes'] / MIB:.2f}), the rest a tail of {report['tail_tokens']} tokens, queries, work space",
              flush=True)
    names = [name for name in a.attention.split(",") if usable(model, ids, name)] + a.ours.split(",")
    if a.pin is not None:
        os.sched_setaffinity(0, {a.pin})

    def turn(name):
        kind = name if name in OURS else "dense"
        whole = torch.ones_like(sequences[kind])
        model.config._attn_implementation = "anchorkv" if name in OURS else "sdpa"  # no detour for the peer
        with attending(name):
            seconds, sequences[kind] = timed(
                lambda: model.generate(
                    sequences[kind], attention_mask=whole, past_key_values=caches[kind], max_new_tokens=a.new, **options
                )
            )
        return seconds / a.new

    steps, order = {name: [] for name in names}, random.Random(1)
    for name in names:
        turn(name)
    for _ in range(a.rounds):
        for name in order.sample(names, len(names)):
            steps[name].append(turn(name))
    for name, x in steps.items():
        q = statistics.quantiles(x, n=20)
        print(f"{name}: {1e3 * statistics.median(x):.2f} ms a token, {1 / statistics.median(x):.1f} tokens/s, median of "
              f"{len(x)} turns of {a.new}; 90 % of them within {1e3 * q[0]:.2f} .. {1e3 * q[-1]:.2f} ms", flush=True)
    best = min((name for name in names if name not in OURS), key=lambda name: statistics.median(steps[name]))
    for name in a.ours.split(","):
        ratios = [theirs / ours for theirs, ours in zip(steps[best], steps[name])]
        drawn = sorted(statistics.median(order.choices(ratios, k=len(ratios))) for _ in range(2000))
        print(f"AnchorKVCache ({name}) is {statistics.median(ratios):.3f} times DynamicCache at its best ({best}), 90 % range "
              f"of that median {drawn[100]:.3f} .. {drawn[1900]:.3f}; of rounds "
              f"{min(ratios):.2f} .. {max(ratios):.2f}", flush=True)
    if a.profile:
        for name in (best, *a.ours.split(",")):
            profile = cProfile.Profile()
            profile.enable()
            for _ in range(2):
                turn(name)
            profile.disable()
            print(name)
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)


main()
