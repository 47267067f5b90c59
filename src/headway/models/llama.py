"""Llama 2 and 3, Mistral (sliding window), SmolLM."""

from __future__ import annotations

from headway.kernels.ops import Ops, Value
from headway.models.config import ModelConfig
from headway.models.layers import activation_of, head_weight, rope_of, scale_of, window_of


def forward(ops: Ops, config: ModelConfig) -> Value:
    """Record the model; weights under their Hugging Face names."""
    rope = rope_of(config)
    activation = activation_of(config)
    q_width, kv_width = config.heads * config.head_width, config.kv_heads * config.head_width

    def linear(x: Value, name: str, width: int, *, bias: bool) -> Value:
        return ops.linear(x, f"{name}.weight", width=width, bias=f"{name}.bias" if bias else None)

    x = ops.embed("model.embed_tokens.weight", width=config.hidden)
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        h = ops.rms_norm(x, f"{at}.input_layernorm.weight", eps=config.norm_eps)
        q = linear(h, f"{at}.self_attn.q_proj", q_width, bias=config.attention_bias)
        k = linear(h, f"{at}.self_attn.k_proj", kv_width, bias=config.attention_bias)
        v = linear(h, f"{at}.self_attn.v_proj", kv_width, bias=config.attention_bias)
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
            softcap=config.attention_softcap,
        )
        x = ops.add(x, linear(attended, f"{at}.self_attn.o_proj", config.hidden, bias=config.output_bias))
        h = ops.rms_norm(x, f"{at}.post_attention_layernorm.weight", eps=config.norm_eps)
        gate = linear(h, f"{at}.mlp.gate_proj", config.intermediate, bias=config.mlp_bias)
        up = linear(h, f"{at}.mlp.up_proj", config.intermediate, bias=config.mlp_bias)
        gated = ops.gate(gate, up, activation=activation)
        x = ops.add(x, linear(gated, f"{at}.mlp.down_proj", config.hidden, bias=config.mlp_bias))
    x = ops.rms_norm(x, "model.norm.weight", eps=config.norm_eps)
    return ops.head(x, head_weight(config), width=config.vocabulary, softcap=config.logit_softcap)
