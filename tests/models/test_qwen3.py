from __future__ import annotations

import pytest

from tests.models.conformance import check


@pytest.mark.parametrize("bias", [False, True])
def test_logits_equal_transformers(bias: bool) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        attention_bias=bias,
        attn_implementation="eager",
    )
    check(Qwen3ForCausalLM(config))
