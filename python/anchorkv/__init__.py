# SPDX-License-Identifier: Apache-2.0
"""AnchorKV from Python: compress a layer's keys and values, attend to them, or a whole model's cache at once.

AnchorKVCache (transformers) and AnchorKVPress (kvpress) are loaded when first asked for; importing this package imports
numpy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .attention import Threads, attend
from .codec import AkvError, Segment, compress, experiment, inv_freq, map_layers, plan, version

__all__ = [
    "AkvError",
    "AnchorKVCache",
    "AnchorKVPress",
    "Segment",
    "Threads",
    "attend",
    "compress",
    "experiment",
    "inv_freq",
    "map_layers",
    "plan",
    "version",
]


if TYPE_CHECKING:
    from .press import AnchorKVPress
    from .transformers_cache import AnchorKVCache


def __getattr__(name: str) -> Any:
    if name == "AnchorKVCache":
        from .transformers_cache import AnchorKVCache

        return AnchorKVCache
    if name == "AnchorKVPress":
        from .press import AnchorKVPress

        return AnchorKVPress
    raise AttributeError(f"module 'anchorkv' has no attribute {name!r}")
