from __future__ import annotations

from typing import Any

import pytest

from tests.models.conformance import check


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"query_pre_attn_scalar": 24, "final_logit_softcapping": 2.0},
    ],
    ids=["plain", "global-rope-scaled", "query-scale-and-softcap"],
)
def test_logits_equal_transformers(changes: dict[str, Any]) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 256,
        "sliding_window": 9,
        "sliding_window_pattern": 3,
        "attn_implementation": "eager",
    }
    check(Gemma3ForCausalLM(Gemma3TextConfig(**{**settings, **changes})))
