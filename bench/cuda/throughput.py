# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a whole decode step when the caches of a batch may take so many bytes: compressed against dense.

usage: throughput.py LIBRARY SEGMENT [GIB [TAIL]]     GIB (17.5) for the caches of all layers, TAIL (128) exact tokens behind each segment

The step is a Llama-3.1-8B-shaped model's, with random weights: 32 layers of norm, q/k/v, attention over the cache, output, norm, gated MLP;
then the head of 128,256 tokens; bf16, one CUDA graph, median of 12 replays. Each side gets the largest batch whose caches fit. Memory of one
layer stands for all layers, weights and caches alike: at these sizes nothing of a layer is left in L2 when the next one reads it,
and the bytes of 32 layers are counted. Both sides do the same work but for attention: neither appends the new token. Weights and work space are not part of the
budget; the work space, the same for all layers of ours, is printed.
"""
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import decode

LAYERS, HIDDEN, INNER, VOCABULARY = 32, 4096, 14336, 128256


class Model:
    def __init__(self, H, G, d):
        self.H, self.G, self.d = H, G, d
        new = lambda out, into: torch.randn(out, into, dtype=torch.bfloat16, device=decode.DEV) * into**-0.5
        self.qkv, self.o = new((G + 2) * H * d, HIDDEN), new(HIDDEN, G * H * d)
        self.up, self.down, self.head = new(2 * INNER, HIDDEN), new(HIDDEN, INNER), new(VOCABULARY, HIDDEN)
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=decode.DEV)

    def step(self, x, attend):
        for _ in range(LAYERS):
            q = F.linear(F.rms_norm(x, (HIDDEN,), self.norm), self.qkv)[:, : self.G * self.H * self.d]
            x = x + F.linear(attend(q.reshape(-1, self.H * self.G, 1, self.d)).reshape(-1, self.G * self.H * self.d), self.o)
            gate, up = F.linear(F.rms_norm(x, (HIDDEN,), self.norm), self.up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, self.down)
        return F.linear(F.rms_norm(x, (HIDDEN,), self.norm), self.head).argmax(-1)


def measure(model, batch, attend):
    x = torch.randn(batch, HIDDEN, dtype=torch.bfloat16, device=decode.DEV)
    whole = decode.graph_times([lambda: model.step(x, attend)], 12)[0]
    rest = decode.graph_times([lambda: model.step(x, lambda q: q)], 12)[0]
    return whole * 1e-3, rest * 1e-3


def show(name, batch, gib, times):
    whole, rest = times
    print(f"{name} | {batch} | {gib:.2f} | {whole:.2f} | {rest:.2f} | {batch / whole * 1e3:.0f}", flush=True)
    return batch / whole


def main():
    budget = float(sys.argv[3] if len(sys.argv) > 3 else 17.5) * 2**30
    tail = int(sys.argv[4]) if len(sys.argv) > 4 else 128
    segment = decode.Segment(sys.argv[2])
    H, G, S, d = segment.H, segment.G, segment.S, segment.d
    model = Model(H, G, d)
    print(f"{S} tokens and {tail}, {H} KV heads x {G}, head_dim {d}; {budget / 2**30:.2f} GiB for the caches of {LAYERS} layers")
    print("cache | batch | GiB of caches | ms a step | of it without attention | tokens/s")

    one = LAYERS * H * (S + tail) * d * 4
    batch = int(budget // one)
    if batch == 0:
        sys.exit(f"throughput.py: one dense cache takes {one / 2**30:.2f} GiB")
    k = torch.empty(batch, H, S + tail, d, dtype=torch.bfloat16, device=decode.DEV).normal_()
    v = torch.empty_like(k).normal_()
    dense = {}
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel([backend]):
            times = measure(model, batch, lambda q: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        dense[name] = show(f"dense, {name}", batch, batch * one / 2**30, times)
    del k, v

    memory, handle, on_device = segment.upload()
    del memory
    one = LAYERS * (on_device + H * tail * d * 4)
    batch = int(budget // one)
    plan = decode.Plan(segment, batch, tail)
    out = torch.empty(batch, H * G, 1, d, device=decode.DEV)

    def attend(q):
        plan.attend(q, out)
        return out.bfloat16()

    ours = show("compressed", batch, batch * one / 2**30, measure(model, batch, attend))
    print(f"compressed over the best dense: {ours / max(dense.values()):.2f}; work space {plan.ws_bytes / 2**20:.0f} MiB; "
          f"{on_device / S / H:.1f} bytes a token and KV head on the device")


main()
