# SPDX-License-Identifier: Apache-2.0
"""One full-attention layer of an AnchorKVCache: compressed segments of every row, and a dense tail of new tokens."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..attention import attend
from ..codec import AkvError, compress
from . import device as cuda
from .attention import TAG
from .rope import Rope

SAMPLED = 64  # further prompt queries that weight the key coordinates
GROW = 256  # tokens by which the tail's memory grows at least
GROW_GPU = 64  # there memory counts more than the copy
INFEASIBLE = -20  # AKV_E_INFEASIBLE
UNSUPPORTED = -2  # AKV_E_UNSUPPORTED
FITS = 6  # segments that are made, at most, until one fits on the GPU as asked


class Settings:
    """What all layers of one cache share."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no setting {name!r}")


class AnchorKVLayer(CacheLayerMixin):
    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, settings: Settings, index: int, rope: Rope) -> None:
        super().__init__()
        self.settings, self.index, self.rope = settings, index, rope
        self.module = None
        self.reset()

    def reset(self):
        self._k = self._v = None  # [B, H, capacity, d]
        self.gpu = None  # DeviceAttention, when that is where the model is
        self.n = 0  # tokens in the tail
        self.offset = 0  # tokens in the segments, padding included
        self.rows = None  # rows[b]: [Segment]
        self.pending = False  # keys were handed out and not attended to yet
        self.deferred = False  # and not appended either: attention does it
        self.is_initialized = False
        self.why_dense = None
        self.sinks = None
        self._forget()

    def _forget(self):
        self.recent = []  # [B, Hq, t, d] pieces: queries of the last tokens of the tail, at least `ring` of them
        self.num_recent = 0
        self.sampled = []  # [(index in the tail, [B, Hq, M, d])]
        self.positions, self.valid = [], []  # of the tail: [B or 1, t] pieces; valid None = all real

    # ------------------------------------------------------------------------------------------ what transformers calls

    def lazy_initialization(self, key_states, value_states):
        for x, name in ((key_states, "keys"), (value_states, "values")):
            if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise TypeError(f"the model's {name} are {x.dtype}; load it in float32, float16 or bfloat16")
        if key_states.dtype != value_states.dtype and cuda.is_gpu(key_states.device):
            raise TypeError(
                f"the model's keys are {key_states.dtype} and its values {value_states.dtype}; one is wanted"
            )
        if self.rope.dim > key_states.shape[-1]:
            raise ValueError(
                f"layer {self.index}: keys have {key_states.shape[-1]} coordinates, the model this cache was made for "
                f"rotates {self.rope.dim}: make an AnchorKVCache from this model's config"
            )
        self._place(key_states.device)
        self.dtype = key_states.dtype
        self.rows = [[] for _ in range(key_states.shape[0])]
        self.is_initialized = True

    def _place(self, device):
        """Work on this device from now on, or say why not."""
        self.gpu = None
        if cuda.is_gpu(device):
            cuda.check_device(device)
            if self.settings.order is not None:
                raise NotImplementedError("llama_cpp=True reorders coordinates, which is done on the CPU: model.cpu()")
            if device not in self.settings.devices:
                self.settings.devices[device] = cuda.Shared(device)
            self.gpu = cuda.DeviceAttention(self.settings.devices[device])
        elif device.type != "cpu":
            raise NotImplementedError(
                f"the model is on {device}; AnchorKVCache works on CUDA GPUs and the CPU: model.cpu()"
            )
        elif self.settings.ratio_of == "device":
            raise NotImplementedError(
                "ratio_of='device' counts the bytes on a GPU, and the model is on the CPU: model.cuda()"
            )
        elif self.settings.compress_on == "gpu":
            raise NotImplementedError("compress_on='gpu', and the model is on the CPU: model.cuda(), or 'auto'")
        elif self.settings.graphs:
            raise NotImplementedError("graphs=True makes CUDA graphs, and the model is on the CPU: model.cuda()")
        self.device = device

    @property
    def keys(self):
        """For readers of other caches' fields: the tail."""
        return None if self._k is None else self._k[:, :, : self.n]

    @property
    def values(self):
        return None if self._v is None else self._v[:, :, : self.n]

    @keys.setter
    def keys(self, value):
        assert value is None  # what CacheLayerMixin begins with

    @values.setter
    def values(self, value):
        assert value is None

    def update(self, key_states, value_states, *args, **kwargs):
        """Append; the keys returned carry the layer with them, so that the attention function finds it."""
        if self.pending:
            raise RuntimeError(
                f"layer {self.index}: keys were cached but not attended to through anchorkv's attention function. "
                "The model's attn_implementation was changed after the cache was made, or this model type does not "
                "hand its cached keys to the attention function unchanged"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        B = len(self.rows)
        if key_states.shape[0] != B:
            raise ValueError(
                f"layer {self.index}: {key_states.shape[0]} rows given, the cache holds {B}; use a new cache, or "
                "batch_repeat_interleave / batch_select_indices"
            )
        if key_states.dtype != self.dtype or key_states.device != self.device:
            raise ValueError(
                f"layer {self.index}: {key_states.dtype} on {key_states.device} given, the cache holds {self.dtype} on "
                f"{self.device}; use a new cache"
            )
        if self.gpu is not None and value_states.dtype != self.dtype:  # autocast; a plan has one type for its tails
            value_states = value_states.to(self.dtype)
        t = key_states.shape[2]
        if self.settings.when == "decode" and self.offset == 0 and t == 1 and self.n > 1:
            self.compress_tail()
        self.deferred = t == 1 and self.offset > 0 and self.gpu is not None and self.gpu.may_defer(self)
        if self.deferred:
            self.n += 1  # attention appends it
        else:
            self._append(key_states, value_states)
        self.pending = True
        if self.offset and self.gpu is not None:  # attention takes them from here; views would cost time only
            keys, values = key_states, value_states
        else:
            keys, values = self.keys, self.values
        setattr(keys, TAG, self)
        return keys, values

    def _append(self, k, v):
        need = self.n + k.shape[2]
        if self.n == 0 and k.shape[2] > 1:
            self._k, self._v = k, v  # a prompt is taken over as it is
        else:
            if self._k is None or self._k.shape[2] < need or self._shared:
                capacity = need + max(GROW if self.gpu is None else GROW_GPU, need // 4)
                for name, new in (("_k", k), ("_v", v)):
                    old = getattr(self, name)
                    with cuda.kept():
                        grown = new.new_empty((*new.shape[:2], capacity, new.shape[3]))
                    if self.n:
                        grown[:, :, : self.n] = old[:, :, : self.n]
                    setattr(self, name, grown)
            self._write(self.n, k, v)
        self._shared = self._k is k
        self.n = need

    def _write(self, at, k, v):
        self._k.narrow(2, at, k.shape[2]).copy_(k)
        self._v.narrow(2, at, k.shape[2]).copy_(v)

    def get_seq_length(self, *args):
        return self.offset + self.n

    def get_mask_sizes(self, query_length):
        if not isinstance(query_length, int):  # transformers before 5.3 gives the positions
            query_length = query_length.shape[0]
        return self.n + query_length, self.offset

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.3

    def crop(self, tokens_to_remove):
        if tokens_to_remove > 0:  # transformers before 5.3: the length that is wanted
            tokens_to_remove = min(0, tokens_to_remove - self.get_seq_length())
        count = -tokens_to_remove
        if count == 0:
            return
        if count > self.n:
            self._cut(count - self.n)
            self._empty_tail(self.rows[0][0])
            self.pending = False
            return
        positions, valid = self._tail_positions(), self._tail_valid()
        self.n -= count
        self.positions, self.valid = [positions[:, : self.n]], [None if valid is None else valid[:, : self.n]]
        if self.recent:
            last = self.last_queries()
            last = last[:, :, : max(0, last.shape[2] - count)]
            self.recent, self.num_recent = [last], last.shape[2]
        self.sampled = [(i[i < self.n], q[:, :, i < self.n]) for i, q in self.sampled]
        if self.n == 0:
            self.positions, self.valid = [], []
        self.pending = False

    def _pick(self, indices):
        if not self.is_initialized:
            return
        indices = torch.as_tensor(indices)
        rows = torch.arange(len(self.rows))[indices.cpu()].tolist()
        B = len(self.rows)

        def pick(x):
            return x if x is None or (x.shape[0] == 1 and B > 1) else x[torch.tensor(rows, device=x.device)]

        self.rows = [list(self.rows[r]) for r in rows]  # segments never change: rows share them
        self._k, self._v = pick(self._k), pick(self._v)
        self.recent = [pick(q) for q in self.recent]
        self.sampled = [(i, pick(q)) for i, q in self.sampled]
        self.positions, self.valid = [pick(p) for p in self.positions], [pick(p) for p in self.valid]
        self._forget_plan()

    def reorder_cache(self, beam_idx):
        self._pick(beam_idx)

    def batch_repeat_interleave(self, repeats):
        self._pick(torch.arange(len(self.rows or [])).repeat_interleave(repeats))

    def batch_select_indices(self, indices):
        self._pick(indices)

    def offload(self):
        raise NotImplementedError("AnchorKVCache is small already; offloading it to the CPU is not supported")

    prefetch = offload

    # ------------------------------------------------------------------------------------------------------- attention

    def attend(self, underneath, module, query, key, value, mask, options):
        if self.gpu is None or self.gpu.plan is None or self.module is None or self.module() is not module:
            self._check(module, query, options)  # what it reads is in the plan, where there is one
        self.pending = False
        if self.deferred and (
            mask is not None or query.dtype is not key.dtype or self.gpu.plan.dtype is not query.dtype
        ):
            self._write(self.n - 1, key, value)  # no case for `step`
            self.deferred = False
        try:
            self._observe(query, mask, options.get("position_ids"))
        except BaseException:
            if self.deferred:  # it is counted already
                self._write(self.n - 1, key, value)
                self.deferred = False
            raise
        if self.offset == 0:
            if self.gpu is not None:
                self.gpu.probe(self, query)
            out = underneath(module, query, key, value, mask, **options)
            limit = 1 if query.shape[2] > 1 and self.settings.when == "forward" else self.settings.tail_limit
        else:
            if self.deferred:
                out = self.gpu.step(self, query, key, value, self.settings.graphs), None
                self.deferred = False
            else:
                out = self._attend_compressed(query, mask), None
            limit = self.settings.tail_limit
        if self.n >= limit and (self.settings.when != "manual" or self.offset):
            self.compress_tail()
        return out

    def _check(self, module, query, options):
        if self.module is None or self.module() is None:
            self.module = weakref.ref(module)
        elif self.module() is not module:
            raise ValueError(
                f"layer {self.index}: this cache already holds what another model read; use one AnchorKVCache per "
                "model and conversation"
            )
        if options.get("sliding_window") is not None:
            raise NotImplementedError(
                f"layer {self.index} attends through a sliding window of {options['sliding_window']}, which the "
                "model's config does not say of this layer"
            )
        self.sm_scale = options.get("scaling") or query.shape[-1] ** -0.5
        self.softcap = options.get("softcap") or 0.0
        if options.get("s_aux") is not None and self.sinks is None:
            self.sinks = options["s_aux"].detach().float().contiguous()

    def _observe(self, query, mask, positions):
        t = query.shape[2]
        if positions is None:
            positions = torch.arange(self.get_seq_length() - t, self.get_seq_length(), device=query.device)[None]
        if positions.dim() != 2 or positions.shape[1] != t:
            raise NotImplementedError(
                f"position_ids of shape {tuple(positions.shape)} for {t} tokens: one position per token is supported"
            )
        self.positions.append(positions)
        self.valid.append(self._valid_of(mask, t))
        ring = self.settings.ring
        if t >= ring:
            self.recent, self.num_recent = [query[:, :, -ring:].clone()], ring
        else:
            self.recent.append(query if t == 1 else query.clone())  # a single one is kept without a copy
            self.num_recent += t
            while self.num_recent - self.recent[0].shape[2] >= ring:
                self.num_recent -= self.recent.pop(0).shape[2]
        if t > 1:
            last = max(1, t - self.settings.window)
            m = min(SAMPLED, last)
            at = (2 * torch.arange(m) + 1) * last // (2 * m)  # the middle of each of m stretches
        elif self.n % 16 == 0:
            at = torch.zeros(1, dtype=torch.long)
        else:
            return
        self.sampled.append((at + (self.n - t), query[:, :, at.to(query.device)].clone()))

    def last_queries(self):
        """[B, Hq, <= ring, d] of the tail's last tokens."""
        queries = self.recent[0] if len(self.recent) == 1 else torch.cat(self.recent, 2)
        return queries[:, :, -self.settings.ring :]

    @staticmethod
    def _valid_of(mask, t):
        """[B, t] which of the newest tokens are real, or None: all. Padding is what the last query does not see."""
        if mask is None or t == 1:
            return None
        row = mask[:, 0, -1, -t:]
        row = row if row.dtype == torch.bool else row > torch.finfo(row.dtype).min / 2
        return None if bool(row.all()) else row

    def _tail_positions(self):
        B = len(self.rows)
        pieces = [p.expand(B, -1) for p in self.positions]
        return torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]

    def _tail_valid(self):
        if all(v is None for v in self.valid):
            return None
        B = len(self.rows)
        return torch.cat(
            [
                torch.ones((B, p.shape[1]), dtype=torch.bool, device=p.device) if v is None else v.expand(B, -1)
                for p, v in zip(self.positions, self.valid)
            ],
            1,
        )

    def _attend_compressed(self, query, mask):
        B, heads, t, _ = query.shape
        if mask is not None:
            if mask.shape[1] != 1:
                raise NotImplementedError("a mask per attention head is not supported once the cache is compressed")
        if self.gpu is not None:
            return self.gpu.attend(self, query, mask)
        if mask is not None:
            mask = mask[:, 0, :, -self.n :]
            if mask.dtype == torch.bool:
                if t == 1 and bool(mask.all()):
                    mask = None
                else:
                    mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
            else:
                mask = mask.float()
        k, v = self._k[:, :, : self.n], self._v[:, :, : self.n]
        order = self.settings.order
        if order is not None:
            query, k = query[..., order], k[..., order]
        out = torch.empty((B, t, heads, v.shape[3]), dtype=torch.float32)
        for b in range(B):
            attend(
                query[b],
                self.rows[b],
                k[b],
                v[b],
                out=out[b].transpose(0, 1),
                mask=None if mask is None else mask[b if mask.shape[0] > 1 else 0],
                sm_scale=self.sm_scale,
                logit_softcap=self.softcap,
                sinks=self.sinks,
                threads=self.settings.threads,
            )
        return out.to(query.dtype)

    # ----------------------------------------------------------------------------------------------------- compression

    def compress_tail(self, strict: bool = False) -> bool:
        """The tail of every row becomes a segment, its memory is freed. Tails too short for the ratio stay exact."""
        positions, valid = self._tail_positions().cpu(), self._tail_valid()
        valid = None if valid is None else valid.cpu()
        index = torch.cat([i for i, _ in self.sampled]) if self.sampled else torch.empty(0, dtype=torch.long)
        sampled = torch.cat([q for _, q in self.sampled], 2) if len(index) else None
        segments = []
        for b in range(len(self.rows)):
            at = None if valid is None else valid[b].nonzero()[:, 0]
            if at is not None and len(at) == 0:
                raise ValueError(f"row {b} of the batch holds padding only; there is nothing to compress")
            try:
                segments.append(self._compress_row(b, at, positions[b], index, sampled))
            except AkvError as error:
                if error.status != INFEASIBLE:
                    raise
                if strict or self.n >= self.settings.tail_limit:
                    raise
                self.why_dense = str(error)
                return False
        if self.gpu is not None:
            self.gpu.upload(segments)
        for row, segment in zip(self.rows, segments):
            row.append(segment)
        self.offset += self.n
        self._empty_tail(segments[0])
        return True

    def _empty_tail(self, segment):
        """No tokens, but the right shape, so that masks and views need no special case."""
        self._k = self._v = None  # what it held is free from here on
        self._forget_plan()
        self.n, self.why_dense = 0, None
        self._forget()
        shape = (len(self.rows), segment.num_kv_heads, 0)
        self._k = torch.empty((*shape, segment.head_dim_k), dtype=self.dtype, device=self.device)
        self._v = torch.empty((*shape, segment.head_dim_v), dtype=self.dtype, device=self.device)
        self._shared = False

    def _forget_plan(self):
        if self.gpu is not None:
            self.gpu.forget()

    def dense_tail(self):
        """The tail of a single row as an exact segment; the tail itself stays."""
        nothing = torch.empty(0, dtype=torch.long)
        return self._compress_row(0, None, self._tail_positions()[0].cpu(), nothing, None, method="dense")

    def adopt(self, segments, model, entry):
        """Take the segments of a document, as the only row."""
        weight = next(model.parameters())
        self._place(model.device)
        self.dtype, self.rows, self.is_initialized = weight.dtype, [list(segments)], True
        self.sm_scale, self.softcap = entry.sm_scale, entry.logit_softcap
        self.offset = segments[-1].info()["last_position"] + 1
        self._empty_tail(segments[0])

    def _cut(self, count):
        """Take `count` more tokens off the end of the compressed part."""
        if any(sum(s.num_tokens for s in row) != self.offset for row in self.rows) or count >= self.offset:
            raise ValueError(
                f"crop by {count} tokens more than the exact ones reaches into the compressed part, which can be cut "
                "only when no row is padded or has lost tokens, and at least one token stays"
            )
        cut = []
        for row in self.rows:
            kept, left = list(row), count
            while left >= kept[-1].num_tokens:
                left -= kept.pop().num_tokens
            if left:
                kept[-1] = kept[-1].cut(kept[-1].num_tokens - left)
            cut.append(kept)
        self.rows = cut
        self.offset -= count
        self._forget_plan()

    def _compress_row(self, b, at, positions, index, sampled, method=None, **changes):
        """changes: of the settings, for this segment."""
        s, n = Settings(**{**vars(self.settings), **changes}), self.n
        k, v, q = self._k[b][:, :n].detach(), self._v[b][:, :n].detach(), self.last_queries()[b].detach()
        queries_at = torch.arange(n - q.shape[1], n)
        if at is not None:
            if int(at[-1]) - int(at[0]) + 1 == len(at):  # padding in front only: a view
                k, v = k[:, int(at[0]) : int(at[-1]) + 1], v[:, int(at[0]) : int(at[-1]) + 1]
            else:
                k, v = k[:, at.to(k.device)], v[:, at.to(k.device)]
            positions = positions[at]
            q = q[:, torch.isin(queries_at, at).to(q.device)]
            keep = torch.isin(index, at)
        else:
            keep = torch.ones(len(index), dtype=torch.bool)
        tokens = k.shape[1]
        window = min(s.window, q.shape[1], tokens)
        if window == 0:
            raise ValueError(
                "no query of the tokens to compress is known: crop removed them; generate some tokens first"
            )
        keep = keep.nonzero()[:, 0]
        if len(keep) > SAMPLED:
            keep = keep[torch.linspace(0, len(keep) - 1, SAMPLED).long()]
        m = None if len(keep) == 0 else sampled[b][:, keep.to(sampled.device)].detach()
        asked = None if m is None else self._tail_positions()[b].cpu()[index[keep]].int().numpy()
        q = q[:, -window:]
        order, style = s.order, self.rope.style
        if order is not None:
            k, q, m = k[..., order], q[..., order], None if m is None else m[..., order]
            style = "interleaved"
        positions = positions.int()
        consecutive = bool((positions[1:] - positions[:-1] == 1).all())
        if not consecutive and bool((positions[1:] <= positions[:-1]).any()):
            raise ValueError(f"row {b}: position_ids must rise from token to token")
        keep_ratio = s.keep_ratio
        if s.shared is not None:
            shape = dict(num_tokens=tokens, num_kv_heads=k.shape[0], gqa_group=q.shape[0] // k.shape[0])
            shape.update(head_dim=k.shape[2], head_dim_v=v.shape[2], rotary_dim=self.rope.dim, window=window)
            keep_ratio = s.shared.keep_of(self.index, tuple({**shape, "has_positions": not consecutive}.items()))
        options = dict(
            keep_ratio=keep_ratio,
            profile=s.profile,
            overrides=s.overrides,
            method=method or s.method,
            sampled_positions=asked,
            positions=None if consecutive else positions.numpy(),
            first_position=int(positions[0]),
            rope_inv_freq=self.rope.inv_freq if self.rope.dim else None,
            rope_style=style,
            rope_magnitude=self.rope.magnitude,
            sm_scale=self.sm_scale,
            logit_softcap=self.softcap,
            layer_index=self.index,
            seed=s.seed,
        )
        if s.ratio_of == "device" and options["method"] != "dense":
            return self._compress_to_fit(k, v, q, m, options)
        return self._compress_arrays(k, v, q, m, options)

    def _compress_to_fit(self, k, v, q, m, options):
        """Until the segment takes on the GPU, in the kernels' form, what the ratio allows, or up to 2 % less."""
        s, goal, best = self.settings, options["keep_ratio"], None
        keep = goal / s.growth
        for _ in range(FITS):
            try:
                segment = self._compress_arrays(k, v, q, m, {**options, "keep_ratio": min(1.0, keep)})
            except AkvError as error:
                if error.status != INFEASIBLE or best is None:
                    raise
                break  # what fits is there already
            taken = cuda.bytes_of(segment) / segment.info()["dense_bytes"]
            s.growth = taken * segment.info()["dense_bytes"] / segment.nbytes  # the next layer begins with it
            if taken <= goal and (best is None or segment.nbytes > best.nbytes):
                best = segment
            if 0.98 * goal <= taken <= goal or (best is not None and keep >= 1):
                break
            keep *= 0.99 * goal / taken
        if best is None:
            raise AkvError(
                INFEASIBLE,
                f"layer {self.index}: no segment was found that takes 1/{1 / goal:.1f} of the dense bytes on the GPU; "
                "use ratio_of='file', or a smaller ratio",
            )
        return best

    def _compress_arrays(self, k, v, q, m, options):
        """On the GPU where it can; else by the CPU, and the segment says why."""
        s, why = self.settings, None
        if self.gpu is not None and s.compress_on != "cpu":
            if options["method"] != "anchorkv":
                why = f"method {options['method']!r} is compressed by the CPU"
            else:
                why = self.gpu.compressor.why_not()
            if why is None:
                try:
                    return compress(k, v, q, sampled=m, compressor=self.gpu.compressor, **options)
                except AkvError as error:
                    if error.status != UNSUPPORTED:
                        raise
                    why = str(error)
            if s.compress_on == "gpu" and options["method"] != "dense":
                raise NotImplementedError(f"layer {self.index}: compress_on='gpu', but {why}")
        k, v, q, m = (None if x is None else x.cpu() for x in (k, v, q, m))
        executor = s.threads.executor if s.threads else None
        segment = compress(k, v, q, sampled=m, executor=executor, **options)
        segment.why_cpu = why
        return segment

    # ---------------------------------------------------------------------------------------------------------- numbers

    def ratio(self) -> float | None:
        """Dense 16-bit bytes / bytes of this layer's segments; None without any."""
        distinct = {s.handle: s for row in self.rows or [] for s in row}
        stored = sum(s.nbytes for s in distinct.values())
        return sum(s.info()["dense_bytes"] for s in distinct.values()) / stored if stored else None

    def nbytes(self) -> int:
        """Bytes that this layer holds where the model is: segments, the tail's memory, queries kept for compression."""
        distinct = {s.handle: s if self.gpu is None else s.uploaded for row in self.rows or [] for s in row}
        held = [self._k, self._v, *self.recent] + [q for _, q in self.sampled]
        plan = 0 if self.gpu is None else self.gpu.nbytes()
        segments = sum(s.nbytes for s in distinct.values() if s is not None)
        return int(segments + plan + sum(x.numel() * x.element_size() for x in held if x is not None))
