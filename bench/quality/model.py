# SPDX-License-Identifier: Apache-2.0
"""A transformers model whose attention reads a given prefix of keys and values, the dense ones or decoded ones.

One attention function is registered with transformers and does two things:
  prefill   exact causal attention over the prompt; keys, values (post-RoPE, as cached) and a few queries are captured
  continue  a batch of continuations over one shared prefix and each row's own exact tail, in one float32 softmax
The prefix is never copied per row, and its heads may hold fewer tokens than the prompt had (eviction): positions are
given, never inferred.
"""

import os

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

NAME = "anchorkv_prefix"


class State:
    def __init__(self):
        self.capture = None  # {"window": W, "sampled": positions} in prefill
        self.layers = {}  # captured: layer -> (K, V, Q of the window, Q sampled)
        self.prefix = None  # [(K, V)] float32 [H, n, d] on the device
        self.tail = {}  # layer -> (K, V) [B, H, t, d] float32
        self.compared = None  # [(K, V) of each layer] of other prefixes: how far off would each layer's output be?
        self.errors = {}  # layer -> [relative squared error] of the last step
        self.valid = None  # [B, t] bool: which tail tokens exist (rows are padded on the left)


STATE = State()


def joint(far_q, prefix_k, prefix_v, near, tail_v):
    """[B, HQ, T, d_v]: one softmax over a prefix that all rows share (far_q [H, B * G * T, d], scaled) and each row's own tail, whose
    masked logits near [B, H, G, T, n] are given."""
    B, H, G, T, n = near.shape
    far = torch.matmul(far_q, prefix_k.transpose(1, 2))
    top = torch.maximum(far.amax(-1).view(H, B, G, T).transpose(0, 1), near.amax(-1))
    far = far.sub_(top.transpose(0, 1).reshape(H, B * G * T, 1)).exp_()
    near = (near - top[..., None]).exp()
    total = far.sum(-1).view(H, B, G, T).transpose(0, 1) + near.sum(-1)
    out = torch.matmul(far, prefix_v).view(H, B, G, T, -1).transpose(0, 1)
    out = out + torch.matmul(near.view(B, H, G * T, n), tail_v).view(B, H, G, T, -1)
    return (out / total[..., None]).reshape(B, H * G, T, -1)


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = module.layer_idx
    if STATE.capture is not None:
        c = STATE.capture
        STATE.layers[layer] = (key[0], value[0], query[0, :, -c["window"] :].clone(), query[0][:, c["sampled"]].clone())
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2), None
    B, HQ, T, d = query.shape
    H, G = key.shape[1], HQ // key.shape[1]
    tail_k, tail_v = key.float(), value.float()
    if layer in STATE.tail:
        tail_k = torch.cat((STATE.tail[layer][0], tail_k), 2)
        tail_v = torch.cat((STATE.tail[layer][1], tail_v), 2)
    STATE.tail[layer] = (tail_k, tail_v)
    n = tail_k.shape[2]
    q = query.float().view(B, H, G, T, d) * scale
    near = torch.matmul(q.reshape(B, H, G * T, d), tail_k.transpose(2, 3)).view(B, H, G, T, n)
    at = torch.arange(n, device=query.device)
    seen = at[None, :] <= (n - T + torch.arange(T, device=query.device))[:, None]
    seen = seen[None] & STATE.valid[:, None, :]
    near = near.masked_fill(~seen[:, None, None], float("-inf"))
    far_q = q.permute(1, 0, 2, 3, 4).reshape(H, B * G * T, d)
    out = joint(far_q, *STATE.prefix[layer], near, tail_v)
    if STATE.compared is not None:
        mask = STATE.valid[:, n - T :].repeat_interleave(HQ, 0).view(B, HQ, T, 1)  # padding counts for nothing
        energy = ((out * mask) ** 2).sum()
        STATE.errors[layer] = [
            float((((joint(far_q, *other[layer], near, tail_v) - out) * mask) ** 2).sum() / energy)
            for other in STATE.compared
        ]
    return out.to(query.dtype).transpose(1, 2), None


AttentionInterface.register(NAME, attention)


