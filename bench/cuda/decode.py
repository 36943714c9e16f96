# SPDX-License-Identifier: Apache-2.0
"""One decode step of one layer on the GPU: compressed segments against the best dense kernels, in the same run.

usage: decode.py LIBRARY SEGMENTS_FOLDER [CASE...]     a CASE is NAME:FILE:BATCH[:TAIL], as 64k20b8:s64k20.seg:8:16
       --alone before the cases: no dense peers;  --kernels: also each kernel's time (CUPTI, without flushing L2)

Protocol: H, G, d of the segment, bf16, one query token; 256 MiB are read before every replay and copies of the inputs rotate, so that
L2 is cold; CUDA graphs, median of 60 replays. Dense peers: torch scaled_dot_product_attention with the cuDNN and the flash back end, grouped heads
not expanded. Limits: dense bytes, compressed bytes over the copy bandwidth measured here. Accuracy: against float64
attention over what the CPU library decodes from the segment.
"""
import concurrent.futures
import ctypes as C
import os
import statistics
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DEV = torch.device("cuda")
L2_BYTES = 60 << 20


class Diag(C.Structure):
    _fields_ = [("status", C.c_int), ("message", C.c_char * 508)]


class Sequence(C.Structure):
    _fields_ = [("segments", C.c_void_p), ("num_segments", C.c_uint32), ("tail_tokens", C.c_uint64), ("tail_keys", C.c_void_p),
                ("tail_values", C.c_void_p), ("tail_stride_head", C.c_int64 * 2), ("tail_stride_token", C.c_int64 * 2),
                ("tail_mask", C.c_void_p), ("tail_mask_stride", C.c_int64)]


class Batch(C.Structure):
    _fields_ = [("struct_size", C.c_size_t)] + [(n, C.c_uint32) for n in (
        "num_kv_heads", "gqa_group", "head_dim_k", "head_dim_v", "num_queries", "num_sequences")] + [
        ("sequences", C.c_void_p), ("tail_lengths", C.c_void_p), ("tail_dtype", C.c_int), ("query_dtype", C.c_int),
        ("out_dtype", C.c_int), ("sm_scale", C.c_double), ("logit_softcap", C.c_double)]


class Step(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("queries", C.c_void_p), ("query_stride_sequence", C.c_int64),
                ("query_stride_head", C.c_int64), ("query_stride_token", C.c_int64), ("sinks", C.c_void_p), ("out", C.c_void_p),
                ("out_stride_sequence", C.c_int64), ("out_stride_head", C.c_int64), ("out_stride_token", C.c_int64),
                ("state_max", C.c_void_p), ("state_sum", C.c_void_p)]


lib = C.CDLL(os.path.abspath(sys.argv[1]))
# packing and decoding would take most of the time
workers = concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1))


def call(name, *args):
    diag = Diag()
    if getattr(lib, name)(*args, C.byref(diag)) != 0:
        raise RuntimeError(f"{name}: {diag.message.decode()}")


def stream():
    return C.c_void_p(torch.cuda.current_stream().cuda_stream)


class Segment:
    def __init__(self, path):
        raw = np.fromfile(path, dtype=np.uint8)
        self.bytes = raw.nbytes
        self.handle = C.c_void_p()
        call("akv_segment_open", C.c_void_p(raw.ctypes.data), C.c_size_t(raw.nbytes), C.c_int(1), None, C.byref(self.handle))
        u = lambda at, t: int(raw[at : at + np.dtype(t).itemsize].view(t)[0])
        self.S, self.H, self.G, self.d = u(24, np.uint64), u(104, np.uint32), u(108, np.uint32), u(112, np.uint32)

    def decode(self):
        k = np.empty((self.H, self.S, self.d), np.float32)
        v = np.empty_like(k)

        def head(h):
            call("akv_segment_decode", self.handle, C.c_uint32(h), C.c_uint64(0), C.c_uint64(self.S), C.c_void_p(k[h].ctypes.data),
                 C.c_void_p(v[h].ctypes.data))

        list(workers.map(head, range(self.H)))
        return torch.from_numpy(k), torch.from_numpy(v)

    def upload(self):
        n = C.c_size_t()
        call("akv_cuda_upload_bytes", self.handle, C.byref(n))
        memory = torch.empty(n.value, dtype=torch.uint8, device=DEV)
        out = C.c_void_p()
        call("akv_cuda_upload", self.handle, C.c_void_p(memory.data_ptr()), n, stream(), C.byref(out))
        return memory, out, n.value


class Plan:
    """One batch: every sequence with its own copy of the segment and of the tail."""

    def __init__(self, segment, batch, tail):
        self.keep = []
        sequences = (Sequence * batch)()
        self.k = torch.randn(batch, segment.H, max(tail, 1), segment.d, device=DEV).bfloat16()
        self.v = torch.randn(batch, segment.H, max(tail, 1), segment.d, device=DEV).bfloat16()
        self.device_bytes = 0
        uploads = list(workers.map(lambda _: segment.upload(), range(batch)))
        for i, (memory, handle, n) in enumerate(uploads):
            self.device_bytes += n
            array = (C.c_void_p * 1)(handle)
            self.keep += [memory, array, handle]
            s = sequences[i]
            s.segments, s.num_segments, s.tail_tokens = C.cast(array, C.c_void_p), 1, tail
            s.tail_keys, s.tail_values = self.k[i].data_ptr(), self.v[i].data_ptr()
            for side in range(2):
                s.tail_stride_head[side], s.tail_stride_token[side] = max(tail, 1) * segment.d, segment.d
        b = Batch()
        lib.akv_cuda_batch_init(C.byref(b))
        b.num_kv_heads, b.gqa_group, b.head_dim_k, b.head_dim_v = segment.H, segment.G, segment.d, segment.d
        b.num_sequences, b.sequences, b.sm_scale, b.out_dtype = batch, C.cast(sequences, C.c_void_p), segment.d**-0.5, 0
        n = C.c_size_t()
        call("akv_cuda_workspace_bytes", C.byref(b), C.byref(n))
        self.ws_bytes = n.value
        self.ws = torch.empty(n.value, dtype=torch.uint8, device=DEV)
        self.plan = C.c_void_p()
        call("akv_cuda_plan_create", C.byref(b), C.c_void_p(self.ws.data_ptr()), n, stream(), C.byref(self.plan))
        self.step = Step()
        lib.akv_cuda_step_init(C.byref(self.step))

    def attend(self, q, out):
        s = self.step
        s.queries, s.out = q.data_ptr(), out.data_ptr()
        s.query_stride_sequence, s.query_stride_head, s.query_stride_token = q.stride(0), q.stride(1), q.stride(2)
        s.out_stride_sequence, s.out_stride_head, s.out_stride_token = out.stride(0), out.stride(1), out.stride(2)
        call("akv_cuda_attend", self.plan, C.byref(s), stream())


