from __future__ import annotations

import contextlib
import json
import logging
import math
from typing import Any

import pytest

from headway.errors import CheckpointError
from headway.models.checkpoint.config_hf import from_huggingface
from headway.models.config import RopeScaling

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def real(class_name: str, **changes: Any) -> dict[str, Any]:
    """Return config.json as transformers writes it, defaults and all."""
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config: dict[str, Any] = json.loads(getattr(transformers, class_name)(**changes).to_json_string(use_diff=False))
    return config


def diff(class_name: str, **changes: Any) -> dict[str, Any]:
    """Return config.json with what differs from the defaults only."""
    transformers = pytest.importorskip("transformers")
    config: dict[str, Any] = json.loads(getattr(transformers, class_name)(**changes).to_json_string(use_diff=True))
    return config


def test_llama_2() -> None:
    config = from_huggingface(real("LlamaConfig", num_hidden_layers=2, max_position_embeddings=4096))
    assert config.architecture == "llama"
    assert (config.vocabulary, config.hidden, config.layers, config.intermediate) == (32000, 4096, 2, 11008)
    assert (config.heads, config.kv_heads, config.head_width) == (32, 32, 128)
    assert (config.context, config.norm_eps, config.rope_theta) == (4096, 1e-6, 10000.0)
    assert config.rope_scaling is None
    assert (config.window, config.windowed, config.tied) == (None, (), False)
    assert (config.bos, config.eos, config.activation) == (1, (2,), "silu")
    assert (config.attention_bias, config.output_bias, config.mlp_bias) == (False, False, False)


def test_llama_3_with_rope_scaling_in_both_forms() -> None:
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    expected = RopeScaling(kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    old = from_huggingface({**LLAMA, "rope_theta": 500000.0, "rope_scaling": scaling})
    new = from_huggingface(
        real("LlamaConfig", max_position_embeddings=131072, rope_parameters={**scaling, "rope_theta": 500000.0})
    )
    for config in (old, new):
        assert config.rope_theta == 500000.0
        assert config.rope_scaling == expected


def test_llama_biases_tying_and_several_ends() -> None:
    config = from_huggingface(
        real("LlamaConfig", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, eos_token_id=[5, 6]),
        {"eos_token_id": [6, 7]},
    )
    assert (config.attention_bias, config.output_bias, config.mlp_bias, config.tied) == (True, True, True, True)
    assert config.eos == (5, 6, 7)


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_linear_scaling_in_the_old_spelling_too(spelling: str) -> None:
    config = from_huggingface({**LLAMA, "rope_scaling": {spelling: "linear", "factor": 4}})
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 4.0)


def test_yarn() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert from_huggingface({**LLAMA, "rope_scaling": scaling}).rope_scaling == RopeScaling(
        kind="yarn", factor=4.0, original_context=1024, beta_fast=32.0, beta_slow=1.0, attention_factor=None
    )
    more = {**scaling, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.7, "factor": None}
    found = from_huggingface({**LLAMA, "rope_scaling": more}).rope_scaling
    assert found is not None
    assert (found.factor, found.beta_fast, found.beta_slow, found.attention_factor) == (4.0, 16.0, 2.0, 0.7)
    found = from_huggingface({**LLAMA, "rope_scaling": {**scaling, "mscale": 0.7, "mscale_all_dim": 1.4}}).rope_scaling
    assert found is not None
    assert found.attention_factor == pytest.approx((0.07 * math.log(4) + 1) / (0.14 * math.log(4) + 1))


def test_mistral_is_llama_with_a_window_on_every_layer() -> None:
    config = from_huggingface(real("MistralConfig"))
    assert config.architecture == "llama"
    assert (config.window, config.windowed, config.kv_heads) == (4096, (), 8)
    assert from_huggingface(real("MistralConfig", sliding_window=None)).window is None
    assert from_huggingface({**LLAMA, "model_type": "mistral", "head_dim": 32}).head_width == 32


