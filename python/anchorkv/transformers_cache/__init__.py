# SPDX-License-Identifier: Apache-2.0
"""AnchorKV in transformers: a cache class for `generate`."""

from .cache import AnchorKVCache

__all__ = ["AnchorKVCache"]
