# SPDX-License-Identifier: Apache-2.0
"""Attention over compressed segments and a dense tail (akv_attend), and the library's thread pool."""

from __future__ import annotations

import ctypes as C
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from . import _ffi
from .arrays import Array, view
from .codec import Segment, _check, _lib

Output = TypeVar("Output", bound=Array)


class Threads:
    """The library's own pool; one call at a time uses it, later ones wait."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} threads asked for; at least 1 is needed")
        self._pool, self.count, self.lock = C.c_void_p(), count, threading.Lock()
        diag = _ffi.Diag()
        _check(_lib.akv_threads_create(count, C.byref(self._pool), C.byref(diag)), diag)
        self.executor: int = _lib.akv_threads_executor(self._pool)

    def __deepcopy__(self, memo: object) -> Threads:
        return self  # copies of what uses it share it

    def __del__(self) -> None:
        if getattr(self, "_pool", None):
            _lib.akv_threads_destroy(self._pool)
            self._pool = C.c_void_p()


_local = threading.local()


def _workspace(size: int) -> int:
    """64-byte aligned scratch of this Python thread, kept between calls."""
    held = getattr(_local, "memory", None)
    if held is None or held.nbytes < size + 64:
        held = _local.memory = np.empty(size + size // 4 + 64, np.uint8)
    return int(held.ctypes.data + 63) & ~63


def attend(
    queries: Array,
    segments: Sequence[Segment],
    tail_keys: Array | None = None,
    tail_values: Array | None = None,
    *,
    out: Output,
    mask: Any = None,
    sm_scale: float | None = None,
    logit_softcap: float | None = 0.0,
    sinks: Any = None,
    threads: Threads | None = None,
) -> Output:
    """Softmax attention of `queries` [H*G, T, d] over segments and tail, written to `out`; nothing is copied.

    segments     list of Segment, all of whose tokens precede every query
    tail         [H, n, d] keys (post-RoPE) and values, or None
    out          float32 [H*G, T, d_v], inner dimension contiguous; any other strides
    mask         float32 [T, n] added to the tail's logits (-inf hides), or None: causal
    sinks        float32 [H*G], contiguous, or None
    threads      Threads, or None: on this thread alone
    """
    q, o = view(queries, "queries"), view(out, "out")
    diag, p = _ffi.Diag(), _ffi.AttendParams()
    _lib.akv_attend_params_init(C.byref(p))
    if segments:
        heads, d_v = segments[0].num_kv_heads, segments[0].head_dim_v
    elif tail_keys is not None and tail_values is not None:
        heads, d_v = tail_keys.shape[0], tail_values.shape[2]
    else:
        raise ValueError("there is nothing to attend to: give segments, a tail, or both")
    if q.shape[0] % heads:
        raise ValueError(f"queries have {q.shape[0]} heads, no multiple of the {heads} KV heads")
    if o.shape != (q.shape[0], q.shape[1], d_v) or o.tensor.dtype != _ffi.F32 or o.tensor.stride_dim != 1:
        raise ValueError(f"out must be float32 {(q.shape[0], q.shape[1], d_v)} with a contiguous inner dimension")
    p.num_kv_heads, p.gqa_group = heads, q.shape[0] // heads
    p.head_dim_k, p.head_dim_v, p.num_queries = q.shape[2], d_v, q.shape[1]
    p.queries = q.tensor
    handles = (C.c_void_p * max(1, len(segments)))(*[s.handle for s in segments])
    p.segments, p.num_segments = C.cast(handles, C.POINTER(C.c_void_p)), len(segments)
    if tail_keys is not None:
        k, v = view(tail_keys, "tail_keys"), view(tail_values, "tail_values")
        if k.shape[0] != heads or k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2] or v.shape[2] != d_v:
            raise ValueError(
                f"tail keys {k.shape} and values {v.shape} do not fit {heads} KV heads of {q.shape[2]} and {d_v}"
            )
        p.tail_tokens, p.tail_keys, p.tail_values = k.shape[1], k.tensor, v.tensor
        if mask is not None:
            m = view(mask[None], "mask")
            if m.shape[1:] != (q.shape[1], k.shape[1]) or m.tensor.dtype != _ffi.F32:
                raise ValueError(f"mask must be float32 {(q.shape[1], k.shape[1])}, it is {m.shape[1:]}")
            p.tail_mask = m.tensor
    p.sm_scale = q.shape[2] ** -0.5 if sm_scale is None else sm_scale
    p.logit_softcap = logit_softcap or 0.0
    if sinks is not None:
        s = view(sinks.reshape(1, 1, -1), "sinks")
        if s.shape[2] != q.shape[0] or s.tensor.dtype != _ffi.F32 or s.tensor.stride_dim != 1:
            raise ValueError(f"sinks must be {q.shape[0]} contiguous float32 numbers")
        p.sinks = s.tensor.data
    p.out, p.out_stride_head, p.out_stride_token = o.tensor.data, o.tensor.stride_head, o.tensor.stride_token
    size = C.c_size_t()
    if threads is not None:
        p.executor = threads.executor
    _check(_lib.akv_attend_workspace_bytes(C.byref(p), C.byref(size), C.byref(diag)), diag)
    workspace = _workspace(size.value)
    if threads is None:
        _check(_lib.akv_attend(C.byref(p), workspace, size.value, C.byref(diag)), diag)
    else:
        with threads.lock:
            _check(_lib.akv_attend(C.byref(p), workspace, size.value, C.byref(diag)), diag)
    return out
