# SPDX-License-Identifier: Apache-2.0
"""The structs and functions of include/anchorkv/akv_cuda.h for ctypes; the library may be without them.

As in _ffi.py the fields are those of the header, and test_ffi.py compares them with a C compiler's.
"""

from __future__ import annotations

import ctypes as C
from types import SimpleNamespace

from . import _ffi

ALIGN = 256  # AKV_CUDA_ALIGN, of every device buffer; torch's are aligned to 512


class Sequence(C.Structure):
    _fields_ = [
        ("segments", C.POINTER(C.c_void_p)),
        ("num_segments", C.c_uint32),
        ("tail_tokens", C.c_uint64),
        ("tail_keys", C.c_void_p),
        ("tail_values", C.c_void_p),
        ("tail_stride_head", C.c_int64 * 2),
        ("tail_stride_token", C.c_int64 * 2),
        ("tail_mask", C.c_void_p),
        ("tail_mask_stride", C.c_int64),
    ]


class Batch(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("num_kv_heads", C.c_uint32),
        ("gqa_group", C.c_uint32),
        ("head_dim_k", C.c_uint32),
        ("head_dim_v", C.c_uint32),
        ("num_queries", C.c_uint32),
        ("num_sequences", C.c_uint32),
        ("sequences", C.POINTER(Sequence)),
        ("tail_lengths", C.c_void_p),
        ("tail_dtype", C.c_int),
        ("query_dtype", C.c_int),
        ("out_dtype", C.c_int),
        ("sm_scale", C.c_double),
        ("logit_softcap", C.c_double),
    ]


class Step(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("queries", C.c_void_p),
        ("query_stride_sequence", C.c_int64),
        ("query_stride_head", C.c_int64),
        ("query_stride_token", C.c_int64),
        ("sinks", C.c_void_p),
        ("out", C.c_void_p),
        ("out_stride_sequence", C.c_int64),
        ("out_stride_head", C.c_int64),
        ("out_stride_token", C.c_int64),
        ("state_max", C.c_void_p),
        ("state_sum", C.c_void_p),
    ]


class Token(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("keys", C.c_void_p),
        ("values", C.c_void_p),
        ("stride_sequence", C.c_int64 * 2),
        ("stride_head", C.c_int64 * 2),
    ]


STAMPED: dict[str, type[C.Structure]] = {
    "akv_cuda_batch_init": Batch,
    "akv_cuda_step_init": Step,
    "akv_cuda_token_init": Token,
}


def bind(lib: C.CDLL, path: str) -> SimpleNamespace:
    """The library's GPU functions by their names without "akv_cuda_". NotImplementedError when it has none."""
    if not hasattr(lib, "akv_cuda_attend"):
        raise NotImplementedError(
            f"the AnchorKV library {path!r} was built without its GPU part: install the package with a CUDA toolkit "
            "there (AKV_CUDA=ON pip install .), or point AKV_LIBRARY to a libanchorkv_cuda.so"
        )
    _ffi.check_layout(lib, path, STAMPED)
    diag, batch, size, handle = C.POINTER(_ffi.Diag), C.POINTER(Batch), C.POINTER(C.c_size_t), C.POINTER(C.c_void_p)
    layer, config = C.POINTER(_ffi.Layer), C.POINTER(_ffi.Config)
    memory, out = C.c_void_p, SimpleNamespace()
    for name, result, arguments in (
        ("batch_init", None, [batch]),
        ("step_init", None, [C.POINTER(Step)]),
        ("token_init", None, [C.POINTER(Token)]),
        ("upload_bytes", C.c_int, [C.c_void_p, size, diag]),
        ("upload", C.c_int, [C.c_void_p, memory, C.c_size_t, C.c_void_p, handle, diag]),
        ("segment_release", None, [C.c_void_p]),
        ("plan_bytes", C.c_int, [batch, size, size, diag]),
        (
            "plan_create_shared",
            C.c_int,
            [batch, memory, C.c_size_t, memory, C.c_size_t, C.c_void_p, handle, diag],
        ),
        ("plan_destroy", None, [C.c_void_p]),
        ("compress_workspace_bytes", C.c_int, [layer, config, size, diag]),
        (
            "compress",
            C.c_int,
            [layer, C.c_void_p, config, memory, C.c_size_t, C.c_void_p, handle, diag],
        ),
        # prepared references: a call a layer
        ("append", C.c_int, [C.c_void_p, C.c_void_p, C.c_void_p, C.c_void_p]),
        ("attend", C.c_int, [C.c_void_p, C.c_void_p, C.c_void_p, C.c_void_p]),
    ):
        function = _ffi.function_of(lib, path, f"akv_cuda_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(out, name, function)
    return out
