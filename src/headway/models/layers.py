"""What the model files share: rotary frequencies, windows and the name of the head's weight."""

from __future__ import annotations

import math

import numpy as np

from headway.errors import CheckpointError
from headway.kernels.ops import Activation, Rope
from headway.kernels.tensor import Float32
from headway.models.config import ModelConfig, RopeScaling


def rope_of(config: ModelConfig) -> Rope:
    """Return the model's rotary embedding, its scaling applied.

    Arithmetic is float32 as in the frameworks that trained the models: at position 20,000 a frequency's last bit moves
    the angle by a thousandth.
    """
    plain = _frequencies(config.rope_theta, config.head_width)
    scaling = config.rope_scaling
    if scaling is None:
        return Rope(_tuple(plain))
    if scaling.freq_factors:
        if len(scaling.freq_factors) != len(plain):
            raise CheckpointError(
                f"{len(scaling.freq_factors)} rope frequency factors do not fit heads of width {config.head_width}"
            )
        return Rope(_tuple(np.divide(plain, scaling.freq_factors, dtype=np.float32)))
    match scaling.kind:
        case "default":
            return Rope(_tuple(plain))
        case "linear":
            return Rope(_tuple(plain / np.float32(scaling.factor)))
        case "llama3":
            return Rope(_tuple(_llama3(plain, scaling)))
        case "yarn":
            return Rope(_tuple(_yarn(plain, config.rope_theta, config.head_width, scaling)), _yarn_factor(scaling))
        case kind:
            raise CheckpointError(f"unknown rope scaling {kind!r}: default, linear, llama3 and yarn are known")


def local_rope_of(config: ModelConfig) -> Rope:
    """Return the rotary embedding of sliding-window layers where it differs (Gemma 3): its own base, no scaling."""
    return Rope(_tuple(_frequencies(config.rope_local_theta or config.rope_theta, config.head_width)))


def window_of(config: ModelConfig, layer: int) -> int | None:
    """Return the layer's sliding window in tokens, or None for full attention."""
    if config.windowed and not config.windowed[layer]:
        return None
    return config.window


def scale_of(config: ModelConfig) -> float:
    """Return what multiplies q.k."""
    return config.head_width**-0.5 if config.query_scale is None else config.query_scale


def activation_of(config: ModelConfig) -> Activation:
    """Return the gate's activation under our name for it."""
    match config.activation:
        case "silu" | "swish":
            return "silu"
        case "gelu_tanh" | "gelu_pytorch_tanh":
            return "gelu_tanh"
        case name:
            raise CheckpointError(f"unknown activation {name!r}: silu and gelu_tanh are known")


def head_weight(config: ModelConfig) -> str:
    """Return the name of the weight that makes logits: the embedding table when tied."""
    return "model.embed_tokens.weight" if config.tied else "lm_head.weight"


def _frequencies(theta: float, head_width: int) -> Float32:
    exponents = np.arange(0, head_width, 2, dtype=np.float32) / np.float32(head_width)
    # float64 inside, rounded once: within one unit in the last place of any float32 library.
    powers = np.power(theta, exponents, dtype=np.float64).astype(np.float32)
    return np.asarray(np.float32(1.0) / powers, np.float32)


def _llama3(plain: Float32, scaling: RopeScaling) -> Float32:
    """Long wavelengths are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    context = np.float32(scaling.original_context)
    wavelengths = np.float32(2 * math.pi) / plain
    smooth = np.clip((context / wavelengths - low) / (high - low), np.float32(0), np.float32(1))
    divided = plain / np.float32(scaling.factor)
    blended: Float32 = (np.float32(1) - smooth) * divided + smooth * plain
    return np.where(wavelengths > context / low, divided, np.where(wavelengths < context / high, plain, blended))


def _yarn(plain: Float32, theta: float, head_width: int, scaling: RopeScaling) -> Float32:
    """Interpolate dimensions that turn rarely, keep those that turn often, ramp between (Peng et al. 2023)."""

    def dimension(rotations: float) -> float:
        return head_width * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), head_width - 1)
    ramp = (np.arange(len(plain), dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 0.001))
    kept = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    return np.asarray(plain / np.float32(scaling.factor) * (np.float32(1) - kept) + plain * kept, np.float32)


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 1.0 if scaling.factor <= 1 else 0.1 * math.log(scaling.factor) + 1.0


def _tuple(frequencies: Float32) -> tuple[float, ...]:
    return tuple(float(value) for value in frequencies)
