# SPDX-License-Identifier: Apache-2.0
"""AnchorKVCache: a transformers cache that compresses itself at the end of the prefill."""

import torch
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from ..attention import Threads
from ..codec import AkvError, experiment, plan
from .attention import switch
from .layer import AnchorKVLayer, Settings
from .rope import ropes_of

WHEN = ("forward", "decode", "manual")


def layer_kinds(config):
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
    """

    def __init__(
        self,
        config,
        ratio=10.0,
        profile="default",
        *,
        when="forward",
        tail_limit=2048,
        window=32,
        seed=0,
        overrides=None,
        method="anchorkv",
        threads=None,
        llama_cpp=False,
    ):
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
                    keep_ratio=1 / ratio,
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
            ring=2 * window,
            seed=seed,
            overrides=overrides,
            method=method,
            threads=Threads(threads) if threads > 1 else None,
            order=order,
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

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer {layer_idx} asked for; this cache was made for a {self.config.model_type} model of "
                f"{len(self.layers)} layers: make an AnchorKVCache from this model's config"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def hosted(self):
        """The layers that are compressed; the others have a sliding window."""
        return [layer for layer in self.layers if isinstance(layer, AnchorKVLayer)]

    @property
    def is_compressed(self):
        return any(layer.offset for layer in self.hosted)

    @property
    def batch_size(self):
        return len(self.hosted[0].rows or []) or -1

    def compress(self):
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

    def nbytes(self):
        """Bytes held by all layers now, dense parts included."""
        total = 0
        for layer in self.layers:
            if isinstance(layer, AnchorKVLayer):
                total += layer.nbytes()
            elif layer.is_initialized and layer.keys is not None:
                total += sum(x.numel() * x.element_size() for x in (layer.keys, layer.values))
        return total

    def report(self):
        """What is held: tokens, bytes of segments and tails, the ratio reached, and why parts are exact if they are."""
        segments = {s.handle: s for layer in self.hosted for row in layer.rows or [] for s in row}
        stored = sum(s.nbytes for s in segments.values())
        dense = sum(s.info()["dense_bytes"] for s in segments.values())
        first = self.hosted[0]
        return {
            "tokens": self.get_seq_length(),
            "compressed_tokens": first.offset,
            "tail_tokens": first.n,
            "segment_bytes": stored,
            "segment_dense_bytes": dense,
            "ratio": dense / stored if stored else 1.0,
            "held_bytes": self.nbytes(),
            "why_exact": first.why_dense,
        }

    def save(self, path, tokens, model, **options):
        """Write an .akv document; see anchorkv.transformers_cache.document.save."""
        from .document import save

        return save(self, path, tokens, model, **options)

    @classmethod
    def load(cls, path, model, **options):
        """(cache, token ids) of an .akv document; see anchorkv.transformers_cache.document.load."""
        from .document import load

        return load(cls, path, model, **options)
