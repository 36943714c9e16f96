# SPDX-License-Identifier: Apache-2.0
"""Peer: every token but the last ones in b bits a coordinate, after a random rotation (the TurboQuant family).

Post-RoPE vectors, signed orthonormal Hadamard rotation, Lloyd-Max levels of the unit Gaussian, one 16-bit scale a
vector: the least-squares one for the chosen codes (three alternations), which is kinder to this peer than the norm.
"""

import math

import torch

# Positive halves of the Lloyd-Max levels of a unit Gaussian.
LEVELS = {
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
WINDOW = 128


def hadamard(n):
    if n & (n - 1):
        raise ValueError(f"the rotation needs a power of two, head_dim is {n}")
    h = torch.ones((1, 1))
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / math.sqrt(n)


def quantise(x, bits, rotation):
    """float32 [H, S, d] -> its reconstruction; the last WINDOW tokens stay as they are."""
    half = torch.tensor(LEVELS[bits], device=x.device)
    levels = torch.cat((-half.flip(0), half))
    bounds = (levels[1:] + levels[:-1]) / 2
    y = x @ rotation.T
    scale = y.norm(dim=-1, keepdim=True) / math.sqrt(y.shape[-1])
    for _ in range(3):
        code = levels[torch.bucketize(y / scale.clamp(min=1e-20), bounds)]
        scale = (y * code).sum(-1, keepdim=True) / (code * code).sum(-1, keepdim=True)
    out = (code * scale.half().float()) @ rotation
    out[:, -WINDOW:] = x[:, -WINDOW:]
    return out


def rotation_of(d, seed, device):
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (d,), generator=generator) * 2.0 - 1.0
    return (hadamard(d) * signs).to(device)


def bytes_of(heads, tokens, d, bits):
    """Keys and values of one layer: codes, 16-bit scales, the exact window. The rotation is a seed."""
    coded = max(0, tokens - WINDOW)
    return 2 * heads * (coded * ((d * bits + 7) // 8 + 2) + min(tokens, WINDOW) * d * 2)
