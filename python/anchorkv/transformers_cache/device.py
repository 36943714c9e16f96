# SPDX-License-Identifier: Apache-2.0
"""Attention of an AnchorKVLayer on an NVIDIA GPU: uploaded segments, the exact tail where it lies, akv_cuda_attend.

A decode step costs two calls of the library a layer, append and attend: what they read is prepared once (a plan), until
the tail's memory or the segments change. Nothing here falls back to the CPU, and nothing waits for the GPU but making
a plan.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes as C
import os
import threading
from typing import Any

import torch

from .. import _ffi, _ffi_cuda
from ..arrays import View
from ..codec import Segment, _check, _lib

DTYPES = {torch.float32: _ffi.F32, torch.float16: _ffi.F16, torch.bfloat16: _ffi.BF16}
MANY = 32  # queries of one call, when a further prompt is read
SCRATCH = 64 << 20  # bytes of intermediate results that such a call may take
OLDEST = (8, 0)  # compute capability
COMPRESSES = (9, 0)  # from which akv_cuda_compress works

_functions: Any = None


def functions() -> Any:
    global _functions
    if _functions is None:
        _functions = _ffi_cuda.bind(_lib, _ffi.library_path())
    return _functions


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def check_device(device: torch.device) -> None:
    """NotImplementedError with a sentence when this GPU or this library cannot do it."""
    if torch.version.cuda is None:
        raise NotImplementedError(
            f"the model is on {device} of another maker; AnchorKV's GPU part is CUDA: model.cpu()"
        )
    functions()
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        name = torch.cuda.get_device_name(device)
        raise NotImplementedError(
            f"{name} ({device}) has compute capability {capability[0]}.{capability[1]}; AnchorKV's kernels need "
            f"{OLDEST[0]}.{OLDEST[1]} or newer: model.cpu()"
        )


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a tenth of the time; torch's own compiler calls it


def stream_of(device: torch.device) -> int:
    if _raw_stream is not None:
        return _raw_stream(device.index)
    return torch.cuda.current_stream(device).cuda_stream


def current(device: torch.device) -> Any:
    """The library works on the current device."""
    return torch.cuda.device(device)


def is_current(device: torch.device) -> bool:
    return torch.cuda.current_device() == device.index


def bytes_of(segment: Segment) -> int:
    """What a segment takes on a device."""
    size, diag = C.c_size_t(), _ffi.Diag()
    _check(functions().upload_bytes(segment.handle, C.byref(size), C.byref(diag)), diag)
    return size.value


def mark(device: torch.device) -> Any:
    """The point that the current stream has reached."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def after(point: Any, device: torch.device) -> int:
    """A stream for copies that goes on when that point has passed."""
    with _copying_lock:  # packers may be the first at once
        if device not in _copying:
            _copying[device] = torch.cuda.Stream(device)
        stream = _copying[device]
    stream.wait_event(point)
    return int(stream.cuda_stream)


_copying: dict[torch.device, Any] = {}
_copying_lock = threading.Lock()
_packers: Any = None


def packers() -> Any:
    """Threads that lay segments out for the kernels while the model reads on."""
    global _packers
    if _packers is None:
        _packers = concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1), "anchorkv-pack")
    return _packers


class Upload:
    """A segment on a device; copies of the segment share it. It gets there in the background: `handle` waits for it."""

    def __init__(self, segment: Segment, device: torch.device) -> None:
        self.device, self._handle = device, C.c_void_p()
        self.nbytes = bytes_of(segment)
        with current(device):
            # of the current stream, where it is used: what was freed there may still be read until now
            self.memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            now = mark(device)
        self._sent = packers().submit(self._send, segment, now)  # which keeps this object, and its memory, till then

    def _send(self, segment: Segment, start: Any) -> None:
        diag = _ffi.Diag()
        with current(self.device):
            stream, memory = after(start, self.device), self.memory.data_ptr()
            status = functions().upload(
                segment.handle, memory, self.nbytes, stream, C.byref(self._handle), C.byref(diag)
            )
        _check(status, diag)

    @property
    def handle(self) -> C.c_void_p:
        self._sent.result()
        return self._handle

    @property
    def failed(self) -> bool:
        return self._sent.done() and self._sent.exception() is not None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            functions().segment_release(self._handle)


def upload_of(segment: Segment, device: torch.device) -> Upload:
    if segment.uploaded is None or segment.uploaded.device != device or segment.uploaded.failed:
        segment.uploaded = Upload(segment, device)
    return segment.uploaded


