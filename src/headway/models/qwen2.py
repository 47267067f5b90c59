"""Qwen2 and Qwen2.5: q, k and v always have biases."""

from __future__ import annotations

from headway.kernels.ops import Ops, Value
from headway.models.config import ModelConfig
from headway.models.layers import activation_of, head_weight, rope_of, scale_of, window_of


def forward(ops: Ops, config: ModelConfig) -> Value:
    """Record the model; weights under their Hugging Face names."""
    rope = rope_of(config)
    activation = activation_of(config)
    q_width, kv_width = config.heads * config.head_width, config.kv_heads * config.head_width

    def biased(x: Value, name: str, width: int) -> Value:
        return ops.linear(x, f"{name}.weight", width=width, bias=f"{name}.bias")

    x = ops.embed("model.embed_tokens.weight", width=config.hidden)
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        h = ops.rms_norm(x, f"{at}.input_layernorm.weight", eps=config.norm_eps)
        q = biased(h, f"{at}.self_attn.q_proj", q_width)
        k = biased(h, f"{at}.self_attn.k_proj", kv_width)
        v = biased(h, f"{at}.self_attn.v_proj", kv_width)
        attended = ops.attend(
            ops.rope(q, rope, head_width=config.head_width),
            ops.rope(k, rope, head_width=config.head_width),
            v,
            layer=layer,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_width=config.head_width,
            scale=scale_of(config),
            window=window_of(config, layer),
        )
        x = ops.add(x, ops.linear(attended, f"{at}.self_attn.o_proj.weight", width=config.hidden))
        h = ops.rms_norm(x, f"{at}.post_attention_layernorm.weight", eps=config.norm_eps)
        gate = ops.linear(h, f"{at}.mlp.gate_proj.weight", width=config.intermediate)
        up = ops.linear(h, f"{at}.mlp.up_proj.weight", width=config.intermediate)
        gated = ops.gate(gate, up, activation=activation)
        x = ops.add(x, ops.linear(gated, f"{at}.mlp.down_proj.weight", width=config.hidden))
    x = ops.rms_norm(x, "model.norm.weight", eps=config.norm_eps)
    return ops.head(x, head_weight(config), width=config.vocabulary)
