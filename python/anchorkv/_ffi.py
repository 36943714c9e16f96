# SPDX-License-Identifier: Apache-2.0
"""The structs and functions of include/anchorkv/{anchorkv,akv_document,akv_experimental}.h for ctypes.

Field order and types are those of the headers. Loading compares the sizes with those of the library (check_layout);
test_ffi.py asks a C compiler for the offset and size of every field.
ctypes releases the interpreter lock during every call, so layers can be compressed on several Python threads.
"""

from __future__ import annotations

import ctypes as C
import os
import sys
from collections.abc import Mapping
from typing import Any

F32, F16, BF16 = 0, 1, 2
ROPE_STYLES = {"half_split": 0, "interleaved": 1}
PROFILES = {"paper": 1, "default": 2}
SEGMENT_KINDS = {0: "dense", 1: "compressed"}
DENSE_REASONS: dict[int, str | None] = {0: None, 1: "requested", 2: "fits", 3: "within window", 4: "evicted"}
RANKS = {"utility": 0, "cosine": 1, "norm": 2, "attention": 3, "random": 4}
SCALE_RULES = {"absmax": 0, "least_squares": 1}
CODE_RULES = {"rotated_lloyd_max": 0, "plain_uniform": 1}
ANCHOR_SPACES = {"pre_rope": 0, "post_rope": 1}


class Diag(C.Structure):
    _fields_ = [("status", C.c_int), ("message", C.c_char * 508)]


class Tensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("dtype", C.c_int),
        ("stride_head", C.c_int64),
        ("stride_token", C.c_int64),
        ("stride_dim", C.c_int64),
    ]


class Rope(C.Structure):
    _fields_ = [
        ("rotary_dim", C.c_uint32),
        ("style", C.c_int),
        ("magnitude", C.c_double),
        ("inv_freq", C.POINTER(C.c_double)),
    ]


class Experiment(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("rank", C.c_int),
        ("scale_rule", C.c_int),
        ("code_rule", C.c_int),
        ("anchor_space", C.c_int),
        ("no_random_anchors", C.c_int),
        ("equal_head_budgets", C.c_int),
        ("anchors_only", C.c_int),
        ("rho", C.c_double),
        ("pool_width", C.c_uint32),
        ("tokens_per_anchor", C.c_uint32),
        ("sinks", C.c_uint32),
        ("pool_tokens", C.c_uint32),
        ("incoherent", C.c_double),
        ("floor", C.c_double),
        ("value_boost", C.c_double),
        ("query_mix", C.c_double),
        ("slow_angle", C.c_double),
        ("basis_cols", C.c_uint32),
        ("num_levels", C.c_uint32),
        ("level_bits", C.c_uint16 * 16),
        ("uniform_anchors", C.c_int),
        ("anchor_rounds", C.c_uint32),
        ("most_attended", C.c_uint32),
        ("pool_weight", C.c_double),
    ]


class Config(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("profile", C.c_int),
        ("keep_ratio", C.c_double),
        ("budget_bytes", C.c_uint64),
        ("seed", C.c_uint64),
        ("allocator", C.c_void_p),
        ("executor", C.c_void_p),
        ("experiment", C.POINTER(Experiment)),
    ]


class Shape(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("num_tokens", C.c_uint64),
        ("num_kv_heads", C.c_uint32),
        ("gqa_group", C.c_uint32),
        ("head_dim_k", C.c_uint32),
        ("head_dim_v", C.c_uint32),
        ("rotary_dim", C.c_uint32),
        ("num_queries", C.c_uint32),
        ("has_positions", C.c_uint32),
        ("dtype", C.c_int),
    ]


class Bytes(C.Structure):
    _fields_ = [
        (name, C.c_uint64)
        for name in (
            "total",
            "object",
            "header",
            "anchors",
            "positions",
            "index",
            "coefficients",
            "level_maps",
            "residuals",
            "model",
            "dense",
        )
    ]


class Layer(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("shape", Shape),
        ("layer_index", C.c_int32),
        ("keys", Tensor),
        ("values", Tensor),
        ("queries", Tensor),
        ("sampled", Tensor),
        ("num_sampled", C.c_uint32),
        ("sampled_positions", C.POINTER(C.c_int32)),
        ("positions", C.POINTER(C.c_int32)),
        ("first_position", C.c_int32),
        ("rope", Rope),
        ("sm_scale", C.c_double),
        ("logit_softcap", C.c_double),
    ]


class SegmentInfo(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("kind", C.c_int),
        ("dense_reason", C.c_int),
        ("profile", C.c_uint32),
        ("shape", Shape),
        ("first_position", C.c_int32),
        ("last_position", C.c_int32),
        ("dense_bytes", C.c_uint64),
        ("budget_bytes", C.c_uint64),
        ("bytes", Bytes),
        ("num_anchors", C.c_uint32),
        ("residuals_k", C.c_uint64),
        ("residuals_v", C.c_uint64),
        ("sm_scale", C.c_double),
        ("logit_softcap", C.c_double),
        ("seed", C.c_uint64),
        ("dense_dtype", C.c_int),
    ]


