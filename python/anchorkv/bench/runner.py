# SPDX-License-Identifier: Apache-2.0
"""Runs samples through methods; one JSON line per sample and method, so that an interrupted run goes on."""

import hashlib
import json
import os
import sys
import time
import warnings

import torch
from tqdm import tqdm

from .methods import Unavailable, greedy, log_probs, make

STOP_WORDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "</s>")


class Log:
    """The JSONL file: first the settings, then records. Records that are there are not made again."""

    def __init__(self, path, settings):
        self.path, self.settings, self.done = path, settings, set()
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        if os.path.exists(path) and os.path.getsize(path):
            records = read(path, mend=True)
            if records[0] != {"settings": settings}:
                raise SystemExit(f"{path} was made with {records[0]}, this run has {settings}; give another --out")
            self.done = {self.key(r) for r in records[1:]}
        else:
            self.write({"settings": settings})

    @staticmethod
    def key(r):
        return (r["task"], r["ctx"], r["protocol"], r["sample"], r["method"], r.get("depth"))

    def write(self, record):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if "task" in record:
            self.done.add(self.key(record))


def read(path, mend=False):
    """Records of a log. A last line that was cut off by an interruption is dropped; mend: from the file too."""
    records = []
    with open(path, "rb+" if mend else "rb") as file:
        good = 0
        for line in file:
            try:
                records.append(json.loads(line))
            except ValueError:
                if mend:
                    file.truncate(good)
                break
            good += len(line)
    if not records or "settings" not in records[0]:
        raise SystemExit(f"{path} is no log of this program")
    return records


class Bench:
    def __init__(self, path, device, dtype, plain=False):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        warnings.filterwarnings("ignore", category=FutureWarning)
        folder, file = (path, None) if os.path.isdir(path) else os.path.split(path)
        more = {"gguf_file": file} if file else {}
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **more)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **more).to(device).eval()
        if self.model.device.type == "cuda":
            # torch prefers cuDNN on new GPUs, which makes a plan for every length: 2 ms a layer and token
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.device, self.plain = device, plain or not self.tokenizer.chat_template
        vocabulary, configured = self.tokenizer.get_vocab(), self.model.generation_config.eos_token_id
        self.stop = set(configured if isinstance(configured, list) else [configured]) | {self.tokenizer.eos_token_id}
        strange = set(self.encode("The ship left the harbour at noon.")) & set(self.tokenizer.all_special_ids)
        if strange:
            raise SystemExit(
                f"the tokenizer of {path} turns plain words into "
                f"{self.tokenizer.convert_ids_to_tokens(list(strange))}: this version of transformers misreads its files; "
                "give the original model, or the version that wrote them"
            )
        self.stop = (self.stop | {vocabulary.get(w) for w in STOP_WORDS}) - {None}

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def count(self, text):
        return len(self.encode(text))

    def frame(self, chat=True):
        """(before the context, after the question)."""
        if self.plain or not chat:
            return self.tokenizer.bos_token or "" if self.tokenizer.bos_token_id in self.encode("a") else "", "\n"
        mark = "CONTEXT-GOES-HERE"
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
        return text.split(mark)

    def ids(self, text):
        return torch.tensor([self.encode(text)], dtype=torch.long, device=self.device)

    def answer(self, method, context, question, prefix, new_tokens, aware, chat=True, settled=None):
        """(prediction, bytes, tokens that were compressed). settled(text): the score cannot change any more."""
        before, after = self.frame(chat)
        context, question = self.ids(before + context), self.ids(question + after + prefix)
        if aware:
            context, question = torch.cat((context, question), 1), question[:, :0]
        done = settled and (lambda out: settled(self.tokenizer.decode(out, skip_special_tokens=True)))
        out, size = greedy(self.model, method, context, question, new_tokens, self.stop, done)
        return self.tokenizer.decode(out, skip_special_tokens=True), size, context.shape[1]

    def dense_bytes(self, tokens):
        c = self.model.config.get_text_config(decoder=True)
        d = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return 4 * tokens * c.num_hidden_layers * (getattr(c, "num_key_value_heads", None) or c.num_attention_heads) * d


