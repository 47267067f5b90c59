from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest

from headway.errors import CheckpointError
from headway.models.checkpoint.config_gguf import from_gguf
from headway.models.config import RopeScaling


def metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """Return metadata; a double underscore in a change's name is a dot of the key, under the architecture."""
    base = {
        "block_count": 12,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 100,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    whole = {"general.architecture": architecture, **{f"{architecture}.{name}": value for name, value in base.items()}}
    return {name: value for name, value in whole.items() if value is not None}


def test_llama() -> None:
    config = from_gguf(metadata(rope__freq_base=5e5, rope__dimension_count=16), tied=True)
    assert config.architecture == "llama"
    assert (config.vocabulary, config.hidden, config.layers, config.intermediate) == (100, 64, 12, 128)
    assert (config.heads, config.kv_heads, config.head_width, config.context) == (4, 2, 16, 4096)
    assert (config.norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 5e5, None)
    assert (config.tied, config.activation, config.window) == (True, "silu", None)
    assert from_gguf(metadata(attention__head_count_kv=None)).kv_heads == 4
    assert from_gguf(metadata(attention__head_count_kv=[2] * 12)).kv_heads == 2
    assert from_gguf(metadata("qwen3", attention__key_length=32, attention__value_length=32)).head_width == 32


def test_the_vocabulary_is_as_long_as_the_token_list_unless_stated() -> None:
    tokens = {"tokenizer.ggml.tokens": ["a"] * 77}
    assert from_gguf({**metadata(vocab_size=None), **tokens}).vocabulary == 77
    assert from_gguf({**metadata(), **tokens}).vocabulary == 100
    with pytest.raises(CheckpointError, match=r"llama.vocab_size is missing"):
        from_gguf(metadata(vocab_size=None))


def test_gemma3() -> None:
    config = from_gguf(metadata("gemma3", attention__sliding_window=512, attention__key_length=32))
    assert (config.window, config.windowed) == (512, ((True,) * 5 + (False,)) * 2)
    assert (config.rope_theta, config.rope_local_theta) == (1e6, 10000.0)
    assert (config.activation, config.query_scale, config.logit_softcap) == ("gelu_tanh", None, None)
    scaled = from_gguf(metadata("gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0))
    assert scaled.rope_scaling == RopeScaling(kind="linear", factor=8.0, original_context=4096)
    assert from_gguf(metadata("gemma3", final_logit_softcapping=30.0)).logit_softcap == 30.0
    largest = from_gguf(metadata("gemma3", block_count=62, attention__key_length=32))
    assert largest.query_scale == pytest.approx(16**-0.5)


def test_rope_scaling() -> None:
    assert from_gguf(metadata(rope__scaling__type="none", rope__scaling__factor=4.0)).rope_scaling is None
    alone = from_gguf(metadata(rope__scaling__factor=4.0)).rope_scaling
    assert alone is not None
    assert (alone.kind, alone.factor) == ("linear", 4.0)
    old = from_gguf(metadata(rope__scale_linear=2.0)).rope_scaling
    assert old is not None
    assert (old.kind, old.factor) == ("linear", 2.0)
    yarn: dict[str, Any] = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 1024,
    }
    assert from_gguf(metadata(**yarn)).rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_context=1024)
    found = from_gguf(metadata(**yarn, rope__scaling__attn_factor=0.5)).rope_scaling
    assert found is not None
    assert found.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))
    factors = tuple(float(2**each) for each in range(8))
    found = from_gguf(metadata(), freq_factors=factors).rope_scaling
    assert found is not None
    assert found.freq_factors == factors


def test_end_tokens_are_the_stated_ones_and_for_a_chat_model_the_known_ones() -> None:
    tokens = ["a"] * 100
    tokens[5], tokens[8], tokens[9] = "<|endoftext|>", "<|im_end|>", "<end_of_turn>"
    base = {
        **metadata(),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.eos_token_id": 8,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.bos_token_id": 3,
    }
    assert from_gguf(base).eos == (8, 7)
    assert from_gguf(base).bos == 3
    assert from_gguf({**base, "tokenizer.chat_template": "x"}).eos == (8, 7, 5, 9)
    assert from_gguf({**base, "tokenizer.ggml.eos_token_id": 2**32 - 1}).eos == (7,)


HOSTILE = [
    ({"attention__head_count": 0}, "llama.attention.head_count is 0"),
    ({"attention__head_count": "4"}, "llama.attention.head_count is '4'"),
    ({"attention__head_count_kv": [2, 4]}, "layers of different shapes"),
    ({"attention__head_count_kv": []}, r"head_count_kv is \[\]"),
    ({"attention__head_count_kv": 3}, "4 attention heads cannot share 3"),
    ({"block_count": 2**32 - 1}, "llama.block_count is 4294967295"),
    ({"block_count": None}, "llama.block_count is missing"),
    ({"embedding_length": 2**60}, "llama.embedding_length is"),
    ({"embedding_length": 66}, "66 does not divide into 4 heads"),
    ({"attention__layer_norm_rms_epsilon": math.nan}, "epsilon is nan"),
    ({"attention__value_length": 8}, "value_length is 8; only the width of a whole head, 16"),
    ({"rope__dimension_count": 8}, "rope.dimension_count is 8; only the width of a whole head"),
    ({"rope__freq_base": math.inf}, "freq_base is inf"),
    (
        {"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0},
        "rope.scaling.type 'longrope' is not supported",
    ),
    ({"expert_count": 8}, "expert_count is 8; mixtures of experts are not supported"),
    ({"attention__key_length": 7}, "head width 7 is odd|is 16"),
]


@pytest.mark.parametrize(("changes", "message"), HOSTILE, ids=[str(changes) for changes, _ in HOSTILE])
def test_hostile_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_gguf(metadata(**changes))


def test_any_value_of_any_type_is_read_or_refused() -> None:
    weird: list[Any] = [True, -1, 0, 1, 7, 2**64 - 1, 0.5, math.nan, math.inf, "", "x", [], [1], ["a"], [0.5] * 3]
    for architecture in ("llama", "gemma3"):
        base = {
            **metadata(architecture),
            "tokenizer.ggml.tokens": ["a"] * 100,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.chat_template": "x",
            "general.name": "x",
        }
        for leaf in ("attention.sliding_window", "rope.scaling.factor", "rope.scaling.type", "rope.freq_base"):
            base[f"{architecture}.{leaf}"] = {"rope.scaling.type": "yarn"}.get(leaf, 4)
        for key in base:
            for value in weird:
                with contextlib.suppress(CheckpointError):
                    from_gguf({**base, key: value})


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ((1.0,) * 3, "has 3 factors; a head width of 16 needs 8"),
        ((0.0,) * 8, "holds 0.0"),
        ((math.nan,) * 8, "holds nan"),
    ],
)
def test_hostile_frequency_factors(factors: tuple[float, ...], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_gguf(metadata(), freq_factors=factors)
