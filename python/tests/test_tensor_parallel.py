# SPDX-License-Identifier: Apache-2.0
"""transformers' own tensor parallelism on two processes: each rank compresses the KV heads it owns."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # transformers asks for it when a model is split

from anchorkv import AnchorKVCache  # noqa: E402
from tiny import model_of, prompt  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))


def test_two_ranks(tmp_path):
    model, ids = model_of("llama", head_dim=64), prompt(900)
    model.save_pretrained(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         os.path.join(HERE, "tp_worker.py"), str(tmp_path / "model"), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"out.{r}") for r in (0, 1)]
    with torch.inference_mode():
        for ratio, close in ((1, 2e-3), (5, None)):
            cache = AnchorKVCache(model.config, ratio=ratio)
            model(ids, past_key_values=cache)
            alone = model(ids[:, :4], past_key_values=cache).logits
            segment = cache.hosted[0].rows[0][0]
            assert [r[ratio]["heads"] for r in ranks] == [1, 1] and segment.num_kv_heads == 2
            assert torch.equal(ranks[0][ratio]["logits"], ranks[1][ratio]["logits"])
            difference = (ranks[0][ratio]["logits"] - alone).abs().max()
            if close:
                assert difference < close
            else:  # each rank has its own residual budget: half of the layer's
                assert sum(r[ratio]["bytes"] for r in ranks) <= 2 * 900 * 2 * 64 * 2 / ratio
                exact = model(torch.cat((ids, ids[:, :4]), 1)).logits[:, -4:]
                errors = [(x - exact).norm() / exact.norm() for x in (ranks[0][ratio]["logits"], alone)]
                assert errors[0] < 1.5 * errors[1]
