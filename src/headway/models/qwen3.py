"""Qwen3 (dense): q and k are normed per head, before the rotation."""

from __future__ import annotations

from headway.kernels.ops import Ops, Value
from headway.models.config import ModelConfig
from headway.models.layers import activation_of, head_weight, rope_of, scale_of, window_of


def forward(ops: Ops, config: ModelConfig) -> Value:
    """Record the model; weights under their Hugging Face names."""
    rope = rope_of(config)
    activation = activation_of(config)
    q_width, kv_width = config.heads * config.head_width, config.kv_heads * config.head_width

    def linear(x: Value, name: str, width: int, *, bias: bool = False) -> Value:
        return ops.linear(x, f"{name}.weight", width=width, bias=f"{name}.bias" if bias else None)

    def turned(x: Value, norm: str) -> Value:
        normed = ops.rms_norm(x, norm, eps=config.norm_eps, head_width=config.head_width)
        return ops.rope(normed, rope, head_width=config.head_width)

    x = ops.embed("model.embed_tokens.weight", width=config.hidden)
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        h = ops.rms_norm(x, f"{at}.input_layernorm.weight", eps=config.norm_eps)
        q = linear(h, f"{at}.self_attn.q_proj", q_width, bias=config.attention_bias)
        k = linear(h, f"{at}.self_attn.k_proj", kv_width, bias=config.attention_bias)
        v = linear(h, f"{at}.self_attn.v_proj", kv_width, bias=config.attention_bias)
        attended = ops.attend(
            turned(q, f"{at}.self_attn.q_norm.weight"),
            turned(k, f"{at}.self_attn.k_norm.weight"),
            v,
            layer=layer,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_width=config.head_width,
            scale=scale_of(config),
            window=window_of(config, layer),
        )
        x = ops.add(x, linear(attended, f"{at}.self_attn.o_proj", config.hidden, bias=config.output_bias))
        h = ops.rms_norm(x, f"{at}.post_attention_layernorm.weight", eps=config.norm_eps)
        gate = linear(h, f"{at}.mlp.gate_proj", config.intermediate)
        up = linear(h, f"{at}.mlp.up_proj", config.intermediate)
        gated = ops.gate(gate, up, activation=activation)
        x = ops.add(x, linear(gated, f"{at}.mlp.down_proj", config.hidden))
    x = ops.rms_norm(x, "model.norm.weight", eps=config.norm_eps)
    return ops.head(x, head_weight(config), width=config.vocabulary)