def test_qwen2() -> None:
    config = from_huggingface(real("Qwen2Config"))
    assert config.architecture == "qwen2"
    assert (config.attention_bias, config.output_bias, config.window) == (True, False, None)
    config = from_huggingface(real("Qwen2Config", num_hidden_layers=4, use_sliding_window=True, max_window_layers=3))
    assert (config.window, config.windowed) == (4096, (False, False, False, True))
    # transformers 4 wrote no layer_types.
    old = {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    assert from_huggingface(old).windowed == (False, True, True)
    assert from_huggingface({**old, "max_window_layers": 28}).window is None
    del old["sliding_window"]
    assert from_huggingface(old).window == 4096
    assert from_huggingface({**old, "use_sliding_window": False}).window is None


def test_qwen3() -> None:
    config = from_huggingface(
        real("Qwen3Config", num_hidden_layers=2, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8)
    )
    assert config.architecture == "qwen3"
    assert (config.head_width, config.attention_bias, config.output_bias) == (128, False, False)
    config = from_huggingface(real("Qwen3Config", attention_bias=True))
    assert (config.attention_bias, config.output_bias) == (True, True)


def test_gemma3_text() -> None:
    config = from_huggingface(
        real("Gemma3TextConfig", num_hidden_layers=7, query_pre_attn_scalar=168, final_logit_softcapping=30.0)
    )
    assert config.architecture == "gemma3"
    assert (config.heads, config.kv_heads, config.head_width, config.activation) == (8, 4, 256, "gelu_tanh")
    assert (config.window, config.windowed) == (4096, (True,) * 5 + (False, True))
    assert (config.rope_theta, config.rope_local_theta, config.rope_scaling) == (1e6, 10000.0, None)
    assert config.query_scale == pytest.approx(168**-0.5)
    assert (config.logit_softcap, config.attention_softcap, config.tied) == (30.0, None, True)


def test_gemma3_in_the_words_of_transformers_4() -> None:
    # The text part of a 4B model on the hub: what is not there is the class's default.
    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 12,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = from_huggingface({"model_type": "gemma3", "text_config": inner, "eos_token_id": [1, 106]})
    assert (config.heads, config.kv_heads, config.head_width, config.vocabulary) == (8, 4, 256, 262208)
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 8.0)
    assert (config.rope_theta, config.rope_local_theta) == (1e6, 10000.0)
    assert (config.window, config.windowed) == (1024, ((True,) * 5 + (False,)) * 2)
    assert (config.eos, config.tied) == ((1, 106), True)
    flat = {**inner, "sliding_window_pattern": 2, "rope_local_base_freq": 5000.0, "rope_theta": 2e6}
    config = from_huggingface(flat)
    assert config.windowed == (True, False) * 6
    assert (config.rope_theta, config.rope_local_theta) == (2e6, 5000.0)


def test_gemma3_multimodal_as_transformers_5_writes_it() -> None:
    config = from_huggingface(real("Gemma3Config"))
    assert (config.architecture, config.hidden, config.layers) == ("gemma3", 2304, 26)


@pytest.mark.parametrize(
    "class_name", ["LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config", "Gemma3TextConfig"]
)
def test_a_config_of_differences_means_the_same_as_a_whole_one(class_name: str) -> None:
    changes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    sparse = diff(class_name, **changes)
    whole = real(class_name, **changes)
    needed = (
        "vocab_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_key_value_heads",
        "eos_token_id",
        "bos_token_id",
    )
    for key in needed if class_name != "Gemma3TextConfig" else ():
        sparse.setdefault(key, whole[key])
    assert from_huggingface(sparse) == from_huggingface(whole)


