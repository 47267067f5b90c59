from __future__ import annotations

import math
from typing import Any

import pytest

from headway.errors import CheckpointError
from headway.models.config import ModelConfig, RopeScaling, checked


def config(**changes: Any) -> ModelConfig:
    base: dict[str, Any] = {
        "architecture": "llama",
        "vocabulary": 10,
        "hidden": 32,
        "layers": 1,
        "heads": 4,
        "kv_heads": 2,
        "head_width": 8,
        "intermediate": 64,
        "context": 16,
        "norm_eps": 1e-5,
    }
    return ModelConfig(**{**base, **changes})


def test_a_consistent_config_passes_unchanged() -> None:
    assert checked(config(), "here") == config()
    scaled = config(rope_scaling=RopeScaling(kind="llama3", freq_factors=(1.0, 2.0, 4.0, 8.0)))
    assert checked(scaled, "here") is scaled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "here: 4 attention heads cannot share 3 key-value heads"),
        ({"head_width": 7}, "here: head width 7 is odd"),
        ({"rope_scaling": RopeScaling(kind="llama3", freq_factors=(1.0,))}, "has 1 factors; a head width of 8 needs 4"),
        ({"rope_scaling": RopeScaling(kind="llama3", freq_factors=(1.0, 1.0, 1.0, math.inf))}, "holds inf"),
        ({"rope_scaling": RopeScaling(kind="llama3", freq_factors=(1.0, 1.0, 1.0, -1.0))}, "holds -1.0"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        checked(config(**changes), "here")
