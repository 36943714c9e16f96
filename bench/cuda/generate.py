# SPDX-License-Identifier: Apache-2.0
"""A whole model on the GPU through transformers' `generate`: AnchorKVCache beside DynamicCache, speed and memory.

usage: generate.py [--tokens 27000] [--ratio 20] [--new 128] [--rounds 3] [--profile] [--attention sdpa,flash]
                   [--ratio-of device] [--graphs]

The model has the shape of Qwen2.5-1.5B and random weights, bfloat16: enough for time and memory, not for quality. Both
caches read the same prompt; then `generate` goes on from each in turn, the dense one with every attention that torch
has for it (--attention): "sdpa" as torch chooses, or one back end alone. Time is from the call to its end, the device
idle at both; memory is what torch's allocator has handed out.
"""
import argparse
import contextlib
import cProfile
import gc
import pstats
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from anchorkv import AnchorKVCache

MIB = 1 << 20
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
    return contextlib.nullcontext() if name in ("sdpa", "ours") else sdpa_kernel([BACKENDS[name]])


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
    p.add_argument("--graphs", action="store_true", help="AnchorKVCache(graphs=True)")
    p.add_argument("--new", type=int, default=128)
    p.add_argument("--rounds", type=int, default=3)
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
    caches, sequences = {}, {}
    ours = AnchorKVCache(config, ratio=a.ratio, ratio_of=a.ratio_of, graphs=a.graphs)
    for name, cache in (("dense", DynamicCache(config=config)), ("ours", ours)):
        read(model, ids, cache)
        caches[name] = cache
        begun, more = torch.cuda.memory_allocated(), torch.cat((ids, ids[:, :1]), 1)
        sequences[name] = model.generate(more, past_key_values=cache, max_new_tokens=16, **options)
        print(f"  16 tokens later {(torch.cuda.memory_allocated() - begun) / MIB:+.1f} MiB", flush=True)
    dense = (a.tokens + 16) * config.num_hidden_layers * 2 * 128 * 2 * 2
    held = caches["ours"].nbytes()
    report = caches["ours"].report()
    print(f"keys and values {dense / MIB:.1f} MiB; ours {held / MIB:.2f} MiB, 1/{dense / held:.2f}", flush=True)
    print(f"compressed on {report['compressed_on']}, why by the CPU: {report['why_cpu']}")
    print(f"of it segments {report['device_bytes'] / MIB:.2f} MiB (in the file's form {report['segment_bytes'] / MIB:.2f}), "
          f"the rest a tail of {report['tail_tokens']} tokens, queries, work space", flush=True)
    steps = {name: [] for name in [*a.attention.split(","), "ours"] if name == "ours" or usable(model, ids, name)}
    for turn in range(a.rounds):
        for name in list(steps):
            kind = "ours" if name == "ours" else "dense"
            whole = torch.ones_like(sequences[kind])
            model.config._attn_implementation = "anchorkv" if name == "ours" else "sdpa"  # no detour for the peer
            with attending(name):
                seconds, sequences[kind] = timed(
                    lambda: model.generate(
                        sequences[kind],
                        attention_mask=whole,
                        past_key_values=caches[kind],
                        max_new_tokens=a.new,
                        **options,
                    )
                )
            steps[name].append(seconds / a.new)
            print(f"{name}: {a.new} tokens, {1e3 * steps[name][-1]:.2f} ms a token", flush=True)
    rates = {name: 1 / statistics.median(x) for name, x in steps.items()}
    best = max((name for name in rates if name != "ours"), key=rates.get)
    print("tokens/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
    print(f"AnchorKVCache is {rates['ours'] / rates[best]:.3f} times DynamicCache at its best ({best})", flush=True)
    if a.profile:
        for name in (best, "ours"):
            kind = "ours" if name == "ours" else "dense"
            profile = cProfile.Profile()
            model.config._attn_implementation = "anchorkv" if name == "ours" else "sdpa"
            with attending(name):
                profile.enable()
                model.generate(sequences[kind], past_key_values=caches[kind], max_new_tokens=32, **options)
                profile.disable()
            print(name)
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)


main()