HOSTILE = [
    ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported are gemma3, gemma3_text, llama, mistral"),
    ({"model_type": None}, "model_type None is not supported"),
    ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be an integer from 1"),
    ({"num_attention_heads": -4}, "num_attention_heads is -4"),
    ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    ({"num_attention_heads": True}, "num_attention_heads is True"),
    ({"num_attention_heads": None}, "num_attention_heads is missing"),
    ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
    ({"num_key_value_heads": 8}, "4 attention heads cannot share 8 key-value heads"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; it must be an integer from 1 to 4096"),
    ({"hidden_size": 2**40}, "hidden_size is 1099511627776"),
    ({"hidden_size": 63}, "a hidden size of 63 does not divide into 4 heads"),
    ({"hidden_size": 64.0}, r"hidden_size is 64\.0"),
    ({"head_dim": 5}, "head width 5 is odd"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"intermediate_size": []}, r"intermediate_size is \[\]"),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings is 2147483648"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
    ({"rope_theta": math.inf}, "rope_theta is inf"),
    ({"rope_theta": 10**400}, "rope_theta is 1000"),
    (
        {"rope_scaling": {"rope_type": "longrope"}},
        "rope_type 'longrope' is not supported; supported are default, linear",
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing; it must be a number"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
    ({"rope_scaling": {"rope_type": 1}}, "rope_type is 1"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate is False"),
    ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; it must be a mapping"),
    ({"rope_parameters": {"full_attention": {}}}, "parameters per layer type are supported for gemma3 only"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ({"eos_token_id": "2"}, "eos_token_id is '2'"),
    ({"eos_token_id": [1, None]}, r"eos_token_id is \[1, None\]"),
    ({"text_config": 3}, "text_config is 3"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is set; .* not read yet"),
    ({"num_hidden_layers": "9" * 10_000}, "num_hidden_layers is '999"),
]


@pytest.mark.parametrize(("changes", "message"), HOSTILE, ids=[str(changes)[:50] for changes, _ in HOSTILE])
def test_hostile_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        from_huggingface({**LLAMA, **changes})
    assert "config.json" in caught.value.message
    assert len(caught.value.message) < 400


GEMMA_HOSTILE = [
    ({"layer_types": ["full_attention"]}, "it must name the attention of each of the 26 layers"),
    ({"layer_types": ["linear_attention"] * 26}, "layer_types 'linear_attention' is not supported"),
    ({"layer_types": [[]] * 26}, r"layer_types \[\] is not supported"),
    ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ({"use_bidirectional_attention": True}, "only causal models"),
    ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}}, "must not be scaled"),
    ({"rope_parameters": {"full_attention": 3}}, "full_attention is 3"),
    ({"final_logit_softcapping": -1}, "final_logit_softcapping is -1"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
]


@pytest.mark.parametrize(("changes", "message"), GEMMA_HOSTILE, ids=[str(changes)[:50] for changes, _ in GEMMA_HOSTILE])
def test_hostile_gemma_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_huggingface({"model_type": "gemma3_text", **changes})


WEIRD: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 2**64, 10**400, 0.5, -0.5, math.nan, math.inf, "", "x", "1", [], [1], [[]], {},
]  # fmt: skip


@pytest.mark.parametrize("class_name", ["LlamaConfig", "Qwen2Config", "Gemma3TextConfig", "Gemma3Config"])
def test_any_value_of_any_type_is_read_or_refused(class_name: str) -> None:
    base = real(class_name, num_hidden_layers=2) if class_name != "Gemma3Config" else real(class_name)
    base["use_sliding_window"] = True
    places = [base, *(each for each in base.values() if isinstance(each, dict))]
    places += [deep for each in places[1:] for deep in each.values() if isinstance(deep, dict)]
    extra = ("rope_scaling", "head_dim", "sliding_window_pattern", "layer_types", "partial_rotary_factor", "mlp_bias")
    for place in places:
        for key in {*place, *extra}:
            held = dict(place)
            for value in WEIRD:
                place[key] = value
                with contextlib.suppress(CheckpointError):
                    from_huggingface(base)
            place.clear()
            place.update(held)


def test_end_tokens_outside_the_vocabulary_can_never_come_and_are_dropped() -> None:
    assert from_huggingface({**LLAMA, "eos_token_id": [-1, 7, 100]}).eos == (7,)
