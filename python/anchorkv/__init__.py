# SPDX-License-Identifier: Apache-2.0
"""AnchorKV from Python: compress a layer's keys and values, see what it cost, decode it again."""

from .codec import AkvError, Segment, compress, experiment, inv_freq, map_layers, version

__all__ = ["AkvError", "Segment", "compress", "experiment", "inv_freq", "map_layers", "version"]
