# SPDX-License-Identifier: Apache-2.0
"""Compress and decode one layer's keys and values with the C library; arrays in, arrays out."""

from __future__ import annotations

import concurrent.futures
import ctypes as C
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _ffi
from .arrays import Array, View, view

Profile = Literal["default", "paper"]
Method = Literal["anchorkv", "snapkv", "dense"]
Floats = NDArray[np.float32]
In = TypeVar("In")
Out = TypeVar("Out")

_lib = _ffi.load()


class AkvError(RuntimeError):
    """A call of the library failed; `status` is the akv_status, `name` its text."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.name: str = _lib.akv_status_str(status).decode()
        super().__init__(f"{self.name}: {message}" if message else self.name)


class Compressor(Protocol):
    """Compression where the arrays lie, when that is not host memory."""

    kind: str  # as torch names the device's type

    def view(self, x: Any, name: str) -> View: ...

    def compress(self, layer: Any, config: Any, out: Any, diag: Any) -> int:
        """The status of akv_compress's arguments."""
        ...


def version() -> str:
    """Of the library."""
    return str(_lib.akv_version().decode())


def _check(status: int, diag: _ffi.Diag) -> None:
    if status != 0:
        raise AkvError(status, diag.message.decode(errors="replace"))


def inv_freq(rope_theta: float, rotary_dim: int) -> NDArray[np.float64]:
    """Radians per position of each plane, unscaled rotary embedding."""
    return np.power(rope_theta, -np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def experiment(profile: Profile = "default", **overrides: Any) -> _ffi.Experiment:
    """akv_experiment of a profile with fields replaced; enumerations by name, level_bits as a list."""
    x = _ffi.Experiment()
    (_lib.akv_experiment_init_default if profile == "default" else _lib.akv_experiment_init)(C.byref(x))
    names = {field[0] for field in _ffi.Experiment._fields_} - {"struct_size", "num_levels"}
    enums: dict[str, dict[str, int]] = {
        "rank": _ffi.RANKS,
        "scale_rule": _ffi.SCALE_RULES,
        "code_rule": _ffi.CODE_RULES,
        "anchor_space": _ffi.ANCHOR_SPACES,
    }
    for name, value in overrides.items():
        if name not in names:
            raise TypeError(f"akv_experiment has no field {name!r}; it has {', '.join(sorted(names))}")
        if name == "level_bits":
            if not 1 <= len(value) <= 15:
                raise ValueError("level_bits takes 1 to 15 values")
            x.num_levels = len(value)
            x.level_bits[:] = list(value) + [0] * (16 - len(value))
        else:
            setattr(x, name, enums[name][value] if name in enums and isinstance(value, str) else value)
    return x


class Segment:
    """A compressed (or dense, or evicted) stretch of one layer."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle
        self.uploaded: Any = None  # its copy on a GPU, when AnchorKVCache made one
        self.compressed_on: str | None = None  # "cpu" or "cuda"; None: it was read from a file
        self.why_cpu: str | None = None  # of a segment that a GPU could not compress
        info = self._info()
        self.nbytes: int = info.bytes.total
        self.num_kv_heads, self.num_tokens = info.shape.num_kv_heads, info.shape.num_tokens
        self.head_dim_k, self.head_dim_v = info.shape.head_dim_k, info.shape.head_dim_v

    def __copy__(self) -> Segment:
        """Segments never change: a copy is one more reference."""
        copy = self._like(Segment(_lib.akv_segment_retain(self.handle)))
        copy.uploaded = self.uploaded
        return copy

    def _like(self, other: Segment) -> Segment:
        other.compressed_on, other.why_cpu = self.compressed_on, self.why_cpu
        return other

    def __deepcopy__(self, memo: object) -> Segment:
        return self.__copy__()

    def close(self) -> None:
        if self._handle:
            _lib.akv_segment_release(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _info(self) -> _ffi.SegmentInfo:
        if not self._handle:
            raise ValueError("the segment is closed")
        info, diag = _ffi.SegmentInfo(), _ffi.Diag()
        _lib.akv_segment_info_init(C.byref(info))
        _check(_lib.akv_segment_get_info(self._handle, C.byref(info), C.byref(diag)), diag)
        return info

    def info(self) -> dict[str, Any]:
        """Dictionary: kind, shape, counts and `bytes` by kind (their sum, without the total itself, is the total)."""
        i = self._info()
        return {
            "kind": _ffi.SEGMENT_KINDS[i.kind],
            "dense_reason": _ffi.DENSE_REASONS[i.dense_reason],
            "profile": {v: k for k, v in _ffi.PROFILES.items()}.get(i.profile),
            "num_tokens": i.shape.num_tokens,
            "num_kv_heads": i.shape.num_kv_heads,
            "gqa_group": i.shape.gqa_group,
            "first_position": i.first_position,
            "last_position": i.last_position,
            "head_dim_k": i.shape.head_dim_k,
            "head_dim_v": i.shape.head_dim_v,
            "dense_bytes": i.dense_bytes,
            "budget_bytes": i.budget_bytes,
            "num_anchors": i.num_anchors,
            "residuals_k": i.residuals_k,
            "residuals_v": i.residuals_v,
            "bytes": {field[0]: getattr(i.bytes, field[0]) for field in _ffi.Bytes._fields_},
        }

    @property
    def handle(self) -> int:
        """The akv_segment pointer as an integer, for calls of the C library."""
        if not self._handle:
            raise ValueError("the segment is closed")
        return self._handle

    @classmethod
    def open(cls, data: bytes | bytearray | memoryview) -> Segment:
        """Segment from canonical bytes (a copy is made), which are checked as untrusted."""
        handle, diag = C.c_void_p(), _ffi.Diag()
        x = np.frombuffer(data, np.uint8)
        _check(_lib.akv_segment_open(x.ctypes.data, x.nbytes, 1, None, C.byref(handle), C.byref(diag)), diag)
        return cls(handle.value)

    def cut(self, num_tokens: int) -> Segment:
        """The first tokens as a segment of their own: the same keys and values, bit by bit (not for profile paper)."""
        handle, diag = C.c_void_p(), _ffi.Diag()
        _check(_lib.akv_segment_cut(self.handle, num_tokens, None, C.byref(handle), C.byref(diag)), diag)
        return self._like(Segment(handle.value))

    def data(self) -> bytes:
        """The canonical bytes (docs/format.md), copied."""
        self._info()
        size = C.c_size_t()
        pointer = _lib.akv_segment_data(self._handle, C.byref(size))
        return C.string_at(pointer, size.value)

    def decode(self, keys: Floats | None = None, values: Floats | None = None) -> tuple[Floats, Floats]:
        """Keys and values as float32 [heads, tokens, dim]; written into the arrays given, which must be contiguous."""
        s = self._info().shape
        out = []
        for x, dim, name in ((keys, s.head_dim_k, "keys"), (values, s.head_dim_v, "values")):
            shape = (s.num_kv_heads, s.num_tokens, dim)
            if x is None:
                x = np.empty(shape, np.float32)
            if x.shape != shape or x.dtype != np.float32 or not x.flags.c_contiguous or not x.flags.writeable:
                raise ValueError(f"{name} must be a writable contiguous float32 array of shape {shape}")
            out.append(x)
        diag = _ffi.Diag()
        for h in range(s.num_kv_heads):
            _check(
                _lib.akv_segment_decode(
                    self._handle, h, 0, s.num_tokens, out[0][h].ctypes.data, out[1][h].ctypes.data, C.byref(diag)
                ),
                diag,
            )
        return out[0], out[1]


def compress(
    keys: Array,
    values: Array,
    queries: Array,
    *,
    keep_ratio: float | None = None,
    budget_bytes: int = 0,
    profile: Profile = "default",
    overrides: Mapping[str, Any] | None = None,
    method: Method = "anchorkv",
    sampled: Array | None = None,
    sampled_positions: Sequence[int] | NDArray[np.integer[Any]] | None = None,
    positions: ArrayLike | None = None,
    first_position: int = 0,
    rope_inv_freq: ArrayLike | None = None,
    rope_dim: int | None = None,
    rope_style: Literal["half_split", "interleaved"] = "half_split",
    rope_magnitude: float = 1.0,
    sm_scale: float | None = None,
    logit_softcap: float = 0.0,
    layer_index: int = 0,
    seed: int = 0,
    executor: int | None = None,
    compressor: Compressor | None = None,
) -> Segment:
    """One layer -> Segment. Arrays (torch, numpy, DLPack) are read in place, whatever their strides.

    keys, values   [H, S, d] as cached: keys after the rotary embedding (float32, float16, bfloat16; numpy: uint16 bits)
    queries        [H*G, W, d] post-RoPE queries of the last W tokens
    sampled        [H*G, M, d] post-RoPE queries of earlier tokens asked at sampled_positions, optional
    rope_inv_freq  radians per position of each plane; None: keys carry no rotation
    method         "anchorkv", "snapkv" (eviction at equal bytes) or "dense"
    overrides      fields of akv_experiment by name; they start from the profile's own values
    executor       Threads.executor, or None: one after the other
    compressor     who compresses arrays that are not in host memory; None: the library's CPU codec
    """
    read = view if compressor is None else compressor.view
    k, v, q = read(keys, "keys"), read(values, "values"), read(queries, "queries")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"keys {k.shape} and values {v.shape} must agree in heads and tokens")
    if k.shape[0] == 0 or q.shape[0] == 0 or q.shape[0] % k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"queries {q.shape} must have a multiple of {k.shape[0]} heads and dim {k.shape[2]}")
    layer, config, diag, handle = _ffi.Layer(), _ffi.Config(), _ffi.Diag(), C.c_void_p()
    _lib.akv_layer_init(C.byref(layer))
    _lib.akv_config_init(C.byref(config))
    s = layer.shape
    s.num_kv_heads, s.num_tokens, s.head_dim_k = k.shape
    s.head_dim_v, s.gqa_group, s.num_queries = v.shape[2], q.shape[0] // k.shape[0], q.shape[1]
    layer.keys, layer.values, layer.queries = k.tensor, v.tensor, q.tensor
    keep: list[object] = []  # what the structs point to must outlive the call
    if sampled is not None and sampled_positions is not None and len(sampled_positions) > 0:
        m = read(sampled, "sampled")
        at = np.ascontiguousarray(sampled_positions, np.int32)
        if m.shape != (q.shape[0], len(at), k.shape[2]):
            raise ValueError(f"sampled {m.shape} must be [{q.shape[0]}, {len(at)}, {k.shape[2]}]")
        layer.sampled, layer.num_sampled = m.tensor, len(at)
        layer.sampled_positions = at.ctypes.data_as(C.POINTER(C.c_int32))
        keep += [m, at]
    if positions is not None:
        p = np.ascontiguousarray(positions, np.int32)
        if p.shape != (k.shape[1],):
            raise ValueError(f"positions {p.shape} must be [{k.shape[1]}]")
        layer.positions = p.ctypes.data_as(C.POINTER(C.c_int32))
        keep.append(p)
    layer.first_position, layer.layer_index = first_position, layer_index
    if rope_inv_freq is not None:
        f = np.ascontiguousarray(rope_inv_freq, np.float64)
        s.rotary_dim = layer.rope.rotary_dim = rope_dim or 2 * len(f)
        if 2 * len(f) != s.rotary_dim:
            raise ValueError(f"rope_inv_freq has {len(f)} planes, rotary_dim {s.rotary_dim} needs {s.rotary_dim // 2}")
        layer.rope.style, layer.rope.magnitude = _ffi.ROPE_STYLES[rope_style], rope_magnitude
        layer.rope.inv_freq = f.ctypes.data_as(C.POINTER(C.c_double))
        keep.append(f)
    else:
        s.rotary_dim = layer.rope.rotary_dim = 0
    layer.sm_scale = k.shape[2] ** -0.5 if sm_scale is None else sm_scale
    layer.logit_softcap = logit_softcap
    config.profile, config.seed, config.budget_bytes = _profile(profile), seed, budget_bytes
    config.executor = executor
    if keep_ratio is not None:
        config.keep_ratio = keep_ratio
    if overrides:
        x = experiment(profile, **overrides)
        config.experiment = C.pointer(x)
        keep.append(x)
    calls = {"anchorkv": _lib.akv_compress, "snapkv": _lib.akv_evict_snapkv, "dense": _lib.akv_segment_create_dense}
    if method not in calls:
        raise ValueError(f"method {method!r} is unknown; there are {', '.join(calls)}")
    call = calls[method] if compressor is None else compressor.compress
    _check(call(C.byref(layer), C.byref(config), C.byref(handle), C.byref(diag)), diag)
    del keep
    segment = Segment(handle.value)
    segment.compressed_on = "cpu" if compressor is None else compressor.kind
    return segment


def plan(
    num_tokens: int,
    num_kv_heads: int,
    gqa_group: int,
    head_dim: int,
    *,
    keep_ratio: float = 0.1,
    profile: Profile = "default",
    rotary_dim: int | None = None,
    window: int = 32,
    head_dim_v: int | None = None,
    has_positions: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Exact bytes of a segment before making it; {"kind", "bytes", "dense_bytes", "min_keep_ratio", ...}.

    A ratio that this shape cannot reach raises AkvError; the message names the smallest one.
    """
    shape, config, info, diag = _ffi.Shape(), _ffi.Config(), _ffi.PlanInfo(), _ffi.Diag()
    _lib.akv_shape_init(C.byref(shape))
    _lib.akv_config_init(C.byref(config))
    _lib.akv_plan_info_init(C.byref(info))
    shape.num_tokens, shape.num_kv_heads, shape.gqa_group = num_tokens, num_kv_heads, gqa_group
    shape.head_dim_k, shape.head_dim_v = head_dim, head_dim_v or head_dim
    shape.rotary_dim = head_dim if rotary_dim is None else rotary_dim
    shape.num_queries, shape.has_positions, shape.dtype = window, int(has_positions), _ffi.BF16
    config.profile, config.keep_ratio = _profile(profile), keep_ratio
    if overrides:
        x = experiment(profile, **overrides)
        config.experiment = C.pointer(x)
    _check(_lib.akv_plan(C.byref(shape), C.byref(config), C.byref(info), C.byref(diag)), diag)
    return {
        "kind": _ffi.SEGMENT_KINDS[info.kind],
        "dense_reason": _ffi.DENSE_REASONS[info.dense_reason],
        "bytes": info.bytes.total,
        "budget_bytes": info.budget_bytes,
        "dense_bytes": info.dense_bytes,
        "num_anchors": info.num_anchors,
        "min_bytes": info.min_bytes,
        "min_keep_ratio": info.min_keep_ratio,
    }


def _profile(name: str) -> int:
    if name not in _ffi.PROFILES:
        raise ValueError(f"profile {name!r} is unknown; there are {', '.join(_ffi.PROFILES)}")
    return _ffi.PROFILES[name]


def map_layers(function: Callable[[int, In], Out], layers: Iterable[In], threads: int) -> list[Out]:
    """[function(i, layer)] over layers on a thread pool, in order; the first failure is raised."""
    if threads <= 1:
        return [function(i, layer) for i, layer in enumerate(layers)]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        held = list(layers)
        return list(pool.map(function, range(len(held)), held))
