from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.errors import CheckpointError
from headway.models.config import ModelConfig, RopeScaling
from headway.models.layers import activation_of, head_weight, local_rope_of, rope_of, scale_of, window_of


def config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": "llama",
        "vocabulary": 100,
        "hidden": 32,
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "head_width": 8,
        "intermediate": 64,
        "context": 128,
        "norm_eps": 1e-5,
    }
    return ModelConfig(**{**values, **changes})


def test_plain_frequencies_fall_geometrically() -> None:
    rope = rope_of(config())
    np.testing.assert_allclose(rope.inv_freq, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
    assert rope.factor == 1.0


def test_frequencies_are_within_one_unit_in_the_last_place_of_torchs() -> None:
    import torch

    for theta, width in ((10000.0, 64), (500000.0, 128), (1e6, 256), (100000.0, 64)):
        wanted = 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width))
        found = np.array(rope_of(config(rope_theta=theta, head_width=width)).inv_freq, np.float32)
        units = np.abs(found.view(np.int32) - wanted.numpy().view(np.int32))
        assert units.max() <= 1


def test_explicit_factors_divide_and_replace_the_formula() -> None:
    scaling = RopeScaling(kind="llama3", factor=8.0, freq_factors=(1.0, 1.0, 2.0, 8.0))
    found = rope_of(config(rope_scaling=scaling)).inv_freq
    np.testing.assert_allclose(found, [1.0, 0.1, 0.005, 0.000125], rtol=1e-6)


def test_default_scaling_is_none() -> None:
    assert rope_of(config(rope_scaling=RopeScaling(kind="default"))) == rope_of(config())


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (RopeScaling(kind="longrope"), "unknown rope scaling 'longrope'"),
        (RopeScaling(kind="llama3", freq_factors=(1.0,)), "1 rope frequency factors do not fit heads of width 8"),
    ],
)
def test_unknown_scaling_is_refused(scaling: RopeScaling, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        rope_of(config(rope_scaling=scaling))


def test_yarn_scales_the_logits() -> None:
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=32)
    assert rope_of(config(rope_scaling=scaling)).factor == pytest.approx(1.1386294)
    one = RopeScaling(kind="yarn", factor=4.0, original_context=32, attention_factor=1.0)
    assert rope_of(config(rope_scaling=one)).factor == 1.0


def test_local_rope_has_its_own_base_and_no_scaling() -> None:
    both = config(rope_theta=1e6, rope_local_theta=10000.0, rope_scaling=RopeScaling(kind="linear", factor=8.0))
    assert local_rope_of(both) == rope_of(config(rope_theta=10000.0))


def test_windows_hold_on_the_layers_that_have_them() -> None:
    assert [window_of(config(window=9), layer) for layer in range(4)] == [9] * 4
    some = config(window=9, windowed=(True, False, True, False))
    assert [window_of(some, layer) for layer in range(4)] == [9, None, 9, None]
    assert window_of(config(), 0) is None


def test_small_choices() -> None:
    assert scale_of(config()) == 8**-0.5
    assert scale_of(config(query_scale=0.25)) == 0.25
    assert activation_of(config(activation="gelu_pytorch_tanh")) == "gelu_tanh"
    assert head_weight(config(tied=True)) == "model.embed_tokens.weight"
    assert head_weight(config()) == "lm_head.weight"
    with pytest.raises(CheckpointError, match="unknown activation 'relu'"):
        activation_of(config(activation="relu"))
