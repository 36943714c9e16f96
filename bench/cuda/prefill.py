# SPDX-License-Identifier: Apache-2.0
"""Time of the prefill that compression is compared with: Llama-3.1-8B's shape, random weights, bf16, batch 1.

    python3 bench/cuda/prefill.py [TOKENS]

One layer's weights serve all 32 layers (400 MB, more than any cache), so that the model need not fit. Two figures:
matrix products and attention alone, which is the least that any engine spends, and all of a plain PyTorch forward.
"""
import sys
import torch
import torch.nn.functional as F

TOKENS = int(sys.argv[1]) if len(sys.argv) > 1 else 32768
LAYERS, DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCABULARY = 32, 4096, 32, 8, 128, 14336, 128256
BF16 = dict(device="cuda", dtype=torch.bfloat16)


def weights(*shape):
    return torch.randn(*shape, **BF16) * shape[-1] ** -0.5


qkv, out = weights((HEADS + 2 * KV_HEADS) * HEAD_DIM, DIM), weights(DIM, HEADS * HEAD_DIM)
gate_up, down, head = weights(2 * FFN, DIM), weights(DIM, FFN), weights(VOCABULARY, DIM)
norm = torch.ones(DIM, **BF16)
frequencies = 500000.0 ** (-torch.arange(0, 1, 2 / HEAD_DIM, device="cuda"))
angles = torch.outer(torch.arange(TOKENS, device="cuda").float(), frequencies)
cosine, sine = (f(torch.cat((angles, angles), -1)).to(torch.bfloat16) for f in (torch.cos, torch.sin))


def rotate(x):
    a, b = x.chunk(2, -1)
    return x * cosine + torch.cat((-b, a), -1) * sine


def forward(x, whole):
    for _ in range(LAYERS):
        h = F.rms_norm(x, (DIM,), norm) if whole else x
        q, k, v = (h @ qkv.T).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], -1)
        q, k, v = (y.view(1, TOKENS, -1, HEAD_DIM).transpose(1, 2) for y in (q, k, v))
        if whole:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2).reshape(1, TOKENS, DIM) @ out.T
        x = x + y if whole else x
        h = F.rms_norm(x, (DIM,), norm) if whole else x
        g, u = (h @ gate_up.T).split(FFN, -1)
        y = (F.silu(g) * u if whole else g) @ down.T
        x = x + y if whole else x
    return x[:, -1:] @ head.T


x = torch.randn(1, TOKENS, DIM, **BF16)
backends = torch.nn.attention.SDPBackend
with torch.inference_mode():
    for name, backend in (("cuDNN", backends.CUDNN_ATTENTION), ("flash", backends.FLASH_ATTENTION)):
        for whole in (False, True):
            try:
                with torch.nn.attention.sdpa_kernel([backend]):
                    forward(x, whole)
                    times = []
                    for _ in range(3):
                        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                        begin.record()
                        forward(x, whole)
                        end.record()
                        end.synchronize()
                        times.append(begin.elapsed_time(end))
                what = "whole forward" if whole else "products and attention alone"
                print(f"prefill of {TOKENS} tokens, {name} attention, {what}: {sorted(times)[1]:.0f} ms", flush=True)
            except RuntimeError as error:
                print(f"{name}: {error}", flush=True)
