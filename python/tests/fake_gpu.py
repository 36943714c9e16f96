# SPDX-License-Identifier: Apache-2.0
"""A GPU whose memory is the host's, to test what surrounds the kernels where there is none: akv_cuda_* in Python, which
read the structs as the library does and let the CPU's akv_attend compute. Tests alone use it."""

import contextlib
import ctypes as C
import threading
from types import SimpleNamespace

import numpy as np
import torch

from anchorkv import _ffi, _ffi_cuda
from anchorkv.codec import _lib
from anchorkv.transformers_cache import device

SIZES = {_ffi.F32: 4, _ffi.F16: 2, _ffi.BF16: 2}
OWN, SCRATCH = 512, 4096  # and SCRATCH for each query
WORKSPACE = 8192
REFUSE = 99  # more queries than this are refused as out of memory


class FakeGPU:
    """.calls counts by name; plans and segments that live are in .plans and .segments."""

    def __init__(self):
        self.lock = threading.Lock()
        self.refusal = None  # what compress_workspace_bytes says, if it refuses
        self.calls, self.plans, self.segments, self.next = {}, {}, {}, 1000
        self.functions = SimpleNamespace(
            **{n: getattr(self, n) for n in dir(self) if not n.startswith("_") and callable(getattr(self, n))}
        )

    def install(self, monkeypatch):
        monkeypatch.setattr(device, "functions", lambda: self.functions)
        monkeypatch.setattr(device, "is_gpu", lambda d: True)
        monkeypatch.setattr(device, "check_device", lambda d: None)
        monkeypatch.setattr(device, "stream_of", lambda d: 7)
        monkeypatch.setattr(device, "mark", lambda d: "now")
        monkeypatch.setattr(device, "after", lambda point, d: 7 if point == "now" else None)
        monkeypatch.setattr(device, "current", lambda d: contextlib.nullcontext())
        monkeypatch.setattr(device, "is_current", lambda d: True)
        monkeypatch.setattr(device.Compressor, "why_not", lambda self: None)
        return self

    def _count(self, name):
        with self.lock:  # uploads come from several threads
            self.calls[name] = self.calls.get(name, 0) + 1

    def _new(self, table, value, out):
        with self.lock:
            self.next += 1
            table[self.next] = value
            out._obj.value = self.next
        return 0

    def batch_init(self, batch):
        C.memset(batch, 0, C.sizeof(_ffi_cuda.Batch))
        batch._obj.struct_size = C.sizeof(_ffi_cuda.Batch)

    def step_init(self, step):
        C.memset(step, 0, C.sizeof(_ffi_cuda.Step))
        step._obj.struct_size = C.sizeof(_ffi_cuda.Step)

    def token_init(self, token):
        C.memset(token, 0, C.sizeof(_ffi_cuda.Token))
        token._obj.struct_size = C.sizeof(_ffi_cuda.Token)

    def upload_bytes(self, segment, size, diag):
        info = _ffi.SegmentInfo()
        _lib.akv_segment_info_init(C.byref(info))
        assert _lib.akv_segment_get_info(segment, C.byref(info), diag) == 0
        size._obj.value = info.bytes.total + 256
        return 0

    def upload(self, segment, memory, size, stream, out, diag):
        self._count("upload")
        assert stream == 7 and memory
        C.memset(memory, 1, size)
        return self._new(self.segments, _lib.akv_segment_retain(segment), out)

    def compress_workspace_bytes(self, layer, config, size, diag):
        if self.refusal is not None:
            diag._obj.message = self.refusal.encode()
            return -2
        size._obj.value = WORKSPACE
        return 0

    def compress(self, layer, pages, config, workspace, size, stream, out, diag):
        self._count("compress")
        assert stream == 7 and pages is None and size == WORKSPACE
        C.memset(workspace, 4, size)
        assert config._obj.executor is None
        return _lib.akv_compress(layer, config, out, diag)

    def segment_release(self, handle):
        _lib.akv_segment_release(self.segments.pop(handle.value))

    def plan_bytes(self, batch, own, scratch, diag):
        own._obj.value, scratch._obj.value = OWN, SCRATCH * batch._obj.num_queries
        if batch._obj.num_queries > REFUSE:
            scratch._obj.value = 1 << 40
        return 0

    def plan_create_shared(self, batch, own, own_bytes, scratch, scratch_bytes, stream, out, diag):
        self._count("plan")
        b = batch._obj
        assert own_bytes == OWN and scratch_bytes == SCRATCH * b.num_queries and stream == 7
        C.memset(own, 2, own_bytes)
        C.memset(scratch, 3, scratch_bytes)
        fields = [name for name, _ in _ffi_cuda.Batch._fields_ if name != "sequences"]
        keep = SimpleNamespace(**{name: getattr(b, name) for name in fields})
        keep.sequences = []
        for i in range(b.num_sequences):
            s = b.sequences[i]
            keep.sequences.append(
                SimpleNamespace(
                    segments=[self.segments[s.segments[j]] for j in range(s.num_segments)],
                    tokens=s.tail_tokens,
                    pointers=(s.tail_keys, s.tail_values),
                    heads=tuple(s.tail_stride_head),
                    steps=tuple(s.tail_stride_token),
                    mask=s.tail_mask,
                    mask_stride=s.tail_mask_stride,
                )
            )
        return self._new(self.plans, keep, out)

    def plan_destroy(self, handle):
        del self.plans[handle.value]

    def append(self, handle, token, stream, diag):
        self._count("append")
        b, t = self.plans[handle.value], _ffi_cuda.Token.from_address(token)
        assert stream == 7 and t.struct_size == C.sizeof(_ffi_cuda.Token)
        size = SIZES[b.tail_dtype]
        for i, q in enumerate(b.sequences):
            at = C.cast(b.tail_lengths, C.POINTER(C.c_int32))[i] - 1
            assert 0 <= at < q.tokens
            for side, (x, d) in enumerate(((t.keys, b.head_dim_k), (t.values, b.head_dim_v))):
                for h in range(b.num_kv_heads):
                    to = q.pointers[side] + size * (h * q.heads[side] + at * q.steps[side])
                    C.memmove(to, x + size * (i * t.stride_sequence[side] + h * t.stride_head[side]), size * d)
        return 0

    def attend(self, handle, step, stream, diag):
        self._count("attend")
        b, s, number = self.plans[handle.value], _ffi_cuda.Step.from_address(step), C.c_size_t()
        assert stream == 7 and s.struct_size == C.sizeof(_ffi_cuda.Step)
        T, rows = b.num_queries, b.num_kv_heads * b.gqa_group
        for i, q in enumerate(b.sequences):
            n = q.tokens
            if b.tail_lengths:
                n = min(n, C.cast(b.tail_lengths, C.POINTER(C.c_int32))[i])
            p, out = _ffi.AttendParams(), np.zeros((rows, T, b.head_dim_v), np.float32)
            _lib.akv_attend_params_init(C.byref(p))
            p.num_kv_heads, p.gqa_group, p.num_queries = b.num_kv_heads, b.gqa_group, T
            p.head_dim_k, p.head_dim_v = b.head_dim_k, b.head_dim_v
            at = s.queries + i * s.query_stride_sequence * SIZES[b.query_dtype]
            p.queries = _ffi.Tensor(at, b.query_dtype, s.query_stride_head, s.query_stride_token, 1)
            handles = (C.c_void_p * max(1, len(q.segments)))(*q.segments)
            p.segments, p.num_segments = C.cast(handles, C.POINTER(C.c_void_p)), len(q.segments)
            p.tail_tokens = n
            p.tail_keys = _ffi.Tensor(q.pointers[0], b.tail_dtype, q.heads[0], q.steps[0], 1)
            p.tail_values = _ffi.Tensor(q.pointers[1], b.tail_dtype, q.heads[1], q.steps[1], 1)
            if q.mask:
                p.tail_mask = _ffi.Tensor(q.mask, _ffi.F32, 0, q.mask_stride, 1)
            p.sm_scale, p.logit_softcap, p.sinks = b.sm_scale, b.logit_softcap, s.sinks
            p.out, p.out_stride_head, p.out_stride_token = out.ctypes.data, T * b.head_dim_v, b.head_dim_v
            error = _ffi.Diag()
            assert _lib.akv_attend_workspace_bytes(C.byref(p), C.byref(number), C.byref(error)) == 0, error.message
            room = np.empty(number.value + 64, np.uint8)
            aligned = (room.ctypes.data + 63) & ~63
            assert _lib.akv_attend(C.byref(p), aligned, number.value, C.byref(error)) == 0, error.message
            dtype = {v: k for k, v in device.DTYPES.items()}[b.out_dtype]
            size = SIZES[b.out_dtype]
            for r in range(rows):
                for t in range(T):
                    row = torch.from_numpy(out[r, t]).to(dtype).contiguous()
                    to = s.out + size * (i * s.out_stride_sequence + r * s.out_stride_head + t * s.out_stride_token)
                    C.memmove(to, row.data_ptr(), size * b.head_dim_v)
        return 0
