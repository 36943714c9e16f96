# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding that a transformers model applies to its keys, read from the model's own rotary class."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

# How each model type pairs the coordinates of a plane. Only types whose rotation is checked by the tests are listed:
# a wrong guess would not fail, it would only compress badly.
STYLES = {
    **dict.fromkeys(
        "llama mistral ministral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text granite olmo olmo2 "
        "olmo3 starcoder2 stablelm phi phi3 smollm3 gpt_oss seed_oss".split(),
        "half_split",
    ),
    **dict.fromkeys("glm glm4 cohere helium".split(), "interleaved"),
}
# Angles that depend on the length of the prompt: keys cached before and after a switch are rotated differently.
CHANGING = ("dynamic", "longrope")


class Rope:
    """inv_freq: float64 radians per position of each plane (empty: no rotation); magnitude; style."""

    def __init__(self, inv_freq: np.ndarray[Any, Any], magnitude: float, style: str) -> None:
        self.inv_freq, self.magnitude, self.style = inv_freq, magnitude, style

    @property
    def dim(self) -> int:
        return 2 * len(self.inv_freq)


def rotary_module(config: Any) -> Any:
    """The model's rotary embedding, built from its configuration; it has no weights."""
    from transformers import MODEL_MAPPING

    module = importlib.import_module(MODEL_MAPPING[type(config)].__module__)
    names = [n for n in vars(module) if n.endswith("RotaryEmbedding") and "Vision" not in n]
    return getattr(module, names[0])(config=config)


def ropes_of(config: Any) -> list[Rope]:
    """[Rope] for every layer. Raises NotImplementedError with a sentence for what is not supported."""
    kind = config.model_type
    if kind not in STYLES:
        raise NotImplementedError(
            f"AnchorKVCache does not know how {kind!r} models rotate their keys; it knows {', '.join(sorted(STYLES))}"
        )
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = not isinstance(parameters.get("rope_type", "default"), str) or any(
        isinstance(p, dict) for p in parameters.values()
    )
    types = {p.get("rope_type") for p in parameters.values() if isinstance(p, dict)} or {parameters.get("rope_type")}
    for name in CHANGING:
        if name in types:
            raise NotImplementedError(
                f"this model's rotary embedding is {name!r}: its angles change with the length of the prompt, so "
                "cached keys cannot be compressed once and for all"
            )
    rotary = rotary_module(config)
    out = []
    for i in range(config.num_hidden_layers):
        prefix = config.layer_types[i] + "_" if by_layer_type and getattr(config, "layer_types", None) else ""
        inv_freq = getattr(rotary, prefix + "inv_freq").double().cpu().numpy()
        magnitude = float(getattr(rotary, prefix + "attention_scaling", 1.0))
        no_rope = getattr(config, "no_rope_layers", None)
        if no_rope is not None and not no_rope[i]:
            inv_freq, magnitude = np.empty(0), 1.0
        out.append(Rope(inv_freq, magnitude, STYLES[kind]))
    return out
