# SPDX-License-Identifier: Apache-2.0
"""Caches saved as .akv and opened again."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import anchorkv  # noqa: E402
from anchorkv import AnchorKVCache  # noqa: E402
from anchorkv.document import Document  # noqa: E402
from test_cache import SAME, structured_model  # noqa: E402
from tiny import model_of, prompt  # noqa: E402


def filled(model, ids, **options):
    cache = AnchorKVCache(model.config, **{"ratio": 6, **options})
    with torch.inference_mode():
        model(ids[:, :-5], past_key_values=cache)
        model(ids[:, -5:], past_key_values=cache)  # a tail
    return cache


@pytest.mark.parametrize("llama_cpp", [False, True])
def test_round_trip(tmp_path, llama_cpp):
    model, ids = model_of(head_dim=64), prompt(800)
    cache = filled(model, ids, llama_cpp=llama_cpp)
    path = tmp_path / "book.akv"
    cache.save(path, ids, model, properties={"source": "book.txt"})
    assert os.path.getsize(path) < cache.nbytes() + 40000
    again, tokens = AnchorKVCache.load(path, model)
    assert torch.equal(tokens, ids) and again.get_seq_length() == 800
    assert again.settings.keep_ratio == cache.settings.keep_ratio
    question = torch.cat((ids, prompt(9, seed=8)), 1)
    with torch.inference_mode():
        a = model(question[:, 800:], past_key_values=cache).logits
        b = model(question[:, 800:], past_key_values=again).logits
    # The same segments; the tail is an exact segment now.
    assert (a - b).abs().max() < SAME
    third, _ = AnchorKVCache.load(path, model)
    out = model.generate(question, past_key_values=third, max_new_tokens=5, do_sample=False)
    assert out.shape[1] == 814
    with Document(path) as document:
        assert document.property("source") == "book.txt" and document.layers[0].rope_style == int(llama_cpp)


def test_interleaved_order_changes_nothing():
    model, ids = structured_model(), prompt(800)
    model.config.model_type = "llama"  # whose coordinates llama.cpp interleaves
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "layer_types")})
    config.attention_bias, config._attn_implementation = True, "sdpa"
    llama = LlamaForCausalLM(config).eval()
    llama.load_state_dict({**llama.state_dict(), **model.state_dict()})
    with torch.inference_mode():
        logits = []
        for flag in (False, True):
            cache = AnchorKVCache(llama.config, ratio=6, llama_cpp=flag)
            llama(ids, past_key_values=cache)
            logits.append(llama(ids[:, :7], past_key_values=cache).logits)
        exact = llama(torch.cat((ids, ids[:, :7]), 1)).logits[:, -7:]
    errors = [float((x - exact).norm() / exact.norm()) for x in logits]
    assert max(errors) < 0.15 and abs(errors[0] - errors[1]) < 0.03


def test_refused(tmp_path):
    model, ids = model_of(head_dim=64), prompt(800)
    cache, path = filled(model, ids), tmp_path / "book.akv"
    with pytest.raises(ValueError, match=r"pass ids\[:800\]"):
        cache.save(path, prompt(801), model)
    cache.save(path, ids, model)
    with pytest.raises(ValueError, match="same shape, other weights"):
        AnchorKVCache.load(path, model_of(head_dim=64, seed=1))
    with pytest.raises(ValueError, match="num_layers is 4, this model's 6"):
        AnchorKVCache.load(path, model_of(head_dim=64, num_hidden_layers=6))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(anchorkv.AkvError, match="(?i)checksum|corrupt|changed"):
        AnchorKVCache.load(path, model)
    two = AnchorKVCache(model.config, ratio=1)
    with torch.inference_mode():
        model(prompt(50, rows=2), past_key_values=two)
    with pytest.raises(ValueError, match="2 rows"):
        two.save(path, ids, model)
    with pytest.raises(NotImplementedError, match="sliding-window"):
        other = model_of("gemma3_text")
        AnchorKVCache(other.config, ratio=1).save(path, ids, other)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
