"""GGUF tensor names in Hugging Face's words, and what its converter did to the values."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Gemma 3 has four norms per layer: ffn_norm is the one before the MLP, not the one after attention.
_GEMMA3_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_LAYERS: Mapping[str, Mapping[str, str]] = {"gemma3": _GEMMA3_LAYER}

ROPE_FACTORS = "rope_freqs.weight"
"""Not a weight: frequency divisors that belong to the config."""

_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
_PERMUTED = re.compile(r"blk\.[0-9]+\.attn_([qk])\.(weight|bias)")


def hugging_face_name(name: str, architecture: str) -> str:
    """Return the Hugging Face name of a GGUF tensor; a name that the table lacks stays as it is."""
    stem, _, leaf = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{leaf}"
    match = _BLOCK.fullmatch(name)
    if match:
        layer, part, leaf = match.groups()
        mapped = _LAYERS.get(architecture, _LAYER).get(part)
        if mapped:
            return f"model.layers.{layer}.{mapped}.{leaf}"
    return name


def permuted_heads(name: str, architecture: str, *, heads: int, kv_heads: int) -> int:
    """Return over how many heads the converter interleaved the rows of this tensor for RoPE; 0 where it did not."""
    match = _PERMUTED.fullmatch(name) if architecture == "llama" else None
    if match is None:
        return 0
    return heads if match[1] == "q" else kv_heads


def unpermute(rows: int, heads: int) -> NDArray[np.intp]:
    """Return, for each Hugging Face row, the GGUF row that holds it.

    The converter moved row (head, half, i) to (head, i, half): ggml rotates neighbouring pairs, Hugging Face halves.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def norm_shift(name: str, architecture: str) -> float:
    """Return what the converter added to the values: Gemma's norms multiply by 1 + weight, ggml's by the weight."""
    return 1.0 if architecture == "gemma3" and name.endswith("norm.weight") else 0.0
