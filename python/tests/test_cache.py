# SPDX-License-Identifier: Apache-2.0
"""AnchorKVCache in transformers: equal to dense where nothing is lost, small otherwise, clear when refusing."""

import copy
import gc
import importlib
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoConfig, DynamicCache, MODEL_MAPPING  # noqa: E402

import anchorkv  # noqa: E402
from anchorkv import AnchorKVCache  # noqa: E402
from anchorkv.transformers_cache.cache import model_facts  # noqa: E402
from anchorkv.transformers_cache.layer import AnchorKVLayer  # noqa: E402
from anchorkv.transformers_cache.rope import STYLES, ropes_of, rotary_module  # noqa: E402
from tiny import FAMILIES, config_of, model_of, prompt  # noqa: E402

# Both sides sum the same float32 numbers in different orders; logits are of size 1 to 10.
SAME = 2e-3


def generate(model, ids, cache=None, new=12, **options):
    out = model.generate(
        ids,
        past_key_values=cache,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return out.sequences, torch.stack(out.logits, 1)


def assert_same(a, b):
    assert torch.equal(a[0], b[0])
    assert (a[1] - b[1]).abs().max() < SAME


# ------------------------------------------------------------------------------------------------- equality when exact


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_with_everything_kept_equals_dense(name):
    model, ids = model_of(name), prompt(150)
    dense = generate(model, ids, DynamicCache(config=model.config))
    cache = AnchorKVCache(model.config, ratio=1)
    assert_same(generate(model, ids, cache), dense)
    assert all(layer.offset == 150 for layer in cache.hosted)
    assert cache.get_seq_length() == 161  # the last token is not fed
    assert_same(generate(model, ids), dense)  # without our cache the model works as before


def test_a_step_outside_of_inference_mode():
    model, ids = model_of(), prompt(150)
    cache = AnchorKVCache(model.config, ratio=2)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    with torch.no_grad():
        model(ids[:, :2], past_key_values=cache)
    assert cache.get_seq_length() == 153


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model, ids = model_of().to(dtype), prompt(150)
    with torch.inference_mode():
        dense, cache = DynamicCache(config=model.config), AnchorKVCache(model.config, ratio=1)
        a = [model(x, past_key_values=dense).logits for x in (ids, ids[:, :5])]
        b = [model(x, past_key_values=cache).logits for x in (ids, ids[:, :5])]
    # 8 bits of mantissa on logits of size 10 through four layers.
    assert (a[1].float() - b[1].float()).abs().max() < (0.5 if dtype == torch.bfloat16 else 0.1)
    assert cache.hosted[0].rows[0][0].info()["bytes"]["dense"] == 150 * 2 * 32 * 2 * 2


def test_batch_with_left_padding_equals_rows_alone():
    model, lengths = model_of(), (10, 90, 150)
    ids = prompt(150, rows=3)
    attention = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        attention[row, 150 - length :] = 1
        ids[row, : 150 - length] = 0
    cache = AnchorKVCache(model.config, ratio=1)
    sequences, logits = generate(model, ids, cache, attention_mask=attention)
    for row, length in enumerate(lengths):
        alone = generate(model, ids[row : row + 1, 150 - length :], AnchorKVCache(model.config, ratio=1))
        assert torch.equal(sequences[row, 150:], alone[0][0, length:])
        assert (logits[row] - alone[1][0]).abs().max() < SAME
        assert cache.hosted[0].rows[row][0].num_tokens == length
        assert cache.hosted[0].rows[row][0].info()["first_position"] == 0


def test_ragged_second_turn():
    """Padding between the compressed prompt and a shorter row's second question."""
    model, document = model_of(), prompt(100, rows=2)
    turns = [prompt(20, seed=5)[0], prompt(7, seed=6)[0]]
    padded = torch.zeros((2, 20), dtype=torch.long)
    attention = torch.ones((2, 120), dtype=torch.long)
    for row, turn in enumerate(turns):
        padded[row, 20 - len(turn) :] = turn
        attention[row, 100 : 120 - len(turn)] = 0
    positions = (attention.cumsum(1) - 1)[:, 100:]
    with torch.inference_mode():
        cache = AnchorKVCache(model.config, ratio=1, tail_limit=64)
        model(document, past_key_values=cache)
        logits = model(padded, attention_mask=attention, position_ids=positions, past_key_values=cache).logits
        cache.compress()  # rows of different length
        assert [row[1].num_tokens for row in cache.hosted[0].rows] == [20, 7]
        for row, turn in enumerate(turns):
            alone = model(torch.cat((document[row], turn))[None]).logits[0, -1]
            assert (logits[row, -1] - alone).abs().max() < SAME


def test_second_turn_and_rolling():
    model, ids = model_of(), prompt(150)
    cache = AnchorKVCache(model.config, ratio=1, tail_limit=64)
    sequences, _ = generate(model, ids, cache, new=100)
    assert [len(layer.rows[0]) for layer in cache.hosted] == [2] * 4  # prompt, and the first 64 new tokens
    again = torch.cat((sequences, prompt(30, seed=3)), 1)
    dense = generate(model, again, DynamicCache(config=model.config))
    assert_same(generate(model, again, cache), dense)


@pytest.mark.parametrize("when", ["forward", "decode"])
def test_prompt_in_chunks(when):
    model, ids = model_of(), prompt(150)
    cache = AnchorKVCache(model.config, ratio=1, when=when)
    with torch.inference_mode():
        for chunk in ids.split(40, 1):
            model(chunk, past_key_values=cache)
        a = model(ids[:, :1], past_key_values=cache).logits
        b = model(torch.cat((ids, ids[:, :1]), 1)).logits[:, -1:]
    assert (a - b).abs().max() < SAME
    # "decode" waits for the whole prompt; "forward" takes the first chunk and keeps the others exact.
    assert cache.hosted[0].offset == (150 if when == "decode" else 40)


def test_manual_and_compress_twice():
    model, ids = model_of(), prompt(150)
    cache = AnchorKVCache(model.config, ratio=4, when="manual", tail_limit=1024)
    with pytest.raises(RuntimeError, match="run the model over a prompt"):
        cache.compress()
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    assert not cache.is_compressed
    with pytest.raises(anchorkv.AkvError, match="ratio"):  # 150 tokens cannot be held in a quarter
        cache.compress()
    with torch.inference_mode():
        model(prompt(850, seed=9), past_key_values=cache)
    cache.compress()
    assert cache.is_compressed and 3.9 < cache.report()["ratio"] < 4.2
    with pytest.raises(RuntimeError, match="compressed already"):
        cache.compress()


def test_beam_search():
    model, ids = model_of(), prompt(150)
    options = dict(max_new_tokens=10, num_beams=3, do_sample=False)
    a = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    b = model.generate(ids, past_key_values=AnchorKVCache(model.config, ratio=1), **options)
    assert torch.equal(a, b)


def test_reorder_repeat_select_share_segments():
    model, ids = model_of(), prompt(150, rows=2)
    cache = AnchorKVCache(model.config, ratio=1)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        model(ids[:, :4], past_key_values=cache)
        one = cache.nbytes()
        cache.batch_repeat_interleave(3)
        assert cache.batch_size == 6
        assert cache.nbytes() < 1.6 * one  # tails are repeated, segments shared
        cache.reorder_cache(torch.tensor([5, 4, 3, 2, 1, 0]))
        cache.batch_select_indices(torch.tensor([0, 5]))  # the rows have changed places
        dense = DynamicCache(config=model.config)
        model(torch.cat((ids, ids[:, :4]), 1).flip(0), past_key_values=dense)
        a = model(ids[:, 8:9], past_key_values=cache).logits
        b = model(ids[:, 8:9], past_key_values=dense).logits
    assert (a - b).abs().max() < SAME


def test_crop():
    model, ids = model_of(), prompt(150)
    cache = AnchorKVCache(model.config, ratio=1)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        before = model(ids[:, :3], past_key_values=cache).logits
        model(ids[:, 3:9], past_key_values=cache)
        cache.crop(-9)
        assert cache.get_seq_length() == 150
        assert torch.equal(model(ids[:, :3], past_key_values=cache).logits, before)
        cache.crop(-33)  # into the segment: 120 tokens stay
        a = model(ids[:, 120:126], past_key_values=cache).logits[:, -1]
        assert (a - model(ids[:, :126]).logits[:, -1]).abs().max() < SAME
        with pytest.raises(ValueError, match="at least one token stays"):
            cache.crop(-126)


def test_crop_compressed():
    model, ids = structured_model(), prompt(1200)
    with torch.inference_mode():
        cut = AnchorKVCache(model.config, ratio=5)
        model(ids, past_key_values=cut)
        before = cut.hosted[1].rows[0][0].decode()
        cut.crop(-300)
        after = cut.hosted[1].rows[0][0].decode()
        assert cut.get_seq_length() == 900
        assert all(np.array_equal(a[:, :900], b) for a, b in zip(before, after))
        exact = model(ids[:, :901]).logits[:, -1]
        assert (model(ids[:, 900:901], past_key_values=cut).logits[:, -1] - exact).norm() < 0.2 * exact.norm()
        paper = AnchorKVCache(model.config, ratio=5, profile="paper")
        model(ids, past_key_values=paper)
        with pytest.raises(anchorkv.AkvError, match="paper"):
            paper.crop(-300)
        assert paper.get_seq_length() == 1200


def test_assisted_decoding():
    """Prompt lookup proposes several tokens at once and crops what is not accepted."""
    model, ids = model_of(), prompt(150)
    options = dict(max_new_tokens=30, do_sample=False, eos_token_id=255)
    plain = model.generate(ids, **options)
    guessed = model.generate(
        ids, past_key_values=AnchorKVCache(model.config, ratio=1), prompt_lookup_num_tokens=4, **options
    )
    assert torch.equal(plain, guessed)


def test_deepcopy_is_a_prefix_to_go_on_from():
    model, ids = model_of(), prompt(150)
    cache = AnchorKVCache(model.config, ratio=1)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    outs = []
    for seed in (1, 1, 2):
        mine = copy.deepcopy(cache)
        outs.append(generate(model, torch.cat((ids, prompt(9, seed=seed)), 1), mine))
    assert_same(outs[0], outs[1])
    assert not torch.equal(outs[0][1], outs[2][1])
    assert cache.get_seq_length() == 150


def test_short_prompt_stays_exact():
    model = model_of()
    for tokens in (1, 14, 33, 40):
        ids = prompt(tokens)
        cache = AnchorKVCache(model.config, ratio=10)
        assert_same(generate(model, ids, cache), generate(model, ids))
    assert "ratio" in cache.report()["why_exact"]


# ----------------------------------------------------------------------------------------------------- when compressed


def structured_model():
    """Keys and values near a few directions around a mean, as in trained models; random ones cannot shrink."""
    model = model_of("qwen2", hidden_size=256, head_dim=64)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                basis = torch.randn(128, 6, generator=generator) @ torch.randn(6, 256, generator=generator) / 40
                projection.weight.copy_(basis + 0.1 * projection.weight)
                projection.bias.normal_(generator=generator)
    return model


@pytest.mark.parametrize("profile", ["default", "paper"])
def test_compressed_is_close_and_small(profile):
    model, ids = structured_model(), prompt(1500)
    with torch.inference_mode():
        dense = DynamicCache(config=model.config)
        model(ids, past_key_values=dense)
        exact = model(ids[:, :1], past_key_values=dense).logits
        errors = []
        for ratio in (3, 10):
            cache = AnchorKVCache(model.config, ratio=ratio, profile=profile)
            model(ids, past_key_values=cache)
            report = cache.report()
            assert report["segment_bytes"] <= 4 * (2 * 2 * 1500 * 64 * 2) / ratio
            assert report["compressed_tokens"] == 1500 and report["tail_tokens"] == 0
            errors.append((model(ids[:, :1], past_key_values=cache).logits - exact).norm() / exact.norm())
    # Seen: 0.022 and 0.085 (default), 0.077 and 0.092 (paper). Without the tail: more than 0.5.
    assert errors[0] < errors[1] < 0.15


def test_same_seed_same_bytes():
    model, ids = structured_model(), prompt(600)
    made = []
    for seed, threads in ((1, 1), (1, 2), (2, 1)):
        cache = AnchorKVCache(model.config, ratio=6, seed=seed, threads=threads)
        with torch.inference_mode():
            model(ids, past_key_values=cache)
        made.append([layer.rows[0][0].data() for layer in cache.hosted])
    assert made[0] == made[1] != made[2]


def shares_file(path, model, errors, /, **changes):
    """A calibration's file with made-up errors of the layers at 5x, 10x and 40x."""
    rows = [[None if e is None else e * (r / 10) ** 1.8 for e in errors] for r in (5, 10, 40)]
    report = {
        "format": "anchorkv-layer-errors",
        "version": 1,
        "model": {"num_layers": len(errors), "description": "made up", "transformers": model_facts(model.config)},
        "profile": "default",
        "ratios": [5, 10, 40],
        "errors": rows,
    }
    path.write_text(json.dumps({**report, **changes}))
    return path


def test_shares_split_the_same_bytes(tmp_path):
    model, ids = structured_model(), prompt(1500)
    path, per_layer = shares_file(tmp_path / "s", model, [1e-3, 1e-3, 4e-3, 1e-3]), 2 * 2 * 1500 * 64 * 2
    caches = [AnchorKVCache(model.config, ratio=10, shares=s) for s in (None, path)]
    with torch.inference_mode():
        for cache in caches:
            model(ids, past_key_values=cache)
    equal, split = (cache.report() for cache in caches)
    assert equal["shares"] is None and max(equal["layer_ratios"]) < 1.02 * min(equal["layer_ratios"])
    assert split["shares"]["file"] == str(path) and split["shares"]["strength"] == 1
    assert split["segment_bytes"] <= 4 * per_layer / 10
    # shares ~ errors^(1 / 2.8): the third layer has 4^(1 / 2.8) = 1.64 times as much as the others
    r = split["layer_ratios"]
    assert max(r[0], r[1], r[3]) < 1.02 * min(r[0], r[1], r[3]) and 1.5 < r[0] / r[2] < 1.75
    # A short prompt cannot hold the whole split, and still keeps within the bytes.
    short = AnchorKVCache(model.config, ratio=10, shares=path)
    with torch.inference_mode():
        model(ids[:, :400], past_key_values=short)
    report = short.report()
    assert report["compressed_tokens"] == 400 and 0 < report["shares"]["strength"] < 1
    assert report["segment_bytes"] <= 4 * per_layer * 400 / 1500 / 10
    # Rows of a batch with padding, and what is compressed later, have shares of their own.
    ids = prompt(900, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :200] = 0
    rolling = AnchorKVCache(model.config, ratio=6, shares=path, tail_limit=700)
    with torch.inference_mode():
        model(ids, past_key_values=rolling, attention_mask=mask)
        mask = torch.cat((mask, torch.ones_like(ids[:, :700])), 1)
        model(ids[:, :700], past_key_values=rolling, attention_mask=mask)
    assert [len(row) for row in rolling.hosted[0].rows] == [2, 2] and rolling.report()["ratio"] >= 6


def test_shares_refused(tmp_path):
    model = structured_model()
    good = [1e-3] * 4
    for changes, errors, words in (
        ({}, good[:3], "for a model of 3 layers"),
        ({}, [1e-3, None, 1e-3, 1e-3], "layer 1 is compressed here"),
        ({"profile": "paper"}, good, "measured with profile 'paper'"),
        ({"format": "x"}, good, "is no file of"),
        ({"model": {"num_layers": 4, "transformers": {"vocab_size": 7}}}, good, "its vocab_size is 7, this one's 256"),
    ):
        with pytest.raises(ValueError, match=words):
            AnchorKVCache(model.config, shares=shares_file(tmp_path / "s", model, errors, **changes))
    with pytest.raises(ValueError, match="eviction has none"):
        AnchorKVCache(model.config, method="snapkv", shares=shares_file(tmp_path / "s", model, good))
    with pytest.raises(OSError):
        AnchorKVCache(model.config, shares=tmp_path / "nothing")


def live_bytes(tokens):
    """Bytes of all distinct tensors alive whose next to last dimension is at least `tokens`: keys and values."""
    storages = {}
    for x in gc.get_objects():
        if isinstance(x, torch.Tensor) and x.dim() == 4 and x.shape[2] >= tokens:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(storages.values())


def test_memory_falls_layer_by_layer():
    """At no time are more than two layers dense, and afterwards nothing dense is left."""
    model, tokens = structured_model(), 1500
    layer_bytes = 2 * 2 * tokens * 64 * 4
    seen = []

    def watch(*_):
        gc.collect()
        seen.append(live_bytes(tokens))

    hooks = [layer.register_forward_hook(watch) for layer in model.model.layers]
    with torch.inference_mode():
        dense = DynamicCache(config=model.config)
        model(prompt(tokens), past_key_values=dense)
        dense_bytes = live_bytes(tokens)
        assert dense_bytes >= 4 * layer_bytes and seen[-1] >= 4 * layer_bytes
        del dense
        gc.collect()
        seen.clear()
        cache = AnchorKVCache(model.config, ratio=10)
        model(prompt(tokens), past_key_values=cache)
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert max(seen) <= 2 * layer_bytes
    assert live_bytes(tokens) == 0
    # Held: a tenth of 16-bit keys and values (a twentieth of these float32 ones), and no tail yet.
    assert cache.nbytes() <= 4 * layer_bytes / 20 + 1
    assert cache.nbytes() >= 4 * layer_bytes / 30


# --------------------------------------------------------------------------------------------------------- the rotation


def turned(x, positions, rope):
    """Our rotation, written out: x [tokens, d]."""
    x, out, half = np.asarray(x, np.float64), np.array(x, np.float64), rope.dim // 2
    for j, w in enumerate(rope.inv_freq):
        a, b = (j, j + half) if rope.style == "half_split" else (2 * j, 2 * j + 1)
        c, s = np.cos(positions * w) * rope.magnitude, np.sin(positions * w) * rope.magnitude
        out[:, a], out[:, b] = x[:, a] * c - x[:, b] * s, x[:, b] * c + x[:, a] * s
    return out


@pytest.mark.parametrize("name", FAMILIES)
def test_rotation_is_the_models(name):
    config = config_of(name)
    module = importlib.import_module(MODEL_MAPPING[type(config)].__module__)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    i = kinds.index("full_attention")
    rope, rotary = ropes_of(config)[i], rotary_module(config)
    positions = torch.tensor([[0, 1, 77, 1000, 5000]])
    x = torch.randn(1, 1, 5, 32)
    by_type = [kinds[i]] if any(n.startswith("full_attention") for n in dict(rotary.named_buffers())) else []
    cos, sin = rotary(x, positions, *by_type)
    part = x[..., : cos.shape[-1]] if config.model_type in ("stablelm", "phi") else x
    theirs, _ = module.apply_rotary_pos_emb(part, part, cos, sin)
    theirs = torch.cat((theirs, x[..., theirs.shape[-1] :]), -1)
    ours = turned(x[0, 0].numpy(), positions[0].numpy().astype(float), rope)
    # float32 angles up to 5000 rad carry an error of 5000 * 6e-8
    assert np.abs(ours - theirs[0, 0].numpy()).max() < 2e-3


def test_every_style_is_tested():
    assert set(STYLES) == {FAMILIES[n].get("model_type", n) for n in FAMILIES}


def test_layers_without_rotation():
    config = config_of("smollm3")
    assert [rope.dim for rope in ropes_of(config)] == [32, 32, 32, 0]


# ------------------------------------------------------------------------------------------------------------ refusals


def test_refused_models():
    for options, words in (
        (dict(model_type="gpt2"), "does not know how 'gpt2' models"),
        (dict(model_type="mistral", sliding_window=64), "nothing for AnchorKVCache to compress"),
        (
            dict(model_type="llama", rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
            "angles change with the length",
        ),
    ):
        config = AutoConfig.for_model(**options)
        config._attn_implementation = "sdpa"
        with pytest.raises(NotImplementedError, match=words):
            AnchorKVCache(config)
        assert config._attn_implementation == "sdpa"  # untouched when refused
    config = config_of("llama")
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(NotImplementedError, match="attn_implementation='sdpa'"):
        AnchorKVCache(config)


def test_refused_arguments():
    config = config_of("llama")
    for options, words in (
        (dict(ratio=0.5), "at least 1"),
        (dict(ratio=float("nan")), "at least 1"),
        (dict(ratio=60), "cannot be reached when 2048 tokens"),
        (dict(profile="best"), "'best' is unknown"),
        (dict(when="never"), "forward, decode, manual"),
        (dict(window=0), "window 0"),
        (dict(method="h2o"), "snapkv"),
        (dict(threads=-1), "at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            AnchorKVCache(config, **options)
    with pytest.raises(TypeError, match="no field 'rhoo'"):
        AnchorKVCache(config, overrides={"rhoo": 1})
    with pytest.raises(TypeError, match="model.config"):
        AnchorKVCache(model_of())


def test_other_model_refused():
    a, b, ids = model_of(seed=0), model_of(seed=1), prompt(100)
    cache = AnchorKVCache(a.config, ratio=1)
    AnchorKVCache(b.config)
    with torch.inference_mode():
        a(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="another model"):
            b(ids[:, :1], past_key_values=cache)
    big = model_of(num_hidden_layers=6)
    AnchorKVCache(big.config)
    with torch.inference_mode(), pytest.raises(ValueError, match="of 4 layers"):
        big(ids, past_key_values=AnchorKVCache(a.config))


def test_attention_not_ours_is_noticed():
    model, ids = model_of(), prompt(100)
    cache = AnchorKVCache(model.config)
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        with pytest.raises(RuntimeError, match="attn_implementation was changed"):
            model(ids[:, :1], past_key_values=cache)


def test_other_batch_size_or_dtype_refused():
    model, ids = model_of(), prompt(100, rows=2)
    cache = AnchorKVCache(model.config, ratio=1)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="3 rows given, the cache holds 2"):
            model(prompt(1, rows=3), past_key_values=cache)
    layer = AnchorKVLayer(cache.settings, 0, cache.hosted[0].rope)
    with pytest.raises(TypeError, match="float64"):
        layer.update(torch.zeros(1, 2, 3, 32, dtype=torch.float64), torch.zeros(1, 2, 3, 32, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="meta"):
        layer.update(torch.zeros(1, 2, 3, 32, device="meta"), torch.zeros(1, 2, 3, 32, device="meta"))


def test_row_of_padding_only_refused():
    model, ids = model_of(), prompt(100, rows=2)
    mask = torch.ones_like(ids)
    mask[1] = 0
    with torch.inference_mode(), pytest.raises(ValueError, match="row 1 of the batch holds padding only"):
        model(ids, attention_mask=mask, past_key_values=AnchorKVCache(model.config, ratio=1))


def test_not_a_number_refused():
    model, ids = model_of(), prompt(200)
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight[3, 5] = float("nan")
    with torch.inference_mode(), pytest.raises(anchorkv.AkvError, match="(?i)nan|finite"):
        model(ids, past_key_values=AnchorKVCache(model.config, ratio=3, tail_limit=600))


def test_reset():
    model, ids = model_of(), prompt(100)
    cache = AnchorKVCache(model.config, ratio=1)
    first = generate(model, ids, cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes() == 0
    assert_same(generate(model, ids, cache), first)
