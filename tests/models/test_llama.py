from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.models.conformance import check, random_tokens, randomize, run_chunks, runner_of, transformers_logits


def small_llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "attn_implementation": "eager",
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_logits_equal_transformers_for_any_number_of_kv_heads(kv_heads: int) -> None:
    check(small_llama(num_key_value_heads=kv_heads))


def test_tied_head_is_the_embedding_table() -> None:
    check(small_llama(tie_word_embeddings=True))


def test_biases_are_added_where_the_config_has_them() -> None:
    check(small_llama(attention_bias=True, mlp_bias=True))


def test_head_width_need_not_be_hidden_over_heads() -> None:
    check(small_llama(head_dim=20))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda scaling: str(scaling["rope_type"]),
)
def test_rope_scaling_equals_transformers(scaling: dict[str, Any]) -> None:
    check(small_llama(rope_parameters={"rope_theta": 10000.0, **scaling}))


def test_rope_llama3_equals_transformers_at_far_positions() -> None:
    """Factor 8, low 1, high 4, original 8192, at positions 10, 9,000 and 20,000."""
    import torch

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = small_llama(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=65536,
        attn_implementation="sdpa",
        rope_parameters=scaling,
    )
    randomize(model)
    tokens = random_tokens(20_001, 97)
    with torch.no_grad():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, [10, 9_000, 20_000]]
        expected = model.lm_head(hidden).numpy()
    runner = runner_of(model, n_blocks=160, block_tokens=128)
    logits = run_chunks(runner, tokens, [2048] * 9 + [1568, 1], list(range(159)))
    np.testing.assert_allclose(logits[[10, 9_000, 20_000]], expected, atol=1e-4, rtol=1e-4)


def test_mistral_sees_only_its_window() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=9,
        attn_implementation="eager",
    )
    model = MistralForCausalLM(config)
    check(model)
    # The window shows: without it the last logits differ.
    tokens = random_tokens(45, 97)
    windowed = transformers_logits(model, tokens)
    model.config.sliding_window = None
    assert np.abs(transformers_logits(model, tokens)[-1] - windowed[-1]).max() > 0.01