def graph_times(calls, replays=60):
    """Median microseconds of one call; calls rotate, each in a graph of its own."""
    graphs = []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for f in calls:
            f()
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g, stream=side):
                f()
            graphs.append(g)
        times = []
        for i in range(replays + 5):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.sum(flush, 0, out=scratch) # reads leave no dirty lines that would be written back during the measurement
            a.record()
            graphs[i % len(graphs)].replay()
            b.record()
            torch.cuda.synchronize()
            if i >= 5:
                times.append(a.elapsed_time(b) * 1e3)
    return statistics.median(times), min(times)


def dense_times(out, q, shape):
    dk = torch.empty(*shape, dtype=torch.bfloat16, device=DEV).normal_()
    dv = torch.empty_like(dk).normal_()
    for label, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel([backend]):
                out[label] = graph_times([lambda: F.scaled_dot_product_attention(q, dk, dv, enable_gqa=True)])[0]
        except Exception as e:
            print(label, "refused:", str(e)[:100])


flush = torch.zeros(64 << 20, dtype=torch.float32, device=DEV)
scratch = torch.zeros((), dtype=torch.float32, device=DEV)


def kernel_times(f):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(10):
            torch.sum(flush, 0, out=scratch)
            f()
        torch.cuda.synchronize()
    return "; ".join(f"{e.key[:24]} {e.device_time_total / e.count:.1f}" for e in p.key_averages() if "akv" in e.key)


def main():
    folder = sys.argv[2]
    cases = [a for a in sys.argv[3:] if not a.startswith("--")]
    copy = torch.randn(1 << 30, dtype=torch.float32, device=DEV)
    target = torch.empty_like(copy)
    t = graph_times([lambda: torch.mul(copy, 1.5, out=target)], 20)[0]
    bandwidth = 2 * 4 * copy.numel() / t * 1e-6
    empty = torch.zeros(1, device=DEV)
    overhead = graph_times([lambda: empty.add_(1)], 30)[0]
    print(f"copy {bandwidth:.2f} TB/s, a graph of one empty kernel {overhead:.1f} us (included in every figure)")
    del copy, target
    torch.cuda.empty_cache()
    print("case | B/token/head stored, on device | cudnn us | flash us | dense bytes us | ours us (min) | speed-up | rel error (worst head)")
    for case in cases:
        name, file, batch, *rest = case.split(":")
        batch, tail = int(batch), int(rest[0]) if rest else 0
        seg = Segment(os.path.join(folder, file))
        torch.manual_seed(1)
        H, G, S, d = seg.H, seg.G, seg.S, seg.d
        copies = max(1, min(4, -(-2 * L2_BYTES // (seg.bytes * batch))))
        plans = [Plan(seg, batch, tail) for _ in range(copies)]
        q = (2.0 * torch.randn(batch, H * G, 1, d, device=DEV)).bfloat16()
        out = torch.full((batch, H * G, 1, d), float("nan"), device=DEV)
        plans[0].attend(q, out)
        torch.cuda.synchronize()
        k, v = seg.decode()
        errors = []
        if "--kernels" in sys.argv:
            print("  ", kernel_times(lambda: plans[0].attend(q, out)))
        for h in range(H):
            keys = torch.cat([k[h].to(DEV).double(), plans[0].k[0, h, :tail].double()])
            values = torch.cat([v[h].to(DEV).double(), plans[0].v[0, h, :tail].double()])
            want = torch.softmax(q[0, h * G : (h + 1) * G, 0].double() @ keys.T * d**-0.5, -1) @ values
            errors += [(out[0, h * G + g, 0].double() - want[g]).norm().item() / want[g].norm().item() for g in range(G)]
        ours, least = graph_times([lambda p=p: p.attend(q, out) for p in plans])
        dense_bytes = batch * H * (S + tail) * d * 4
        dense = {"cudnn": float("nan"), "flash": float("nan")}
        if "--alone" not in sys.argv:
            dense_times(dense, q, (batch, H, S + tail, d))
        best = min((x for x in dense.values() if x == x), default=float("nan"))
        print(f"{name} | {seg.bytes / S / H:.1f}, {plans[0].device_bytes / batch / S / H:.1f} | {dense['cudnn']:.1f} | {dense['flash']:.1f} | "
              f"{dense_bytes / bandwidth * 1e-6:.1f} | {ours:.1f} ({least:.1f}) | {best / ours:.2f} | "
              f"{statistics.mean(errors):.2e} ({max(errors):.2e}) | ws {plans[0].ws_bytes >> 20} MiB", flush=True)
        del plans
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
