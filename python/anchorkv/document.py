# SPDX-License-Identifier: Apache-2.0
"""`.akv` documents (docs/format.md): write and read them as bytes in a file."""

from __future__ import annotations

import ctypes as C
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from . import _ffi
from .codec import Segment, _check, _lib

METHODS = {0: "anchorkv", 1: "snapkv", 2: "exact"}
IO = -50  # AKV_E_IO


def write(
    path: str | os.PathLike[str],
    model: _ffi.DocumentModel,
    tokens: ArrayLike,
    layers: Sequence[_ffi.DocumentLayer],
    segments: Sequence[Segment],
    *,
    method: int = 0,
    properties: Sequence[tuple[str, str]] = (),
) -> None:
    """model: _ffi.DocumentModel; layers: [_ffi.DocumentLayer]; segments: [Segment] in layer order. Replaces `path` when
    everything is written, and only then."""
    parts, diag = _ffi.DocumentParts(), _ffi.Diag()
    _lib.akv_document_parts_init(C.byref(parts))
    ids = np.ascontiguousarray(tokens, np.int32)
    parts.model, parts.method = model, method
    parts.tokens, parts.num_tokens = ids.ctypes.data_as(C.POINTER(C.c_int32)), len(ids)
    parts.next_position = len(ids)
    table = (_ffi.DocumentLayer * len(layers))(*layers)
    handles = (C.c_void_p * len(segments))(*[s.handle for s in segments])
    pairs = (_ffi.DocumentProperty * max(1, len(properties)))(
        *[_ffi.DocumentProperty(k.encode(), v.encode()) for k, v in properties]
    )
    parts.layers, parts.num_layers = table, len(layers)
    parts.segments, parts.num_segments = C.cast(handles, C.POINTER(C.c_void_p)), len(segments)
    parts.properties, parts.num_properties = pairs, len(properties)
    failure: list[OSError] = []
    temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:

            def piece(_: Any, data: int, size: int, __: Any) -> int:
                try:
                    file.write(C.string_at(data, size))
                except OSError as error:
                    failure.append(error)
                    return IO
                return 0

            status = _lib.akv_document_write(C.byref(parts), _ffi.DocumentWrite(piece), None, None, C.byref(diag))
        if failure:
            raise failure[0]
        _check(status, diag)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _read(path: str | os.PathLike[str]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The file in memory that starts at a page, read and not mapped: what was checked must not change afterwards, and a file
    that becomes shorter must not end the program."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise ValueError(f"{os.fspath(path)} is empty; a .akv file never is")
        data, at = memoryview(mmap.mmap(-1, size)), 0
        while at < size:
            got = file.readinto(data[at : at + (1 << 26)])
            if not got:
                raise OSError(f"{os.fspath(path)} became shorter while it was being read: {at} of {size} bytes")
            at += got
    return np.frombuffer(data, np.uint8)


class Document:
    """An open document: model, tokens, layers, properties; segments() copies them out. Every byte is checked first."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._data, self._handle = _read(path), C.c_void_p()
        diag = _ffi.Diag()
        address, size = self._data.ctypes.data, self._data.nbytes
        _check(_lib.akv_document_open(address, size, None, C.byref(self._handle), C.byref(diag)), diag)
        _check(_lib.akv_document_verify(self._handle, C.byref(diag)), diag)
        parts = _ffi.DocumentParts()
        _lib.akv_document_parts_init(C.byref(parts))
        _check(_lib.akv_document_get_parts(self._handle, C.byref(parts), C.byref(diag)), diag)
        self.model = _ffi.DocumentModel.from_buffer_copy(parts.model)
        self.tokens = np.ctypeslib.as_array(parts.tokens, (parts.num_tokens,)).copy()
        self.method, self.next_position = METHODS.get(parts.method), parts.next_position
        self.layers = [_ffi.DocumentLayer.from_buffer_copy(parts.layers[i]) for i in range(parts.num_layers)]
        self.num_segments = parts.num_segments

    def property(self, key: str) -> str | None:
        value = _lib.akv_document_property_value(self._handle, key.encode(), 0)
        return None if value is None else str(value.decode(errors="replace"))

    def segments(self) -> list[Segment]:
        out = []
        for i in range(self.num_segments):
            handle, diag = C.c_void_p(), _ffi.Diag()
            _check(_lib.akv_document_open_segment(self._handle, i, 1, None, C.byref(handle), C.byref(diag)), diag)
            out.append(Segment(handle.value))
        return out

    def close(self) -> None:
        if self._handle:
            _lib.akv_document_close(self._handle)
            self._handle = C.c_void_p()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def __enter__(self) -> Document:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
