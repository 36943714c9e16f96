# SPDX-License-Identifier: Apache-2.0
"""The attention functions registered with transformers: "anchorkv" (over sdpa) and "anchorkv_eager".

A call whose keys come from a layer of an AnchorKVCache is handed to that layer; every other call - no cache, another
cache, a sliding-window layer - goes to the implementation underneath, unchanged.
"""

import sys

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAMES = {"sdpa": "anchorkv", "eager": "anchorkv_eager"}
TAG = "_anchorkv_layer"


def _underneath(base, module):
    if base == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[base]


def _make(base):
    def attention(module, query, key, value, attention_mask, dropout=0.0, **kwargs):
        layer = getattr(key, TAG, None)
        kwargs["dropout"] = dropout  # by name for us, by position when kvpress has wrapped this function
        if layer is None:
            return _underneath(base, module)(module, query, key, value, attention_mask, **kwargs)
        return layer.attend(_underneath(base, module), module, query, key, value, attention_mask, kwargs)

    attention.__name__ = NAMES[base]
    return attention


def register():
    for base, name in NAMES.items():
        AttentionInterface.register(name, _make(base))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])


def switch(config):
    """Let the model of this configuration attend through us. Other caches of the model keep working as before."""
    current = config._attn_implementation
    if current in NAMES.values():
        return
    if current not in NAMES:
        raise NotImplementedError(
            f"the model attends with {current!r}; AnchorKVCache works over 'sdpa' and 'eager': load the model with "
            "attn_implementation='sdpa'"
        )
    config._attn_implementation = NAMES[current]


register()
