# SPDX-License-Identifier: Apache-2.0
"""AnchorKVCache: a transformers cache that compresses itself at the end of the prefill."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from ..attention import Threads
from ..codec import AkvError, Profile, experiment, plan
from ..shares import LayerErrors, SharedBudget
from .attention import switch
from .layer import INFEASIBLE, AnchorKVLayer, Settings
from .rope import ropes_of

WHEN = ("forward", "decode", "manual")
WHERE = ("auto", "gpu", "cpu")
LARGER = 1.5  # times the bytes in a file: what a short segment takes on a GPU


def layer_kinds(config: Any) -> list[str]:
    """["full_attention" or "sliding_attention"] of every layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
        kinds = ["sliding_attention" if window is not None else "full_attention"] * config.num_hidden_layers
    other = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if other:
        raise NotImplementedError(f"layers of kind {', '.join(other)} are not supported by AnchorKVCache")
    if "full_attention" not in kinds:
        raise NotImplementedError(
            "every layer of this model attends through a sliding window, so its cache is bounded already; there is "
            "nothing for AnchorKVCache to compress"
        )
    return list(kinds)


def model_facts(config: Any) -> dict[str, Any]:
    """What a calibration and a cache can compare of a model: its configuration, not its weights."""
    return {
        "model_type": config.model_type,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }


def shared_budget(
    path: str | os.PathLike[str],
    config: Any,
    keep_ratio: float,
    profile: Profile,
    overrides: Mapping[str, Any] | None = None,
) -> SharedBudget:
    """The SharedBudget of a calibration's file for this model. ValueError when the file is not for it."""
    errors = LayerErrors.load(path)
    errors.check([kind == "full_attention" for kind in layer_kinds(config)], profile, model_facts(config))

    def feasible(keep: float, shape: Any) -> bool:
        try:
            plan(keep_ratio=min(1.0, keep), profile=profile, overrides=overrides, **dict(shape))
        except AkvError as error:
            if error.status != INFEASIBLE:
                raise
            return False
        return True

    return SharedBudget(errors, keep_ratio, feasible)


