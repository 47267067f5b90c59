"""A model's shape in one form, whatever the checkpoint's format (``checkpoint/config_*.py`` read it)."""

from __future__ import annotations

import math

import msgspec

from headway.errors import CheckpointError


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched beyond the trained context."""

    kind: str
    """linear, llama3, yarn, or default."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    freq_factors: tuple[float, ...] = ()
    """Explicit divisors per frequency (GGUF's ``rope_freqs.weight``); they replace the formula."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a model file needs to know; every field is checked against the tensors' shapes at load."""

    architecture: str
    """Names the file in ``models/``: llama, qwen2, qwen3, gemma3."""
    name: str = ""
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    context: int
    norm_eps: float
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_local_theta: float | None = None
    """Gemma 3: base of the sliding-window layers, never scaled."""
    tied: bool = False
    """The head is the embedding table."""
    attention_bias: bool = False
    """q, k, v have biases (qwen2; llama when the file says so)."""
    output_bias: bool = False
    """o_proj has a bias (llama with attention_bias)."""
    mlp_bias: bool = False
    window: int | None = None
    """Sliding window in tokens, on the layers that ``windowed`` names (all of them when it is empty)."""
    windowed: tuple[bool, ...] = ()
    query_scale: float | None = None
    """Multiplies q.k; None means head_width ** -0.5."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    activation: str = "silu"
    bos: int | None = None
    eos: tuple[int, ...] = ()
    """Every id that ends a sequence."""


def checked(config: ModelConfig, source: str) -> ModelConfig:
    """Return the config after the checks that involve several fields."""
    if config.heads % config.kv_heads:
        raise CheckpointError(
            f"{source}: {config.heads} attention heads cannot share {config.kv_heads} key-value heads; it must divide"
        )
    if config.head_width % 2:
        raise CheckpointError(f"{source}: head width {config.head_width} is odd; rotary embedding needs halves")
    scaling = config.rope_scaling
    if scaling is not None and scaling.freq_factors:
        if len(scaling.freq_factors) != config.head_width // 2:
            raise CheckpointError(
                f"{source}: rope_freqs.weight has {len(scaling.freq_factors)} factors; a head width of"
                f" {config.head_width} needs {config.head_width // 2}"
            )
        bad = next((each for each in scaling.freq_factors if not 0 < each < math.inf), None)
        if bad is not None:
            raise CheckpointError(f"{source}: rope_freqs.weight holds {bad}; factors must be finite and above zero")
    return config
