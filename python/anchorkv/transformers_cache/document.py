# SPDX-License-Identifier: Apache-2.0
"""AnchorKVCache to and from `.akv` files, the ones of the akv command."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import _ffi
from ..codec import Segment, version
from ..document import Document, write
from .layer import AnchorKVLayer

if TYPE_CHECKING:
    from .cache import AnchorKVCache

WEIGHTS = "transformers_weights"  # property: fingerprint() of the model that read the document
STYLE_AT = 124  # offset of rope_style in a segment's header (docs/format.md)


def fingerprint(model: Any) -> str:
    """32 hex digits: shape, rotary settings, and three samples of every weight (rounded to bfloat16, whatever the model
    was loaded in). Another model, or the same one fine-tuned, gives another."""
    config = model.config.get_text_config(decoder=True)
    state = hashlib.blake2b(digest_size=16)
    facts = [config.model_type, config.num_hidden_layers, config.num_attention_heads, config.vocab_size]
    facts.append(getattr(config, "rope_parameters", None))
    state.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        n = min(128, flat.numel())
        state.update(f"{name} {tuple(weight.shape)}".encode())
        for start in (0, (flat.numel() - n) // 2, flat.numel() - n):
            state.update(flat[start : start + n].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes())
    return state.hexdigest()


def _describe(model, config, hash_hex):
    m = _ffi.DocumentModel()
    m.num_layers, m.num_heads = config.num_hidden_layers, config.num_attention_heads
    m.num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    m.embedding_dim, m.vocab_tokens, m.rope_type = config.hidden_size, config.vocab_size, -1
    m.weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    m.hash[:] = struct.unpack("<2Q", bytes.fromhex(hash_hex))
    m.description = f"transformers {config.model_type}".encode()[:47]
    return m


def _style(segment):
    return struct.unpack_from("<I", segment.data(), STYLE_AT)[0]


def save(
    cache: AnchorKVCache,
    path: str | os.PathLike[str],
    tokens: Any,
    model: Any,
    *,
    like: str | os.PathLike[str] | None = None,
    properties: Mapping[str, str] | None = None,
) -> None:
    """Write the cache of one conversation.

    tokens      ids of everything that the cache holds, in order (generate's last token is not in it)
    model       the model that filled the cache; its fingerprint goes into the file
    like        an .akv file that `akv pack` made with the GGUF file of the same model, any text: the new file then
                carries that model's identity, so that `akv ask --from` opens it. For llama and mistral models
                the cache has to be made with llama_cpp=True
    properties  {name: text} to add; "form" ("raw", or "chat" when the tokens open a chat turn) tells akv how to ask on
    """
    config = model.config.get_text_config(decoder=True)
    if not all(isinstance(layer, AnchorKVLayer) for layer in cache.layers):
        raise NotImplementedError(
            "this model has sliding-window layers, whose state an .akv file cannot carry from here"
        )
    if cache.batch_size != 1:
        raise ValueError(f"a document is one sequence; the cache has {max(cache.batch_size, 0)} rows")
    tokens = torch.as_tensor(tokens).reshape(-1).tolist()
    length = cache.get_seq_length()
    if len(tokens) != length:
        raise ValueError(f"{len(tokens)} token ids given, the cache holds {length} tokens: pass ids[:{length}]")
    mine = fingerprint(model)
    about, template = _describe(model, config, mine), None
    if like is not None:
        with Document(like) as other:
            for name in ("num_layers", "num_heads", "num_kv_heads", "embedding_dim"):
                if getattr(other.model, name) != getattr(about, name):
                    raise ValueError(
                        f"{like} was made with another model: its {name} is {getattr(other.model, name)}, "
                        f"this one's {getattr(about, name)}"
                    )
            about, template = other.model, other.layers
    layers: list[_ffi.DocumentLayer] = []
    segments: list[Segment] = []
    for i, layer in enumerate(cache.hosted):
        held = list(layer.rows[0])
        if layer.n:
            held.append(layer.dense_tail())
        info, entry = held[0].info(), _ffi.DocumentLayer()
        at = 0
        for s in held:
            if s.info()["first_position"] != at:
                raise ValueError(
                    f"layer {i}: a segment begins at position {s.info()['first_position']}, {at} is wanted: only "
                    "sequences without padding, numbered from 0, can be saved"
                )
            at = s.info()["last_position"] + 1
        entry.num_kv_heads, entry.gqa_group = info["num_kv_heads"], info["gqa_group"]
        entry.head_dim_k, entry.head_dim_v = info["head_dim_k"], info["head_dim_v"]
        entry.rotary_dim, entry.rope_style = layer.rope.dim, _style(held[0])
        entry.has_sinks = int(layer.sinks is not None)
        entry.rope_magnitude, entry.sm_scale = layer.rope.magnitude, layer.sm_scale
        entry.logit_softcap = layer.softcap
        entry.rope_hash = struct.unpack("<Q", hashlib.blake2b(layer.rope.inv_freq.tobytes(), digest_size=8).digest())[0]
        if template is not None:
            theirs = template[i]
            for name in ("head_dim_k", "head_dim_v", "rotary_dim", "rope_style"):
                if getattr(theirs, name) != getattr(entry, name):
                    more = ": make the cache with llama_cpp=True" if name == "rope_style" else ""
                    raise ValueError(
                        f"layer {i}: {name} is {getattr(entry, name)}, {like} has {getattr(theirs, name)}{more}"
                    )
            if abs(theirs.sm_scale - entry.sm_scale) > 1e-6 * entry.sm_scale:
                raise ValueError(f"layer {i}: the softmax scale is {entry.sm_scale}, {like} has {theirs.sm_scale}")
            entry.rope_hash, entry.sm_scale = theirs.rope_hash, theirs.sm_scale
            entry.rope_magnitude = theirs.rope_magnitude
        entry.first_segment, entry.num_segments = len(segments), len(held)
        layers.append(entry)
        segments += held
    s = cache.settings
    facts = {
        "method": "akv" if s.method == "anchorkv" else "snapkv",
        "profile": s.profile,
        "keep_ratio": repr(s.keep_ratio),
        "seed": str(s.seed),
        "form": "raw",
        "creator": "anchorkv (Python)",
        "creator_version": version(),
        WEIGHTS: mine,
        **(properties or {}),
    }
    method = 0 if s.method == "anchorkv" else 1
    write(path, about, tokens, layers, segments, method=method, properties=list(facts.items()))


def load(
    cls: type[AnchorKVCache], path: str | os.PathLike[str], model: Any, *, trust: bool = False, **options: Any
) -> tuple[AnchorKVCache, torch.Tensor]:
    """(cache, tokens): a cache that goes on after the document, and its token ids [1, n], to put before a question.

    trust    open a file of another writer (akv pack), whose model cannot be compared beyond its shape
    options  of AnchorKVCache, for what is compressed from now on
    """
    config = model.config.get_text_config(decoder=True)
    with Document(path) as document:
        mine, theirs = fingerprint(model), document.property(WEIGHTS)
        about = _describe(model, config, mine)
        for name in ("num_layers", "num_heads", "num_kv_heads", "embedding_dim", "vocab_tokens"):
            if getattr(document.model, name) != getattr(about, name):
                raise ValueError(
                    f"{path} was made with another model ({document.model.description.decode(errors='replace')}): its "
                    f"{name} is {getattr(document.model, name)}, this model's {getattr(about, name)}"
                )
        if theirs is None and not trust:
            raise ValueError(
                f"{path} was not written by transformers, so whether it was this model cannot be "
                "checked; load(..., trust=True) takes your word for it"
            )
        if theirs is not None and theirs != mine:
            raise ValueError(f"{path} was made with another model: same shape, other weights or rotary settings")
        if any(entry.kind != 0 for entry in document.layers):
            raise NotImplementedError(f"{path} has layers with a sliding window, which cannot be opened here")
        keep = document.property("keep_ratio")
        settings: dict[str, Any] = {"ratio": 1 / float(keep) if keep else 10.0, "profile": document.property("profile") or "default"}
        settings.update(options)
        interleaved = document.layers[0].rope_style == 1
        cache = cls(config, llama_cpp=interleaved, **settings)
        segments = document.segments()
        for i, (layer, entry) in enumerate(zip(cache.hosted, document.layers)):
            style = _ffi.ROPE_STYLES["interleaved" if layer.settings.order is not None else layer.rope.style]
            if entry.rotary_dim != layer.rope.dim or (entry.rope_style != style and layer.rope.dim):
                raise ValueError(f"{path}: layer {i} rotates its keys otherwise than this model does")
            layer.adopt(segments[entry.first_segment : entry.first_segment + entry.num_segments], model, entry)
        return cache, torch.from_numpy(document.tokens).long()[None].to(model.device)