def available(names, shares=None):
    """[Method], leaving out what cannot run here, with a line that says so."""
    out = []
    for name in names:
        try:
            out.append(make(name, shares))
        except Unavailable as error:
            print(f"left out: {error}", file=sys.stderr)
    if not out:
        raise SystemExit("none of the methods can run here")
    return out


def claimed(folder, log, key):
    """True for the first log that asks for this record of a run with its settings, then and later."""
    run = hashlib.sha256(json.dumps(log.settings, sort_keys=True).encode()).hexdigest()[:12]
    path = os.path.join(folder, "_".join(str(k).replace("/", "-") for k in (run, *key)))
    owner = os.path.abspath(log.path)
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        with open(path, encoding="utf-8") as claim:
            return claim.read() == owner
    os.write(file, owner.encode())
    os.close(file)
    return True


def answers(bench, log, methods, samples, aware, claims=None):
    """samples: [(fields, Sample-like: context, question, prefix, new_tokens, score(), answers, chat, settled())];
    claims: a folder that processes with other logs share, so that each record is made by one of them."""
    for key in log.done if claims else ():
        claimed(claims, log, key)  # nobody shall make it again, even where the folder is new
    bar = tqdm(total=len(samples) * len(methods), disable=None)
    for fields, sample in samples:
        for method in methods:
            bar.update()
            record = {**fields, "protocol": "aware" if aware else "agnostic", "method": method.name}
            if log.key(record) in log.done or (claims and not claimed(claims, log, log.key(record))):
                continue
            bar.set_description(f"{fields['task']} {method.name}")
            began = time.time()
            try:
                text, size, tokens = bench.answer(
                    method,
                    sample.context,
                    sample.question,
                    sample.prefix,
                    sample.new_tokens,
                    aware,
                    getattr(sample, "chat", True),
                    getattr(sample, "settled", None),
                )
            except Unavailable as error:
                tqdm.write(f"left out: {error}", file=sys.stderr)
                continue
            record.update(
                score=sample.score(text),
                prediction=text,
                answers=sample.answers,
                tokens=tokens,
                bytes=size,
                nominal=method.nominal,
                dense_bytes=bench.dense_bytes(tokens),
                seconds=round(time.time() - began, 3),
            )
            log.write(record)
    bar.close()


def continuations(bench, log, methods, text, ctx, samples, seed, length):
    """Perplexity, KL divergence from dense and top-1 agreement over the `length` tokens after `ctx`."""
    import random

    ids = bench.encode(text)
    if len(ids) < ctx + length:
        raise SystemExit(f"the text has {len(ids)} tokens; {ctx} + {length} are needed")
    dense = make("dense")
    bar = tqdm(total=samples * len(methods), disable=None)
    for i in range(samples):
        start = random.Random(f"{seed}/ppl/{i}").randrange(len(ids) - ctx - length + 1)
        piece = torch.tensor([ids[start : start + ctx + length]], device=bench.device)
        reference = None
        for method in methods:
            bar.update()
            record = {"task": "continuation", "ctx": ctx, "sample": i, "protocol": "agnostic", "method": method.name}
            if log.key(record) in log.done:
                continue
            if reference is None:
                reference, _ = log_probs(bench.model, dense, piece[:, :ctx], piece[:, ctx:])
            try:
                lp, size = log_probs(bench.model, method, piece[:, :ctx], piece[:, ctx:])
            except Unavailable as error:
                tqdm.write(f"left out: {error}", file=sys.stderr)
                continue
            # The first token is predicted by the exact prefill whatever the method: it is not counted.
            lp, ref, wanted = lp[1:], reference[1:], piece[0, ctx + 1 :, None]
            record.update(
                nll=-float(lp.gather(1, wanted).mean()),
                dense_nll=-float(ref.gather(1, wanted).mean()),
                kld=float((ref.exp() * (ref - lp)).sum(1).mean()),
                top1=float((ref.argmax(1) == lp.argmax(1)).float().mean()),
                tokens=ctx,
                bytes=size,
                nominal=method.nominal,
                dense_bytes=bench.dense_bytes(ctx),
            )
            log.write(record)
    bar.close()
