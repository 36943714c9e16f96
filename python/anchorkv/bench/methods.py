# SPDX-License-Identifier: Apache-2.0
"""Methods by name, behind one interface: prefill a prompt, and give a cache to go on from and the bytes it counts.

    dense                          everything in 16 bit
    default@10  paper@20           AnchorKV at that ratio; ablations: default@10:pool_weight=0,value_boost=1
    default@10+shares              the same bytes, split over the layers as the file of --shares says
    evict@10                       the C library's SnapKV at equal bytes
    kvpress.SnapKV@10              a press of kvpress (SnapKV PyramidKV AdaKV ObservedAttention StreamingLLM
                                   ExpectedAttention Knorm TOVA KVzip ...), removing 1 - 1/10; KVzip
                                   reads the context twice more, and wants a model folder, no GGUF file
    press.default@10               AnchorKV through kvpress's hooks
    quantized4  quantized2         transformers' QuantizedCache (quanto), groups of 64
    turboquant3  turboquant2       rotated Lloyd-Max codes of that many bits, the last 128 tokens exact

Bytes are those of the compressed part, keys and values in 16 bit where a method keeps them dense. A press that masks
instead of dropping (AdaKV, KVzip) holds dense tensors; its bytes are nominal and marked so.
"""

import contextlib
import math
import os
import re

import torch

LEVELS = {  # positive Lloyd-Max levels of the unit Gaussian
    1: (0.797885,),
    2: (0.452780, 1.510418),
    3: (0.245094, 0.756005, 1.343909, 2.151946),
    4: (0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590),
}
EXACT = 128
CHECKED = 4  # tokens between two looks at whether an answer's score is settled
MASKING = ("AdaKV", "CriticalAdaKV", "DuoAttention", "KVzip")


class Unavailable(RuntimeError):
    """The method cannot run here; the message says what is missing."""


def rotation(d, seed):
    """Orthonormal [d, d]: QR of a Gaussian matrix, signs fixed so that it is uniformly distributed."""
    q, r = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed)))
    return q * torch.sign(torch.diagonal(r))


def turboquant(x, bits, turn):
    """x [B, H, S, d] -> its reconstruction; the last EXACT tokens stay as they are."""
    half = torch.tensor(LEVELS[bits], device=x.device)
    levels = torch.cat((-half.flip(0), half))
    bounds = (levels[1:] + levels[:-1]) / 2
    d, far = x.shape[-1], x[:, :, :-EXACT].float()
    norm = far.norm(dim=-1, keepdim=True).half().float()
    y = far / norm.clamp(min=1e-20) @ turn.T * math.sqrt(d)
    out = x.clone()
    out[:, :, :-EXACT] = (levels[torch.bucketize(y, bounds)] / math.sqrt(d) @ turn * norm).to(x.dtype)
    return out


class Method:
    """prefill(model, ids) -> (cache, logits after the last token, bytes). `nominal`: bytes are not those held."""

    nominal = False

    def __init__(self, name):
        self.name = name

    def prefill(self, model, ids):
        with self.context(model):
            cache = self.cache(model)
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache, out.logits[:, -1], self.finish(cache, ids.shape[1])

    def check(self, model):
        """ValueError when the method cannot be for this model."""

    def context(self, model):
        return contextlib.nullcontext()

    def cache(self, model):
        from transformers import DynamicCache

        return DynamicCache(config=model.config)

    def finish(self, cache, tokens):
        return sum(2 * (layer.keys.numel() + layer.values.numel()) for layer in cache.layers)


class Anchor(Method):
    def check(self, model):
        self.cache(model)

    def __init__(self, name, ratio, overrides, **options):
        super().__init__(name)
        self.options = dict(ratio=ratio, overrides=overrides, **options)

    def cache(self, model):
        from ..transformers_cache import AnchorKVCache

        return AnchorKVCache(model.config, tail_limit=1 << 30, **self.options)

    def finish(self, cache, tokens):
        report = cache.report()
        if report["why_exact"]:
            raise Unavailable(f"{self.name} at {tokens} tokens: {report['why_exact']}")
        return report["segment_bytes"]


class Press(Method):
    def __init__(self, name, press, ratio, shares=None):
        super().__init__(name)
        try:
            import kvpress

            from ..press import AnchorKVPress
        except ImportError as error:
            raise Unavailable(f"{name} needs kvpress (pip install anchorkv[bench]): {error}") from None
        removed = 1 - 1 / ratio
        if press in ("default", "paper"):
            self.press = AnchorKVPress(compression_ratio=removed, profile=press, shares=shares)
        elif press.endswith("AdaKV"):
            outer = getattr(kvpress, press + "Press")
            self.press = outer(kvpress.SnapKVPress(compression_ratio=removed))
        else:
            if not hasattr(kvpress, press + "Press"):
                raise ValueError(f"kvpress {kvpress.__file__} has no {press}Press")
            self.press = getattr(kvpress, press + "Press")(compression_ratio=removed)
        self.nominal, self.ratio, self.kind = press in MASKING, ratio, press

    def check(self, model):
        if hasattr(self.press, "stored_bytes"):
            self.press.post_init_from_model(model)
        if self.kind == "KVzip" and not os.path.isdir(model.config.name_or_path):
            raise ValueError(f"{self.name} reads the model's tokenizer again: give --model as a folder, no GGUF file")

    @contextlib.contextmanager
    def context(self, model):
        before = model.config._attn_implementation
        if self.kind == "ObservedAttention":  # needs the attention weights themselves, which eager hands to its hook
            model.set_attn_implementation("eager")
        try:
            with self.press(model):
                yield
        finally:
            model.config._attn_implementation = before

    def prefill(self, model, ids):
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
        return super().prefill(model, ids)

    def finish(self, cache, tokens):
        if hasattr(self.press, "stored_bytes"):
            return self.press.stored_bytes
        return int(super().finish(cache, tokens) / (self.ratio if self.nominal else 1))


