# SPDX-License-Identifier: Apache-2.0
"""AnchorKVPress inside kvpress, against AnchorKVCache on the same model."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("kvpress")

from kvpress import SnapKVPress  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from anchorkv import AkvError, AnchorKVCache, AnchorKVPress  # noqa: E402
from test_cache import shares_file, structured_model  # noqa: E402
from tiny import model_of, prompt  # noqa: E402


@pytest.mark.parametrize("make", [structured_model, lambda: model_of("qwen3", head_dim=64)])
def test_press_equals_cache(make):
    """Both give the codec the same queries (up to a matrix product's rounding), keys, positions; the logits agree."""
    model, ids = make(), prompt(1200)
    press, dense = AnchorKVPress(compression_ratio=0.9), DynamicCache()
    with torch.inference_mode():
        with press(model):
            model(ids, past_key_values=dense)
        pressed = model(ids[:, :1], past_key_values=dense).logits
        cache = AnchorKVCache(model.config, ratio=10)
        model(ids, past_key_values=cache)
        ours = model(ids[:, :1], past_key_values=cache).logits
        exact = model(torch.cat((ids, ids[:, :1]), 1)).logits[:, -1:]
    assert abs(press.stored_bytes / cache.report()["segment_bytes"] - 1) < 0.005
    assert press.stored_bytes <= 0.1 * press.dense_bytes
    difference = (pressed - exact).norm()
    assert difference > 0
    # The press decodes to float32, the cache attends in 8-bit steps of the query (docs/numerics.md).
    assert (pressed - ours).norm() < 0.2 * difference + 0.01 * exact.norm()


def test_shares_as_in_the_cache(tmp_path):
    model, ids = structured_model(), prompt(1200)
    path = shares_file(tmp_path / "s", model, [1e-3, 1e-3, 4e-3, 1e-3])
    press, cache = AnchorKVPress(compression_ratio=0.9, shares=path), AnchorKVCache(model.config, ratio=10, shares=path)
    with torch.inference_mode():
        with press(model):
            model(ids, past_key_values=DynamicCache())
        model(ids, past_key_values=cache)
    assert press.stored_bytes <= 0.1 * press.dense_bytes
    assert abs(press.stored_bytes / cache.report()["segment_bytes"] - 1) < 0.005
    assert press.shared.report()["strength"] == cache.report()["shares"]["strength"] > 0
    with pytest.raises(ValueError, match="for a model of 3 layers"):
        with AnchorKVPress(compression_ratio=0.9, shares=shares_file(path, model, [1e-3] * 3))(model):
            pass


def test_beside_its_own_presses():
    model, ids = structured_model(), prompt(1200)
    errors = {}
    with torch.inference_mode():
        exact = model(torch.cat((ids, ids[:, :1]), 1)).logits[:, -1:]
        for press in (AnchorKVPress(compression_ratio=0.9), SnapKVPress(compression_ratio=0.9)):
            dense = DynamicCache()
            with press(model):
                model(ids, past_key_values=dense)
            logits = model(ids[:, :1], past_key_values=dense, position_ids=torch.tensor([[1200]])).logits
            errors[type(press).__name__] = float((logits - exact).norm() / exact.norm())
    assert errors["AnchorKVPress"] < 0.5 * errors["SnapKVPress"]


def test_refused():
    for ratio in (-0.1, 1.0, 10):
        with pytest.raises(ValueError, match="share that is removed"):
            AnchorKVPress(compression_ratio=ratio)
    model = structured_model()
    with torch.inference_mode(), pytest.raises(AkvError, match="smallest feasible"):
        with AnchorKVPress(compression_ratio=0.99)(model):
            model(prompt(300), past_key_values=DynamicCache())
