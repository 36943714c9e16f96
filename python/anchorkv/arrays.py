# SPDX-License-Identifier: Apache-2.0
"""Arrays of any library as views that the C library reads in place: pointer, dtype, strides. Nothing is copied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from . import _ffi

NAMES = {_ffi.F32: "float32", _ffi.F16: "float16", _ffi.BF16: "bfloat16"}
_NUMPY = {"float32": _ffi.F32, "float16": _ffi.F16, "uint16": _ffi.BF16, "bfloat16": _ffi.BF16}
_TORCH = {"torch.float32": _ffi.F32, "torch.float16": _ffi.F16, "torch.bfloat16": _ffi.BF16}


class Array(Protocol):
    """What is read: a torch tensor, a numpy array, any other DLPack exporter; in host memory."""

    @property
    def shape(self) -> Any: ...

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class View:
    """A [heads, tokens, dim] array: `tensor` for the C library, `shape`, and `keep`, whoever owns the memory."""

    __slots__ = ("tensor", "shape", "keep")

    def __init__(
        self, pointer: int, dtype: int, shape: Iterable[int], strides: Iterable[int], keep: object
    ) -> None:
        self.tensor = _ffi.Tensor(pointer, dtype, *strides)
        self.shape, self.keep = tuple(shape), keep


def is_torch(x: object) -> bool:
    return type(x).__module__.split(".")[0] == "torch" or any(
        t.__module__ == "torch" and t.__name__ == "Tensor" for t in type(x).__mro__
    )


def view(x: Any, name: str) -> View:
    """View of a torch tensor, numpy array or DLPack exporter of 3 dimensions in host memory."""
    if is_torch(x):
        if x.device.type != "cpu":
            raise TypeError(f"{name} is on {x.device}; this call reads host memory: pass {name}.cpu()")
        if str(x.dtype) not in _TORCH:
            raise TypeError(f"{name} is {x.dtype}; float32, float16 and bfloat16 are read: pass {name}.float()")
        _three(x.dim(), name)
        return View(x.data_ptr(), _TORCH[str(x.dtype)], x.shape, x.stride(), x)
    if not isinstance(x, np.ndarray):
        if hasattr(x, "__dlpack__"):
            try:
                x = np.from_dlpack(x)
            except (BufferError, RuntimeError, TypeError) as error:
                raise TypeError(f"{name} cannot be read through DLPack as host memory ({error})") from error
        elif hasattr(x, "__cuda_array_interface__"):
            raise TypeError(f"{name} is in GPU memory; this call reads host memory: copy it first")
        else:
            raise TypeError(f"{name} is {type(x).__name__}; a torch tensor, numpy array or DLPack exporter is wanted")
    _three(x.ndim, name)
    if x.dtype.name not in _NUMPY:
        raise TypeError(
            f"{name} has dtype {x.dtype}; float32, float16, or uint16 holding bfloat16 bits are read: "
            f"pass {name}.astype('float32')"
        )
    if any(s % x.itemsize for s in x.strides):
        raise ValueError(f"{name} has strides that are no multiple of its element size: pass a contiguous copy")
    return View(x.ctypes.data, _NUMPY[x.dtype.name], x.shape, (s // x.itemsize for s in x.strides), x)


def _three(dimensions: int, name: str) -> None:
    if dimensions != 3:
        raise ValueError(f"{name} has {dimensions} dimensions; [heads, tokens, dim] is wanted")