class Quantized(Method):
    def __init__(self, name, bits):
        super().__init__(name)
        try:
            import optimum.quanto  # noqa: F401
        except ImportError as error:
            raise Unavailable(f"{name} needs optimum-quanto (pip install anchorkv[bench]): {error}") from None
        self.bits = bits

    def cache(self, model):
        from transformers import QuantizedCache

        return QuantizedCache("quanto", model.config, nbits=self.bits, q_group_size=64)

    def finish(self, cache, tokens):
        # Codes, and a 16-bit scale and shift for every 64 numbers.
        first = cache.layers[0]
        shape = first._dequantize(first._quantized_keys).shape
        return len(cache.layers) * 2 * int(shape.numel() * (self.bits / 8 + 4 / 64))


class Turbo(Method):
    def __init__(self, name, bits):
        super().__init__(name)
        self.bits = bits

    def finish(self, cache, tokens):
        total = 0
        for i, layer in enumerate(cache.layers):
            B, H, S, d = layer.keys.shape
            turn = rotation(d, i).to(layer.keys.device)
            if S > EXACT:
                layer.keys, layer.values = (turboquant(x, self.bits, turn) for x in (layer.keys, layer.values))
            coded = max(0, S - EXACT)
            total += 2 * B * H * (coded * (-(-d * self.bits // 8) + 2) + min(S, EXACT) * d * 2)
        return total


def make(name, shares=None):
    """Method of a name; ValueError for an unknown one, Unavailable when a package is missing. shares: a file."""
    base, _, tail = name.partition("@")
    ratio, _, changes = tail.partition(":")
    ratio, plus, extra = ratio.partition("+")
    if name == "dense":
        return Method(name)
    match = re.fullmatch(r"(quantized|turboquant)(\d)", name)
    if match:
        bits = int(match[2])
        if match[1] == "quantized":
            if bits not in (2, 4):
                raise ValueError(f"{name}: QuantizedCache has 2 and 4 bits")
            return Quantized(name, bits)
        if bits not in LEVELS:
            raise ValueError(f"{name}: 1 to 4 bits")
        return Turbo(name, bits)
    try:
        factor = float(ratio)
        overrides = {k: float(v) if "." in v else int(v) for k, v in (c.split("=") for c in changes.split(",") if c)}
    except ValueError:
        raise ValueError(
            f"method {name!r}: NAME@RATIO or NAME@RATIO:field=value,... is wanted, as default@10"
        ) from None
    if plus and (extra != "shares" or base not in ("default", "paper", "press.default", "press.paper")):
        raise ValueError(f"method {name!r}: +shares is for default, paper, press.default and press.paper")
    if plus and shares is None:
        raise ValueError(f"method {name!r} needs --shares FILE (python -m anchorkv.bench calibrate, or akv calibrate)")
    shares = shares if plus else None
    if factor < 1:
        raise ValueError(f"method {name!r}: the ratio is dense / compressed bytes, at least 1")
    if base in ("default", "paper"):
        return Anchor(name, factor, overrides or None, profile=base, shares=shares)
    if base == "evict":
        return Anchor(name, factor, None, method="snapkv", window=64)
    kind, _, press = base.partition(".")
    if kind in ("kvpress", "press") and press:
        return Press(name, press, factor, shares)
    raise ValueError(f"method {name!r} is unknown; see python -m anchorkv.bench --help")


@torch.inference_mode()
def greedy(model, method, ids, question, new_tokens, stop, settled=None):
    """(generated ids, bytes): the prompt is compressed, then the question [1, q] (may be empty: the prompt held it).
    settled(ids so far): nothing that follows can change the score."""
    cache, logits, size = method.prefill(model, ids)
    at = ids.shape[1]
    out = []
    if question.shape[1]:
        positions = torch.arange(at, at + question.shape[1], device=ids.device)[None]
        logits = model(question, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits[:, -1]
        at += question.shape[1]
    for _ in range(new_tokens):
        token = int(logits[0].argmax())
        if token in stop:
            break
        out.append(token)
        if settled is not None and len(out) % CHECKED == 0 and settled(out):
            break
        step = torch.tensor([[token]], device=ids.device)
        logits = model(step, past_key_values=cache, position_ids=torch.tensor([[at]], device=ids.device)).logits[:, -1]
        at += 1
    return out, size


@torch.inference_mode()
def log_probs(model, method, ids, continuation):
    """([n, vocabulary] log-probabilities over the continuation [1, n], bytes); the first row comes from the prefill."""
    cache, logits, size = method.prefill(model, ids)
    at = ids.shape[1]
    positions = torch.arange(at, at + continuation.shape[1], device=ids.device)[None]
    rest = model(continuation, past_key_values=cache, position_ids=positions).logits[0, :-1]
    return torch.log_softmax(torch.cat((logits, rest)).float(), -1), size