class AnchorKVCache(Cache):
    """
    cache = AnchorKVCache(model.config, ratio=10)
    model.generate(**inputs, past_key_values=cache)

    config       of the model; its attention implementation is switched from "sdpa" to "anchorkv" ("eager" to
                 "anchorkv_eager"), which attends as before wherever no AnchorKVCache is used
    ratio        dense 16-bit bytes / compressed bytes, everything counted
    profile      "default" or "paper"
    when         "forward": a layer is compressed as soon as the first pass over more than one token has left it;
                 "decode": at the first single token after the prompt (for a prompt read in chunks);
                 "manual": when compress() is called
    tail_limit   new tokens are kept exactly; so many of them become a further segment
    window       last tokens of a prompt whose queries say what is attended to; always exact
    seed         of the random choices; same seed, same bytes
    overrides    fields of akv_experiment by name (ablations)
    method       "anchorkv", or "snapkv": eviction at equal bytes, to compare with
    threads      of the C library; default torch.get_num_threads()
    ratio_of     what the ratio counts. "file": the bytes of the segments as they are saved; "device": as the
                 kernels of a GPU want them, which is a fifth to a half more, most for short segments
    graphs       on a GPU: a token of a layer is one CUDA graph instead of five launches, which takes less time of the
                 processor; what attention returns lies in the same memory at every step, so it must not be kept
    compress_on  where a model on a GPU has its cache compressed. "auto": on the GPU, by the CPU what the GPU does not
                 cover (report() counts both and says why); "gpu": there, or an error; "cpu"
    shares       file of a calibration of this model (docs/python.md): the same bytes, split over the layers by what
                 they suffer
    """

    def __init__(
        self,
        config: Any,
        ratio: float = 10.0,
        profile: Profile = "default",
        *,
        when: Literal["forward", "decode", "manual"] = "forward",
        tail_limit: int = 2048,
        window: int = 32,
        seed: int = 0,
        overrides: Mapping[str, Any] | None = None,
        method: Literal["anchorkv", "snapkv"] = "anchorkv",
        threads: int | None = None,
        ratio_of: Literal["file", "device"] = "file",
        compress_on: Literal["auto", "gpu", "cpu"] = "auto",
        graphs: bool = False,
        llama_cpp: bool = False,
        shares: str | os.PathLike[str] | None = None,
    ) -> None:
        if not hasattr(config, "get_text_config"):
            raise TypeError(f"{type(config).__name__} given; AnchorKVCache is made from model.config")
        config = config.get_text_config(decoder=True)
        kinds, ropes = layer_kinds(config), ropes_of(config)
        if not ratio >= 1:
            raise ValueError(f"ratio is dense bytes / compressed bytes, so at least 1, not {ratio}")
        if when not in WHEN:
            raise ValueError(f"when is {when!r}; it is one of {', '.join(WHEN)}")
        if method not in ("anchorkv", "snapkv"):
            raise ValueError(f"method is {method!r}; it is 'anchorkv' or 'snapkv'")
        if ratio_of not in ("file", "device"):
            raise ValueError(f"ratio_of is {ratio_of!r}; it is 'file' or 'device'")
        if compress_on not in WHERE:
            raise ValueError(f"compress_on is {compress_on!r}; it is one of {', '.join(WHERE)}")
        if compress_on == "gpu" and (method != "anchorkv" or profile != "default"):
            raise ValueError(
                f"compress_on='gpu', but the GPU compresses by method 'anchorkv' and profile 'default' only, not "
                f"{method!r} and {profile!r}: 'auto' or 'cpu'"
            )
        if shares is not None and method != "anchorkv":
            raise ValueError("shares are those of method 'anchorkv'; eviction has none")
        if not 1 <= window <= 1024 or tail_limit < 2 * window:
            raise ValueError(f"window {window} must be 1..1024, and tail_limit {tail_limit} at least twice as large")
        experiment(profile if profile in ("paper", "default") else "default", **(overrides or {}))  # refuses bad names
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if method == "anchorkv" and ratio > 1:
            try:  # now, and not in the middle of a conversation
                plan(
                    tail_limit,
                    kv_heads,
                    config.num_attention_heads // kv_heads,
                    head_dim,
                    keep_ratio=1 / ratio / (1.0 if ratio_of == "file" else LARGER),
                    profile=profile,
                    rotary_dim=ropes[kinds.index("full_attention")].dim,
                    window=window,
                )
            except AkvError as error:
                raise ValueError(
                    f"ratio {ratio:g} cannot be reached when {tail_limit} tokens are compressed at once "
                    f"(tail_limit): {error}"
                ) from None
        threads = torch.get_num_threads() if threads is None else threads
        if threads < 1:
            raise ValueError(f"threads is {threads}; it is at least 1")
        order = None
        if llama_cpp and ropes[0].style == "half_split" and config.model_type in ("llama", "mistral"):
            # llama.cpp stores the coordinates of these models interleaved: 2j and 2j + 1 for j and j + d/2.
            order = torch.arange(head_dim).view(2, -1).T.reshape(-1)
        self.config = config
        self.settings = Settings(
            keep_ratio=1.0 / ratio,
            profile=profile,
            when=when,
            tail_limit=tail_limit,
            window=window,
            ring=window + 8,  # a crop of a few tokens leaves the window whole
            seed=seed,
            overrides=overrides,
            method=method,
            threads=Threads(threads) if threads > 1 else None,
            ratio_of=ratio_of,
            growth=1.3,  # bytes on the GPU / bytes in the file of the segment made last
            compress_on=compress_on,
            graphs=graphs,
            order=order,
            devices={},
            shared=None if shares is None else shared_budget(shares, config, 1.0 / ratio, profile, overrides),
        )
        switch(config)
        super().__init__(
            layers=[
                AnchorKVLayer(self.settings, i, ropes[i])
                if kind == "full_attention"
                else DynamicSlidingWindowLayer(sliding_window=config.sliding_window)
                for i, kind in enumerate(kinds)
            ]
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer {layer_idx} asked for; this cache was made for a {self.config.model_type} model of "
                f"{len(self.layers)} layers: make an AnchorKVCache from this model's config"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def hosted(self) -> list[AnchorKVLayer]:
        """The layers that are compressed; the others have a sliding window."""
        return [layer for layer in self.layers if isinstance(layer, AnchorKVLayer)]

    @property
    def is_compressed(self) -> bool:
        return any(layer.offset for layer in self.hosted)

    @property
    def batch_size(self) -> int:
        return len(self.hosted[0].rows or []) or -1

    def compress(self) -> None:
        """Compress the tail now. Raises when there is nothing to compress, or the ratio cannot be reached."""
        layers = self.hosted
        if not layers[0].is_initialized:
            raise RuntimeError("the cache is empty: run the model over a prompt with this cache first")
        if layers[0].n == 0:
            raise RuntimeError(
                f"all {layers[0].offset} tokens are compressed already; there is nothing new to compress"
            )
        for layer in layers:
            layer.compress_tail(strict=True)

    def nbytes(self) -> int:
        """Bytes held by all layers where the model is, dense parts included; on a GPU also what its kernels work in."""
        total = sum(shared.nbytes() for shared in self.settings.devices.values())
        for layer in self.layers:
            if isinstance(layer, AnchorKVLayer):
                total += layer.nbytes()
            else:
                held = (getattr(layer, "keys", None), getattr(layer, "values", None))
                total += sum(x.numel() * x.element_size() for x in held if x is not None)
        return total

    def report(self) -> dict[str, Any]:
        """What is held: tokens, bytes of segments and tails, the ratio reached, why parts are exact if they are, who
        compressed the segments, and why the CPU did it when the model is on a GPU."""
        segments = {s.handle: s for layer in self.hosted for row in layer.rows or [] for s in row}
        stored = sum(s.nbytes for s in segments.values())
        dense = sum(s.info()["dense_bytes"] for s in segments.values())
        first, shared = self.hosted[0], self.settings.shared
        places = Counter(s.compressed_on for s in segments.values())
        return {
            "tokens": self.get_seq_length(),
            "compressed_tokens": first.offset,
            "tail_tokens": first.n,
            "segment_bytes": stored,
            "segment_dense_bytes": dense,
            "device_bytes": sum(s.uploaded.nbytes for s in segments.values() if s.uploaded is not None),
            "ratio": dense / stored if stored else 1.0,
            "held_bytes": self.nbytes(),
            "why_exact": first.why_dense,
            "compressed_on": {place or "file": count for place, count in places.items()},
            "why_cpu": next((s.why_cpu for s in segments.values() if s.why_cpu), None),
            "layer_ratios": [layer.ratio() for layer in self.hosted],
            "shares": None if shared is None else shared.report(),
        }

    def save(self, path: str | os.PathLike[str], tokens: Any, model: torch.nn.Module, **options: Any) -> None:
        """Write an .akv document; see anchorkv.transformers_cache.document.save."""
        from .document import save

        save(self, path, tokens, model, **options)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: torch.nn.Module, **options: Any
    ) -> tuple[AnchorKVCache, torch.Tensor]:
        """(cache, token ids) of an .akv document; see anchorkv.transformers_cache.document.load."""
        from .document import load

        return load(cls, path, model, **options)