class PlanInfo(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("kind", C.c_int),
        ("dense_reason", C.c_int),
        ("dense_bytes", C.c_uint64),
        ("budget_bytes", C.c_uint64),
        ("bytes", Bytes),
        ("num_anchors", C.c_uint32),
        ("residuals_k", C.c_uint64),
        ("residuals_v", C.c_uint64),
        ("min_bytes", C.c_uint64),
        ("min_keep_ratio", C.c_double),
    ]


class AttendParams(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("num_kv_heads", C.c_uint32),
        ("gqa_group", C.c_uint32),
        ("head_dim_k", C.c_uint32),
        ("head_dim_v", C.c_uint32),
        ("num_queries", C.c_uint32),
        ("queries", Tensor),
        ("segments", C.POINTER(C.c_void_p)),
        ("num_segments", C.c_uint32),
        ("tail_tokens", C.c_uint64),
        ("tail_keys", Tensor),
        ("tail_values", Tensor),
        ("tail_mask", Tensor),
        ("sm_scale", C.c_double),
        ("logit_softcap", C.c_double),
        ("sinks", C.c_void_p),
        ("out", C.c_void_p),
        ("out_stride_head", C.c_int64),
        ("out_stride_token", C.c_int64),
        ("state_max", C.c_void_p),
        ("state_sum", C.c_void_p),
        ("executor", C.c_void_p),
        ("segment_shifts", C.POINTER(C.c_int64)),
        ("rope", C.POINTER(Rope)),
    ]


class DocumentModel(C.Structure):
    _fields_ = [
        ("num_layers", C.c_uint32),
        ("num_heads", C.c_uint32),
        ("num_kv_heads", C.c_uint32),
        ("embedding_dim", C.c_uint32),
        ("vocab_tokens", C.c_uint32),
        ("rope_type", C.c_int32),
        ("weight_bytes", C.c_uint64),
        ("hash", C.c_uint64 * 2),
        ("description", C.c_char * 48),
    ]


class DocumentLayer(C.Structure):
    _fields_ = [
        ("kind", C.c_uint32),
        ("num_kv_heads", C.c_uint32),
        ("gqa_group", C.c_uint32),
        ("head_dim_k", C.c_uint32),
        ("head_dim_v", C.c_uint32),
        ("rotary_dim", C.c_uint32),
        ("rope_style", C.c_uint32),
        ("has_sinks", C.c_uint32),
        ("rope_magnitude", C.c_double),
        ("sm_scale", C.c_double),
        ("logit_softcap", C.c_double),
        ("rope_hash", C.c_uint64),
        ("num_segments", C.c_uint32),
        ("first_segment", C.c_uint32),
    ]


class DocumentProperty(C.Structure):
    _fields_ = [("key", C.c_char_p), ("value", C.c_char_p)]


class DocumentParts(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("model", DocumentModel),
        ("tokens", C.POINTER(C.c_int32)),
        ("num_tokens", C.c_uint64),
        ("next_position", C.c_int32),
        ("method", C.c_uint32),
        ("layers", C.POINTER(DocumentLayer)),
        ("num_layers", C.c_uint32),
        ("num_segments", C.c_uint32),
        ("segments", C.POINTER(C.c_void_p)),
        ("properties", C.POINTER(DocumentProperty)),
        ("num_properties", C.c_uint32),
        ("native_state", C.c_void_p),
        ("native_state_bytes", C.c_uint64),
    ]


DocumentWrite = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p, C.c_size_t, C.POINTER(Diag))


def library_path() -> str:
    """AKV_LIBRARY when set, else the library beside this package; the one with the GPU part, when it is there."""
    given = os.environ.get("AKV_LIBRARY")
    if given:
        return given
    here = os.path.dirname(os.path.abspath(__file__))
    with_gpu = os.path.join(here, "libanchorkv_cuda.so")
    if os.path.exists(with_gpu):
        return with_gpu
    return os.path.join(here, "libanchorkv.dylib" if sys.platform == "darwin" else "libanchorkv.so")


# Every struct that the library stamps with its own size, and who writes the stamp. The others are parts of these, but
# for Diag, DocumentLayer and DocumentProperty, which only test_ffi.py compares.
STAMPED: dict[str, type[C.Structure]] = {
    "akv_experiment_init": Experiment,
    "akv_config_init": Config,
    "akv_shape_init": Shape,
    "akv_layer_init": Layer,
    "akv_segment_info_init": SegmentInfo,
    "akv_plan_info_init": PlanInfo,
    "akv_attend_params_init": AttendParams,
    "akv_document_parts_init": DocumentParts,
}
ROOM = 4096  # for a struct that has grown: its _init writes as much as the library thinks it has


def misfit(path: str, what: str) -> ImportError:
    return ImportError(
        f"the AnchorKV library {path!r} does not belong to this Python package: {what}. Install the package again, or "
        "point AKV_LIBRARY to a library built from the same sources"
    )


