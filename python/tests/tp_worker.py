# SPDX-License-Identifier: Apache-2.0
"""One rank of test_tensor_parallel: torchrun tp_worker.py MODEL OUT."""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from anchorkv import AnchorKVCache
from tiny import prompt

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto", dtype=torch.float32)
result = {}
for ratio in (1, 5):
    ids = prompt(900)
    cache = AnchorKVCache(model.config, ratio=ratio)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        logits = model(ids[:, :4], past_key_values=cache).logits
    segment = cache.hosted[0].rows[0][0]
    result[ratio] = {"logits": logits, "heads": segment.num_kv_heads, "bytes": segment.nbytes}
torch.save(result, f"{sys.argv[2]}.{dist.get_rank()}")
dist.destroy_process_group()
