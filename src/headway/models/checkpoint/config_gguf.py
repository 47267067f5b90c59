"""GGUF metadata as a ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headway.models.checkpoint.fields import Fields, default_head_width, token_ids, unsupported
from headway.models.config import ModelConfig, RopeScaling, checked

ARCHITECTURES = ("gemma3", "llama", "qwen2", "qwen3")
"""Values of ``general.architecture`` that are read; Mistral files say llama."""

_END_OF_TURN = frozenset(
    [
        "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>",
        "<|return|>", "<|call|>", "<EOT>", "_<EOT>", "<end_of_utterance>",
    ]
)  # fmt: skip
"""Tokens that end a turn in some chat format (those of llama.cpp)."""


_GEMMA3_27B_LAYERS = 62


def from_gguf(
    metadata: Mapping[str, Any],
    *,
    tied: bool = False,
    attention_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    freq_factors: tuple[float, ...] = (),
) -> ModelConfig:
    """Return the shape that GGUF metadata describes.

    What the metadata does not say comes from the tensor table: whether there is an output head (else ``tied``), which
    biases there are, and the values of ``rope_freqs.weight``. Raises CheckpointError naming the key and the value.
    """
    source = "GGUF metadata"
    general = Fields(metadata, source)
    architecture = general.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise unsupported(source, "general.architecture", architecture, ARCHITECTURES)
    fields = Fields(metadata, source, f"{architecture}.")
    if fields.integer("expert_count", 0, low=0):
        raise fields.error("expert_count", "mixtures of experts are not supported")
    hidden, heads = fields.integer("embedding_length"), fields.uniform("attention.head_count")
    layers = fields.integer("block_count", high=1 << 12)
    vocabulary = _vocabulary(fields, metadata)
    head_width = default_head_width(fields, "attention.key_length", hidden, heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_width) != head_width:
            raise fields.error(key, f"only the width of a whole head, {head_width}, is supported")
    gemma = architecture == "gemma3"
    window = fields.optional_integer("attention.sliding_window") if gemma else None
    pattern = fields.integer("attention.sliding_window_pattern", 6) if window else 1
    bos = token_ids(metadata.get("tokenizer.ggml.bos_token_id"), "tokenizer.ggml.bos_token_id", source, vocabulary)
    return checked(
        ModelConfig(
            architecture=architecture,
            name=general.text("general.name"),
            vocabulary=vocabulary,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=fields.uniform("attention.head_count_kv", heads),
            head_width=head_width,
            intermediate=fields.uniform("feed_forward_length"),
            context=fields.integer("context_length", high=1 << 30),
            norm_eps=fields.number("attention.layer_norm_rms_epsilon", high=1.0),
            rope_theta=fields.number("rope.freq_base", 1e6 if gemma else 10000.0),
            rope_scaling=_scaling(fields, freq_factors),
            rope_local_theta=fields.number("rope.freq_base_swa", 10000.0) if gemma else None,
            tied=tied,
            attention_bias=attention_bias or architecture == "qwen2",
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            window=window,
            windowed=tuple((layer + 1) % pattern != 0 for layer in range(layers)) if window else (),
            # The 27B model alone scales by the width that its hidden size would give (query_pre_attn_scalar 168).
            query_scale=(hidden / heads) ** -0.5 if gemma and layers == _GEMMA3_27B_LAYERS else None,
            attention_softcap=fields.optional_number("attn_logit_softcapping"),
            logit_softcap=fields.optional_number("final_logit_softcapping"),
            activation="gelu_tanh" if gemma else "silu",
            bos=bos[0] if bos else None,
            eos=_ends(metadata, source, vocabulary),
        ),
        source,
    )


def _vocabulary(fields: Fields, metadata: Mapping[str, Any]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return fields.integer("vocab_size", len(tokens) if isinstance(tokens, list) and tokens else None)


def _ends(metadata: Mapping[str, Any], source: str, vocabulary: int) -> tuple[int, ...]:
    """Return every id that ends a sequence: those that the file names, and a chat model's end-of-turn tokens."""
    ends: list[int] = []
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        full = f"tokenizer.ggml.{key}"
        ends += token_ids(metadata.get(full), full, source, vocabulary)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and "tokenizer.chat_template" in metadata:
        ends += [index for index, token in enumerate(tokens) if token in _END_OF_TURN]
    return tuple(dict.fromkeys(ends))


def _scaling(fields: Fields, freq_factors: tuple[float, ...]) -> RopeScaling | None:
    if freq_factors:
        return RopeScaling(kind="llama3", freq_factors=freq_factors)
    factor = fields.optional_number("rope.scaling.factor") or fields.optional_number("rope.scale_linear")
    # llama.cpp's rule: a factor alone means linear.
    kind = fields.text("rope.scaling.type", "linear" if factor else "none")
    if kind == "none" or factor is None:
        return None
    if kind not in ("linear", "yarn"):
        raise unsupported(fields.source, f"{fields.prefix}rope.scaling.type", kind, ["linear", "none", "yarn"])
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"), high=1 << 30)
    if kind == "linear":
        return RopeScaling(kind=kind, factor=factor, original_context=original)
    attention = fields.optional_number("rope.scaling.attn_factor")
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=original,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        # ggml multiplies its factor into YaRN's own temperature.
        attention_factor=None if attention is None else attention * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    )