class Model:
    """Model and tokenizer; `cache` keeps them unpacked, since reading a GGUF file takes a minute."""

    def __init__(self, path, device, dtype=torch.bfloat16, cache=None):
        torch.set_float32_matmul_precision("high")  # TF32: exact products of bf16 numbers, float32 sums
        folder, gguf = os.path.split(os.path.abspath(path))
        if cache and os.path.exists(os.path.join(cache, "config.json")):
            folder, gguf = cache, None
        elif os.path.isdir(path):
            folder, gguf = path, None
        more = {"gguf_file": gguf} if gguf else {}
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **more)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=NAME, **more)
        if cache and gguf:
            # Unpacked on reading, so these are plain weights; the marks of the packed file would forbid saving them.
            self.model.hf_quantizer = None
            if hasattr(self.model.config, "quantization_config"):
                del self.model.config.quantization_config
            self.model.save_pretrained(cache)
            self.tokenizer.save_pretrained(cache)
        self.device = device
        self.model = self.model.to(device).eval()
        c = self.model.config
        self.num_layers, self.H, self.HQ = c.num_hidden_layers, c.num_key_value_heads, c.num_attention_heads
        self.d = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        rotary = self.model.model.rotary_emb
        self.inv_freq = rotary.inv_freq.double().cpu().numpy()
        self.magnitude = float(getattr(rotary, "attention_scaling", 1.0))

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids):
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def stop_tokens(self):
        """Every token that ends an answer: the configured ones and the end of a turn."""
        configured = self.model.generation_config.eos_token_id
        ids = set(configured if isinstance(configured, list) else [configured]) | {self.tokenizer.eos_token_id}
        vocabulary = self.tokenizer.get_vocab()
        ids |= {vocabulary.get(t) for t in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>")}
        return ids - {None}

    def frame(self, chat):
        """(before the context, after the question) of the chat template; empty strings without one."""
        if not chat:
            return "", ""
        if not self.tokenizer.chat_template:
            raise SystemExit("this model file carries no chat template; run with --plain")
        mark = "CONTEXT-GOES-HERE"
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
        before, after = text.split(mark)
        return before, after

    @torch.inference_mode()
    def prefill(self, ids, window, num_sampled):
        """(layers, sampled positions, log-probabilities after the last token)."""
        S = len(ids)
        last = max(1, S - window)  # sampled queries come from before the window, evenly, the middle of each stretch
        n = min(num_sampled, last)
        sampled = torch.tensor([(2 * i + 1) * last // (2 * n) for i in range(n)], dtype=torch.long, device=self.device)
        STATE.capture, STATE.layers = {"window": window, "sampled": sampled}, {}
        try:
            hidden = self.model.model(
                input_ids=torch.tensor([ids], device=self.device), use_cache=False
            ).last_hidden_state
        finally:
            STATE.capture = None
        logits = self.model.lm_head(hidden[:, -1:])[0, 0].float()
        layers = [STATE.layers[i] for i in range(self.num_layers)]
        STATE.layers = {}
        return layers, sampled.cpu().numpy().astype("int32"), logits

    def begin(self, prefix, rows):
        STATE.prefix, STATE.tail = prefix, {}
        STATE.valid = torch.zeros((rows, 0), dtype=torch.bool, device=self.device)

    @torch.inference_mode()
    def step(self, ids, valid, positions, last_only=False):
        """Logits of a batch [B, T] of new tokens; `valid` marks the ones that are not padding."""
        STATE.valid = torch.cat((STATE.valid, valid), 1)
        hidden = self.model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        return self.model.lm_head(hidden[:, -1:] if last_only else hidden)

    def _padded(self, rows, start):
        T = max(len(r) for r in rows)
        ids = torch.zeros((len(rows), T), dtype=torch.long)
        valid = torch.zeros((len(rows), T), dtype=torch.bool)
        for b, r in enumerate(rows):
            ids[b, T - len(r) :] = torch.tensor(r)
            valid[b, T - len(r) :] = True
        positions = start + (valid.long().cumsum(1) - 1).clamp(min=0)
        return ids.to(self.device), valid.to(self.device), positions.to(self.device)

    @torch.inference_mode()
    def greedy(self, prefix, start, rows, new_tokens, stop):
        """Greedy continuations of every row (token lists, not empty) over one prefix; positions continue at `start`."""
        self.begin(prefix, len(rows))
        ids, valid, positions = self._padded(rows, start)
        out, done = [[] for _ in rows], [False] * len(rows)
        logits = self.step(ids, valid, positions, last_only=True)
        position = positions[:, -1:]
        for _ in range(new_tokens):
            token = logits[:, -1].argmax(-1)
            for b, t in enumerate(token.tolist()):
                done[b] = done[b] or t in stop
                if not done[b]:
                    out[b].append(t)
            if all(done):
                break
            position = position + 1
            logits = self.step(
                token[:, None], torch.ones_like(token[:, None], dtype=torch.bool), position, last_only=True
            )
        return out

    @torch.inference_mode()
    def forced(self, prefix, start, rows):
        """Most likely next token at every position of every row (one list a row)."""
        self.begin(prefix, len(rows))
        best = self.step(*self._padded(rows, start)).argmax(-1).tolist()
        return [b[len(b) - len(r) :] for b, r in zip(best, rows)]

    @torch.inference_mode()
    def log_probs(self, prefix, start, ids):
        self.begin(prefix, 1)
        return torch.log_softmax(self.step(*self._padded([ids], start))[0].float(), -1)