def function_of(lib: C.CDLL, path: str, name: str) -> Any:
    """A function object of its own; what it is told of types is not seen by others."""
    try:
        return lib[name]
    except AttributeError:
        raise misfit(path, f"it has no function {name}") from None


def check_layout(lib: C.CDLL, path: str, stamped: Mapping[str, type[C.Structure]] = STAMPED) -> None:
    """ImportError when the library's structs have other sizes than those above: fields would be misread."""
    memory = (C.c_uint64 * (ROOM // 8))()
    wrong = []
    for init, struct in stamped.items():
        function = function_of(lib, path, init)
        function.restype = None
        function(memory)
        if memory[0] != C.sizeof(struct):
            wrong.append(f"{init[:-5]} has {memory[0]} bytes there and {C.sizeof(struct)} here")
    if wrong:
        raise misfit(path, "; ".join(wrong))


def load() -> C.CDLL:
    path = library_path()
    try:
        lib = C.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"cannot load the AnchorKV library {path!r} ({error}); build the target anchorkv_shared and "
            "set AKV_LIBRARY to the file, or put it beside the package"
        ) from error
    check_layout(lib, path)
    diag, segment = C.POINTER(Diag), C.c_void_p
    for name, result, arguments in (
        ("akv_version", C.c_char_p, []),
        ("akv_status_str", C.c_char_p, [C.c_int]),
        ("akv_config_init", None, [C.POINTER(Config)]),
        ("akv_layer_init", None, [C.POINTER(Layer)]),
        ("akv_experiment_init", None, [C.POINTER(Experiment)]),
        ("akv_experiment_init_default", None, [C.POINTER(Experiment)]),
        ("akv_segment_info_init", None, [C.POINTER(SegmentInfo)]),
        ("akv_compress", C.c_int, [C.POINTER(Layer), C.POINTER(Config), C.POINTER(segment), diag]),
        ("akv_segment_create_dense", C.c_int, [C.POINTER(Layer), C.POINTER(Config), C.POINTER(segment), diag]),
        ("akv_evict_snapkv", C.c_int, [C.POINTER(Layer), C.POINTER(Config), C.POINTER(segment), diag]),
        ("akv_segment_cut", C.c_int, [segment, C.c_uint64, C.POINTER(Config), C.POINTER(segment), diag]),
        ("akv_segment_retain", C.c_void_p, [segment]),
        ("akv_segment_release", None, [segment]),
        ("akv_segment_get_info", C.c_int, [segment, C.POINTER(SegmentInfo), diag]),
        ("akv_segment_data", C.c_void_p, [segment, C.POINTER(C.c_size_t)]),
        ("akv_segment_decode", C.c_int, [segment, C.c_uint32, C.c_uint64, C.c_uint64, C.c_void_p, C.c_void_p, diag]),
        ("akv_plan_info_init", None, [C.POINTER(PlanInfo)]),
        ("akv_shape_init", None, [C.POINTER(Shape)]),
        ("akv_plan", C.c_int, [C.POINTER(Shape), C.POINTER(Config), C.POINTER(PlanInfo), diag]),
        ("akv_segment_open", C.c_int, [C.c_void_p, C.c_size_t, C.c_int, C.c_void_p, C.POINTER(segment), diag]),
        ("akv_attend_params_init", None, [C.POINTER(AttendParams)]),
        ("akv_attend_workspace_bytes", C.c_int, [C.POINTER(AttendParams), C.POINTER(C.c_size_t), diag]),
        ("akv_attend", C.c_int, [C.POINTER(AttendParams), C.c_void_p, C.c_size_t, diag]),
        ("akv_threads_create", C.c_int, [C.c_uint32, C.POINTER(C.c_void_p), diag]),
        ("akv_threads_executor", C.c_void_p, [C.c_void_p]),
        ("akv_threads_destroy", None, [C.c_void_p]),
        ("akv_document_parts_init", None, [C.POINTER(DocumentParts)]),
        ("akv_document_write", C.c_int, [C.POINTER(DocumentParts), DocumentWrite, C.c_void_p, C.c_void_p, diag]),
        ("akv_document_open", C.c_int, [C.c_void_p, C.c_size_t, C.c_void_p, C.POINTER(C.c_void_p), diag]),
        ("akv_document_close", None, [C.c_void_p]),
        ("akv_document_verify", C.c_int, [C.c_void_p, diag]),
        ("akv_document_get_parts", C.c_int, [C.c_void_p, C.POINTER(DocumentParts), diag]),
        ("akv_document_property_value", C.c_char_p, [C.c_void_p, C.c_char_p, C.c_uint32]),
        (
            "akv_document_open_segment",
            C.c_int,
            [C.c_void_p, C.c_uint32, C.c_int, C.c_void_p, C.POINTER(segment), diag],
        ),
    ):
        function = function_of(lib, path, name)
        function.restype, function.argtypes = result, arguments
        setattr(lib, name, function)
    return lib
