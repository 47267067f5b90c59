from __future__ import annotations

import pytest

from tests.models.conformance import check


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(tied: bool) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    check(Qwen2ForCausalLM(config))


def test_window_on_the_upper_layers_only() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
        attn_implementation="eager",
    )
    check(Qwen2ForCausalLM(config))