class Compressor:
    """akv_cuda_compress for codec.compress, on torch's current stream; arrays are torch tensors on the device."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def why_not(self) -> str | None:
        """Why this device cannot compress, if it cannot."""
        capability = torch.cuda.get_device_capability(self.device)
        if capability >= COMPRESSES:
            return None
        return (
            f"{torch.cuda.get_device_name(self.device)} has compute capability {capability[0]}.{capability[1]}; "
            f"compression on the GPU needs {COMPRESSES[0]}.{COMPRESSES[1]}"
        )

    def view(self, x: torch.Tensor, name: str) -> View:
        if x.device != self.device:
            raise TypeError(f"{name} is on {x.device}, not on {self.device}")
        return View(x.data_ptr(), DTYPES[x.dtype], x.shape, x.stride(), x)

    def compress(self, layer: Any, config: Any, out: Any, diag: Any) -> int:
        cuda, size = functions(), C.c_size_t()
        with current(self.device):
            status = cuda.compress_workspace_bytes(layer, config, C.byref(size), diag)
            if status:
                return int(status)
            workspace = torch.empty(size.value, dtype=torch.uint8, device=self.device)
            # it has waited for the stream when it returns: what it read and wrote may be freed
            stream, memory = stream_of(self.device), workspace.data_ptr()
            return int(cuda.compress(layer, None, config, memory, size.value, stream, out, diag))


def kept() -> Any:
    """For tensors that later steps write to: what is made in inference mode could not be written to outside of it."""
    return torch.inference_mode(False)


class Shared:
    """What the layers of one cache on one device share, since they run one after the other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.n = -1
        self.lengths: torch.Tensor | None = None  # int32 [B]: tokens of the tail, read by the kernels
        self.scratch: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None  # float32 [B, capacity]: what rows do not see of the tail
        self.masked: Any = None  # (the model's mask, n) that `mask` holds
        self.probed = False
        self.side: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        memo[id(self)] = new = Shared(self.device)
        return new

    def set_length(self, rows: int, n: int) -> None:
        """Enqueued: kernels launched before still read the length before."""
        if self.lengths is None or self.lengths.shape[0] != rows:
            with kept():
                self.lengths = torch.full((rows,), n, dtype=torch.int32, device=self.device)
        elif n != self.n:
            self.lengths.fill_(n)
        self.n = n

    def capturing(self) -> Any:
        """A stream on which graphs are captured."""
        if self.side is None:
            self.side = torch.cuda.Stream(self.device)
        return self.side

    def set_mask(self, mask: torch.Tensor | None, rows: int, n: int, capacity: int) -> None:
        """mask: [B or 1, 1, 1, all tokens], bool or added to the logits; a step's layers hand over the same one."""
        if mask is None:
            return
        if self.mask is None or self.mask.shape[0] != rows or self.mask.shape[1] < capacity:
            with kept():
                self.mask = torch.zeros((rows, capacity), device=self.device)
            self.masked = None
        if self.masked is None or self.masked[0] is not mask or self.masked[1] != n:
            self.mask[:, :n] = added(mask[:, 0, 0, -n:])
            self.masked = mask, n

    def room(self, size: int) -> torch.Tensor:
        if self.scratch is None or self.scratch.numel() < size:
            # a quarter more, so that layers that need a little more do not each leave a buffer behind
            self.scratch = torch.empty(size + size // 4, dtype=torch.uint8, device=self.device)
        return self.scratch

    def nbytes(self) -> int:
        held = (self.lengths, self.scratch, self.mask)
        return sum(x.numel() * x.element_size() for x in held if x is not None)


def added(mask: torch.Tensor) -> torch.Tensor:
    """A mask as float32 that is added to the logits."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))


class Plan:
    """akv_cuda_plan and the step's arguments, with everything they point to."""

    def __init__(
        self,
        layer: Any,
        shared: Shared,
        query: torch.Tensor,
        tail_tokens: int,
        mask: torch.Tensor | None,
        lengths: torch.Tensor | None,
        scratch_limit: int | None = None,
    ) -> None:
        """query [B, heads, T, d], whose shape and dtype count; mask float32 [B, T, >= tail_tokens] or None: causal."""
        cuda, self.handle, self.diag = functions(), C.c_void_p(), _ffi.Diag()
        self.k, self.v, self.lengths, self.mask, self.dtype = layer._k, layer._v, lengths, mask, query.dtype
        B, heads, t, d = query.shape
        sequences = (_ffi_cuda.Sequence * B)()
        self.uploads = [[upload_of(segment, shared.device) for segment in row] for row in layer.rows]
        lists = []
        for b, s in enumerate(sequences):
            handles = (C.c_void_p * len(self.uploads[b]))(*[upload.handle.value for upload in self.uploads[b]])
            lists.append(handles)
            s.segments, s.num_segments = C.cast(handles, C.POINTER(C.c_void_p)), len(handles)
            s.tail_tokens, s.tail_keys, s.tail_values = tail_tokens, self.k[b].data_ptr(), self.v[b].data_ptr()
            for side, x in enumerate((self.k, self.v)):
                s.tail_stride_head[side], s.tail_stride_token[side] = x.stride(1), x.stride(2)
            if mask is not None:
                s.tail_mask, s.tail_mask_stride = mask[b].data_ptr(), mask.stride(1)
        batch = _ffi_cuda.Batch()
        cuda.batch_init(C.byref(batch))
        batch.num_kv_heads, batch.gqa_group = self.k.shape[1], heads // self.k.shape[1]
        batch.head_dim_k, batch.head_dim_v, batch.num_queries, batch.num_sequences = d, self.v.shape[3], t, B
        batch.sequences = C.cast(sequences, C.POINTER(_ffi_cuda.Sequence))
        batch.tail_lengths = None if lengths is None else lengths.data_ptr()
        batch.tail_dtype, batch.query_dtype = DTYPES[self.k.dtype], DTYPES[query.dtype]
        batch.out_dtype = batch.query_dtype
        batch.sm_scale, batch.logit_softcap = layer.sm_scale, layer.softcap
        own, scratch, diag = C.c_size_t(), C.c_size_t(), self.diag
        with current(shared.device):
            _check(cuda.plan_bytes(C.byref(batch), C.byref(own), C.byref(scratch), C.byref(diag)), diag)
            self.fits = scratch_limit is None or scratch.value <= scratch_limit
            if not self.fits:
                return
            self.own = torch.empty(max(1, own.value), dtype=torch.uint8, device=shared.device)
            self.scratch = shared.room(max(1, scratch.value))
            status = cuda.plan_create_shared(
                C.byref(batch),
                self.own.data_ptr(),
                own.value,
                self.scratch.data_ptr(),
                scratch.value,
                stream_of(shared.device),
                C.byref(self.handle),
                C.byref(diag),
            )
            _check(status, diag)
        self.step = _ffi_cuda.Step()
        cuda.step_init(C.byref(self.step))
        self.sinks = layer.sinks
        self.step.sinks = None if self.sinks is None else self.sinks.data_ptr()
        self.strides: Any = None
        self.seen: torch.Tensor | None = None  # the tensor that `mask` is a view of
        self.device = shared.device
        self.token = _ffi_cuda.Token()
        cuda.token_init(C.byref(self.token))
        self.token_strides: Any = None
        self.arguments = C.addressof(self.step), C.addressof(self.diag), C.addressof(self.token)
        self.call, self.put = cuda.attend, cuda.append

    def attend(self, query: torch.Tensor, out: torch.Tensor) -> None:
        """out [B, T, heads, d_v]"""
        step = self.step
        strides = query.stride(), out.stride()
        if strides != self.strides:
            if strides[0][3] != 1:
                raise ValueError("the queries' coordinates do not lie side by side in memory")
            step.query_stride_sequence, step.query_stride_head, step.query_stride_token = strides[0][:3]
            step.out_stride_sequence, step.out_stride_token, step.out_stride_head = strides[1][:3]
            self.strides = strides
        step.queries, step.out = query.data_ptr(), out.data_ptr()
        status = self.call(self.handle, self.arguments[0], stream_of(self.device), self.arguments[1])
        if status:
            _check(status, self.diag)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """[B, H, 1, d] of a token, as the last of the tail's length: where it goes is read on the device."""
        token = self.token
        strides = key.stride(), value.stride()
        if strides != self.token_strides:
            if strides[0][3] != 1 or strides[1][3] != 1:  # coordinates have to lie side by side
                self.append(key.contiguous(), value.contiguous())
                return
            for side, x in enumerate(strides):
                token.stride_sequence[side], token.stride_head[side] = x[:2]
            self.token_strides = strides
        token.keys, token.values = key.data_ptr(), value.data_ptr()
        status = self.put(self.handle, self.arguments[2], stream_of(self.device), self.arguments[1])
        if status:
            _check(status, self.diag)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            functions().plan_destroy(self.handle)


class StepGraph:
    """A single token of one layer - append it to the tail, attend to everything - as one launch instead of five."""

    def __init__(self, plan: Plan, shared: Shared, tensors: tuple[torch.Tensor, ...]) -> None:
        """tensors: query, key, value of a token, whose shapes and dtype count."""
        self.plan = plan
        query = tensors[0]
        sizes = [x.numel() for x in tensors]
        with kept():
            self.new = query.new_empty(sum(sizes))
            # the same memory at every step: the next layer's work on it comes before the next token
            self.out = query.new_empty((query.shape[0], 1, query.shape[1], tensors[2].shape[3]))
        q, k, v = (part.view(x.shape) for part, x in zip(self.new.split(sizes), tensors))
        plan.append(*tensors[1:])  # nothing may be loaded while a graph is captured
        self.graph, stream = torch.cuda.CUDAGraph(), shared.capturing()
        with torch.cuda.stream(stream):
            self.graph.capture_begin(capture_error_mode="thread_local")  # other threads copy meanwhile
            try:
                plan.append(k, v)
                plan.attend(q, self.out)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # or the thread would go on capturing
                    self.graph.capture_end()
                raise
            self.graph.capture_end()

    def run(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        torch.cat([x.detach().reshape(-1) for x in tensors], out=self.new)
        self.graph.replay()
        return self.out

    def nbytes(self) -> int:
        return self.new.nbytes + self.out.nbytes


class DeviceAttention:
    """One layer's part: the plan for single tokens, and what a further prompt takes."""

    def __init__(self, shared: Shared) -> None:
        self.shared, self.plan = shared, None
        self.graph: StepGraph | None = None
        self.compressor = Compressor(shared.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceAttention:
        shared = memo.get(id(self.shared)) or self.shared.__deepcopy__(memo)
        return DeviceAttention(shared)

    def forget(self) -> None:
        """The segments or the tail's memory changed."""
        self.plan = self.graph = None

    def may_defer(self, layer: Any) -> bool:
        """Will `step` be able to append the next token?"""
        return (
            self.plan is not None
            and self.plan.k is layer._k
            and self.plan.seen is None
            and self.plan.lengths is self.shared.lengths
            and layer._k.shape[2] > layer.n
        )

    def step(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, graphs: bool
    ) -> torch.Tensor:
        """Append a token and attend; graphs: by one that is made at the first of a plan's steps but one."""
        shared, plan = self.shared, self.plan
        assert plan is not None
        shared.set_length(query.shape[0], layer.n)
        with contextlib.nullcontext() if is_current(shared.device) else current(shared.device):
            if graphs:
                tensors = query, key, value
                if self.graph is None or self.graph.plan is not plan:
                    self.graph = StepGraph(plan, shared, tensors)
                return self.graph.run(tensors)
            plan.append(key, value)
            B, heads, t, _ = query.shape
            out = torch.empty((B, t, heads, layer._v.shape[3]), dtype=query.dtype, device=query.device)
            plan.attend(query, out)
            return out

    def probe(self, layer: Any, query: torch.Tensor) -> None:
        """Before a prompt is read: would the library take such layers on this device?"""
        if not self.shared.probed:
            Plan(layer, Shared(self.shared.device), query[:, :, :1], 1, None, None)
            self.shared.probed = True

    def upload(self, segments: list[Segment]) -> None:
        for segment in segments:
            upload_of(segment, self.shared.device)

    def attend(self, layer: Any, query: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[B, T, heads, d_v], of the queries' dtype; mask [B or 1, 1, T, all tokens] or None."""
        B, heads, t, _ = query.shape
        out = torch.empty((B, t, heads, layer._v.shape[3]), dtype=query.dtype, device=query.device)
        if t > 1:
            self._many(layer, query, mask, out)
            return out
        shared, plan = self.shared, self.plan
        shared.set_length(B, layer.n)
        shared.set_mask(mask, B, layer.n, layer._k.shape[2])
        seen = None if mask is None else shared.mask
        if (
            plan is None
            or plan.k is not layer._k
            or plan.lengths is not shared.lengths
            or plan.seen is not seen
            or plan.dtype is not query.dtype
        ):
            by_query = None if seen is None else seen[:, None]
            self.graph = None  # of the plan before, whose memory it holds
            plan = self.plan = Plan(layer, shared, query, layer._k.shape[2], by_query, shared.lengths)
            plan.seen = seen
        if is_current(shared.device):
            plan.attend(query, out)
        else:
            with current(shared.device):
                plan.attend(query, out)
        return out

    def _many(self, layer: Any, query: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor) -> None:
        """Several queries: by pieces, whose plans live for one call."""
        B, t = query.shape[0], query.shape[2]
        weights = None if mask is None else added(mask[:, 0, :, -layer.n :]).expand(B, -1, -1).contiguous()
        first, size = 0, MANY
        while first < t:
            count = min(size, t - first)
            piece = query[:, :, first : first + count]
            # without a mask query i of the piece sees tail_tokens - count + i + 1 tokens
            tail = layer.n if weights is not None else layer.n - t + first + count
            seen = None if weights is None else weights[:, first : first + count]
            plan = Plan(layer, self.shared, piece, tail, seen, None, SCRATCH if count > 1 else None)
            if not plan.fits:
                size = max(1, size // 2)
                continue
            with current(self.shared.device):
                plan.attend(piece, out[:, first : first + count])
            first += count

    def nbytes(self) -> int:
        graph = 0 if self.graph is None else self.graph.nbytes()
        return graph + (self.plan.own.numel() if self.plan is not None else 0)
