# SPDX-License-Identifier: Apache-2.0
"""AnchorKVPress: AnchorKV as a press of NVIDIA's kvpress, for its pipeline and its evaluation.

kvpress keeps dense tensors: as with its own ThinK and AdaKV presses, quality is that of the compressed form, memory is
not. The bytes that the compressed form takes are counted in `stored_bytes`. For the memory use AnchorKVCache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from kvpress import BasePress
from kvpress.utils import get_prerope_query_states

from .codec import Profile, compress
from .transformers_cache.cache import shared_budget
from .transformers_cache.rope import Rope, ropes_of

SAMPLED = 64


@dataclass
class AnchorKVPress(BasePress):
    """
    compression_ratio  share of the bytes that is removed, kvpress's measure: 0.9 is 10x
    profile            "default" or "paper"
    window_size        last tokens whose queries are observed
    overrides          fields of akv_experiment by name (ablations)
    shares             file of a calibration (docs/python.md): the same bytes, split over the layers
    """

    compression_ratio: float = 0.0
    profile: Profile = "default"
    window_size: int = 32
    seed: int = 0
    overrides: Mapping[str, Any] | None = None
    shares: str | os.PathLike[str] | None = None
    stored_bytes: int = field(default=0, init=False)
    dense_bytes: int = field(default=0, init=False)  # in 16 bit

    def __post_init__(self) -> None:
        if not 0 <= self.compression_ratio < 1:
            raise ValueError(
                f"compression_ratio is the share that is removed, at least 0 and below 1, not {self.compression_ratio}"
            )

    def post_init_from_model(self, model: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        self.ropes, self.shared = ropes_of(config), None
        if self.shares is not None and self.compression_ratio > 0:
            self.shared = shared_budget(
                self.shares, config, 1.0 - self.compression_ratio, self.profile, self.overrides
            )
        self.stored_bytes = self.dense_bytes = 0

    def queries(
        self,
        module: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        rope: Rope,
    ) -> torch.Tensor:
        """Queries after the rotary embedding of all tokens given, [B, Hq, T, d]."""
        q = get_prerope_query_states(module, hidden_states)
        cos, sin = (x.unsqueeze(1) for x in position_embeddings)
        if rope.dim == 0:
            return q  # type: ignore[no-any-return]  # kvpress has no annotations
        if rope.style != "half_split":
            raise NotImplementedError(
                "AnchorKVPress supports models that rotate in halves, as kvpress's own presses do"
            )
        turned, rest = q[..., : rope.dim], q[..., rope.dim :]
        half = rope.dim // 2
        swapped = torch.cat((-turned[..., half:], turned[..., :half]), -1)
        return torch.cat((turned * cos + swapped * sin, rest), -1)

    def compress(
        self,
        module: Any,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attentions: Any,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        keep_ratio = 1.0 - self.compression_ratio
        if self.shared is not None:
            shape = dict(num_tokens=tokens, num_kv_heads=keys.shape[1], gqa_group=q.shape[1] // keys.shape[1])
            shape.update(head_dim=keys.shape[3], head_dim_v=values.shape[3], rotary_dim=rope.dim, window=window)
            keep_ratio = self.shared.keep_of(module.layer_idx, tuple(shape.items()))
        for b in range(keys.shape[0]):
            with compress(
                keys[b].detach().cpu(),
                values[b].detach().cpu(),
                q[b, :, m:],
                sampled=q[b, :, :m],
                sampled_positions=at.int().numpy(),
                keep_ratio=keep_ratio,
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
        return out[0], out[1]
