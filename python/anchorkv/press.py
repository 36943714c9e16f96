# SPDX-License-Identifier: Apache-2.0
"""AnchorKVPress: AnchorKV as a press of NVIDIA's kvpress, for its pipeline and its evaluation.

kvpress keeps dense tensors: as with its own ThinK and AdaKV presses, quality is that of the compressed form, memory is
not. The bytes that the compressed form takes are counted in `stored_bytes`. For the memory use AnchorKVCache.
"""

from dataclasses import dataclass, field

import torch
from kvpress import BasePress
from kvpress.utils import get_prerope_query_states

from .codec import compress
from .transformers_cache.rope import ropes_of

SAMPLED = 64


@dataclass
class AnchorKVPress(BasePress):
    """
    compression_ratio  share of the bytes that is removed, kvpress's measure: 0.9 is 10x
    profile            "default" or "paper"
    window_size        last tokens whose queries are observed
    overrides          fields of akv_experiment by name (ablations)
    """

    compression_ratio: float = 0.0
    profile: str = "default"
    window_size: int = 32
    seed: int = 0
    overrides: dict = None
    stored_bytes: int = field(default=0, init=False)
    dense_bytes: int = field(default=0, init=False)  # in 16 bit

    def __post_init__(self):
        if not 0 <= self.compression_ratio < 1:
            raise ValueError(
                f"compression_ratio is the share that is removed, at least 0 and below 1, not {self.compression_ratio}"
            )

    def post_init_from_model(self, model):
        self.ropes = ropes_of(model.config.get_text_config(decoder=True))
        self.stored_bytes = self.dense_bytes = 0

    def queries(self, module, hidden_states, position_embeddings, rope):
        """Queries after the rotary embedding of all tokens given, [B, Hq, T, d]."""
        q = get_prerope_query_states(module, hidden_states)
        cos, sin = (x.unsqueeze(1) for x in position_embeddings)
        if rope.dim == 0:
            return q
        if rope.style != "half_split":
            raise NotImplementedError(
                "AnchorKVPress supports models that rotate in halves, as kvpress's own presses do"
            )
        turned, rest = q[..., : rope.dim], q[..., rope.dim :]
        half = rope.dim // 2
        swapped = torch.cat((-turned[..., half:], turned[..., :half]), -1)
        return torch.cat((turned * cos + swapped * sin, rest), -1)

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        if self.compression_ratio == 0:
            return keys, values
        rope, tokens = self.ropes[module.layer_idx], keys.shape[2]
        window = min(self.window_size, tokens)
        last = max(1, tokens - window)
        m = min(SAMPLED, last)
        at = (2 * torch.arange(m) + 1) * last // (2 * m)
        chosen = torch.cat((at, torch.arange(tokens - window, tokens))).to(hidden_states.device)
        cos, sin = kwargs["position_embeddings"]
        q = self.queries(module, hidden_states[:, chosen], (cos[:, chosen], sin[:, chosen]), rope).detach().cpu()
        out = [torch.empty_like(x) for x in (keys, values)]
        for b in range(keys.shape[0]):
            with compress(
                keys[b].detach().cpu(),
                values[b].detach().cpu(),
                q[b, :, m:],
                sampled=q[b, :, :m],
                sampled_positions=at.int().numpy(),
                keep_ratio=1.0 - self.compression_ratio,
                profile=self.profile,
                overrides=self.overrides,
                rope_inv_freq=rope.inv_freq if rope.dim else None,
                rope_style=rope.style,
                rope_magnitude=rope.magnitude,
                sm_scale=module.scaling,
                layer_index=module.layer_idx,
                seed=self.seed,
            ) as segment:
                self.stored_bytes += segment.nbytes
                self.dense_bytes += segment.info()["dense_bytes"]
                for x, decoded in zip(out, segment.decode()):
                    x[b] = torch.from_numpy(decoded).to(x)
        return tuple(out)
