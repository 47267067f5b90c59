"""config.json of a Hugging Face model, in transformers 4's and 5's forms, as a ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headway.errors import CheckpointError
from headway.models.checkpoint.fields import Fields, default_head_width, token_ids, unsupported
from headway.models.config import ModelConfig, RopeScaling, checked

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}
"""Hugging Face's ``model_type`` to the model file."""

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# config.json holds only what differs from the defaults of its model type (the class in transformers).
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "max_position_embeddings": 32768,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
}


def from_huggingface(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Return the shape that config.json describes; ``generation`` is generation_config.json, whose eos ids count too.

    Reads the forms of transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``). Raises
    CheckpointError naming the key and the value.
    """
    source = "config.json"
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise unsupported(source, "model_type", kind, sorted(ARCHITECTURES))
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            f"{source}: quantization_config is set; quantized Hugging Face checkpoints are not read yet: use the"
            " unquantized model or a GGUF file"
        )
    inner = Fields(config, source).mapping("text_config")
    # A null that the file states hides the default, as in transformers: "sliding_window": null means no window.
    fields = Fields({**_DEFAULTS[kind], **config, **inner}, source)
    architecture = ARCHITECTURES[kind]
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads", high=1 << 14)
    layers, vocabulary = fields.integer("num_hidden_layers", high=1 << 12), fields.integer("vocab_size")
    context = fields.integer("max_position_embeddings", high=1 << 30)
    bias = architecture == "qwen2" or (kind != "mistral" and fields.flag("attention_bias"))
    window, windowed = _windows(fields, kind, layers)
    rope_theta, rope_scaling, local_theta = _rope(fields, architecture, context)
    query = fields.number("query_pre_attn_scalar", 256.0) if architecture == "gemma3" else None
    eos = token_ids(fields.get("eos_token_id"), "eos_token_id", source, vocabulary)
    if generation is not None:
        eos += token_ids(generation.get("eos_token_id"), "eos_token_id", "generation_config.json", vocabulary)
    bos = token_ids(fields.get("bos_token_id"), "bos_token_id", source, vocabulary)
    act_key = "hidden_activation" if architecture == "gemma3" else "hidden_act"
    activation = fields.text(act_key, "silu")
    if activation not in _ACTIVATIONS:
        raise unsupported(source, act_key, activation, sorted(_ACTIVATIONS))
    return checked(
        ModelConfig(
            architecture=architecture,
            name=str(config.get("_name_or_path") or ""),
            vocabulary=vocabulary,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_width=default_head_width(fields, "head_dim", hidden, heads),
            intermediate=fields.integer("intermediate_size"),
            context=context,
            norm_eps=fields.number("rms_norm_eps", 1e-6, high=1.0),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rope_local_theta=local_theta,
            tied=fields.flag("tie_word_embeddings"),
            attention_bias=bias,
            output_bias=bias and architecture != "qwen2",
            mlp_bias=architecture == "llama" and kind != "mistral" and fields.flag("mlp_bias"),
            window=window,
            windowed=windowed,
            query_scale=None if query is None else query**-0.5,
            attention_softcap=fields.optional_number("attn_logit_softcapping") if architecture == "gemma3" else None,
            logit_softcap=fields.optional_number("final_logit_softcapping") if architecture == "gemma3" else None,
            activation=_ACTIVATIONS[activation],
            bos=bos[0] if bos else None,
            eos=tuple(dict.fromkeys(eos)),
        ),
        source,
    )


def _windows(fields: Fields, kind: str, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Return the sliding window and the layers that have it."""
    if kind == "llama" or (kind.startswith("qwen") and not fields.flag("use_sliding_window")):
        return None, ()
    window = fields.optional_integer("sliding_window")
    if window is None or kind == "mistral":
        return window, ()
    types = fields.get("layer_types")
    if types is None and kind.startswith("qwen"):
        first = fields.integer("max_window_layers", low=0)
        windowed = tuple(layer >= first for layer in range(layers))
    elif types is None:
        # transformers 5 writes the pattern with an underscore.
        key = (
            "sliding_window_pattern" if fields.get("sliding_window_pattern") is not None else "_sliding_window_pattern"
        )
        pattern = fields.integer(key, 6)
        windowed = tuple((layer + 1) % pattern != 0 for layer in range(layers))
    else:
        if not isinstance(types, list) or len(types) != layers:
            raise fields.error("layer_types", f"it must name the attention of each of the {layers} layers")
        for each in types:
            if each not in ("sliding_attention", "full_attention"):
                raise unsupported(fields.source, "layer_types", each, ["full_attention", "sliding_attention"])
        windowed = tuple(each == "sliding_attention" for each in types)
    if kind.startswith("gemma3") and fields.get("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "only causal models generate text")
    return (window, windowed) if any(windowed) else (None, ())


def _rope(fields: Fields, architecture: str, context: int) -> tuple[float, RopeScaling | None, float | None]:
    """Return base, scaling and (Gemma 3) local base from either form of the config."""
    gemma = architecture == "gemma3"
    raw = fields.mapping("rope_parameters")
    nested = Fields(raw, f"{fields.source}: rope_parameters")
    if "full_attention" in raw or "sliding_attention" in raw:
        if not gemma:
            raise fields.error("rope_parameters", "parameters per layer type are supported for gemma3 only")
        local = Fields(nested.mapping("sliding_attention"), f"{fields.source}: rope_parameters.sliding_attention")
        if _rope_kind(local) != "default":
            raise local.error("rope_type", "sliding-window layers must not be scaled")
        local_theta = local.number("rope_theta", 10000.0)
        chosen = Fields(nested.mapping("full_attention"), f"{fields.source}: rope_parameters.full_attention")
    else:
        local_theta = fields.number("rope_local_base_freq", 10000.0)
        chosen = Fields(raw or fields.mapping("rope_scaling"), fields.source)
    theta_default = fields.number("rope_theta", 1e6 if gemma else 10000.0)
    theta = chosen.number("rope_theta", theta_default)
    partial = chosen.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError(f"{fields.source}: partial_rotary_factor is {partial}; only whole heads are rotated here")
    return theta, _hf_scaling(chosen, context), local_theta if gemma else None


def _rope_kind(fields: Fields) -> str:
    return fields.text("rope_type") or fields.text("type", "default")


def _hf_scaling(fields: Fields, context: int) -> RopeScaling | None:
    kind = _rope_kind(fields)
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise unsupported(fields.source, "rope_type", kind, ["default", "linear", "llama3", "yarn"])
    original = fields.integer("original_max_position_embeddings", context, high=1 << 30)
    if kind == "linear":
        return RopeScaling(kind=kind, factor=fields.number("factor"), original_context=original)
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=fields.number("factor"),
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
            original_context=original,
        )
    if fields.get("truncate") is False:
        raise fields.error("truncate", "yarn without truncation is not supported")
    factor = fields.number("factor", context / original)
    attention = fields.optional_number("attention_factor")
    scale, all_dim = fields.optional_number("mscale"), fields.optional_number("mscale_all_dim")
    if attention is None and scale is not None and all_dim is not None:
        attention = _mscale(factor, scale) / _mscale(factor, all_dim)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=attention,
    )


def _mscale(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's temperature for a stretch (Peng et al. 2023)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
