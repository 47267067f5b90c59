"""Gemma 3 (text): four norms a layer, q and k norms, sliding-window layers with a rotary base of their own."""

from __future__ import annotations

from headway.kernels.ops import Ops, Value
from headway.models.config import ModelConfig
from headway.models.layers import activation_of, head_weight, local_rope_of, rope_of, scale_of, window_of


def forward(ops: Ops, config: ModelConfig) -> Value:
    """Record the model; weights under their Hugging Face names, norm weights stored without their 1."""
    whole_rope, local_rope = rope_of(config), local_rope_of(config)
    activation = activation_of(config)
    q_width, kv_width = config.heads * config.head_width, config.kv_heads * config.head_width

    def norm(x: Value, name: str, head_width: int | None = None) -> Value:
        return ops.rms_norm(x, f"{name}.weight", eps=config.norm_eps, weight_offset=1.0, head_width=head_width)

    def linear(x: Value, name: str, width: int, *, bias: bool = False) -> Value:
        return ops.linear(x, f"{name}.weight", width=width, bias=f"{name}.bias" if bias else None)

    # Frameworks round the scale to the table's type; ours is float32.
    x = ops.embed("model.embed_tokens.weight", width=config.hidden, scale=config.hidden**0.5)
    for layer in range(config.layers):
        at = f"model.layers.{layer}"
        window = window_of(config, layer)
        rope = whole_rope if window is None else local_rope
        h = norm(x, f"{at}.input_layernorm")
        q = linear(h, f"{at}.self_attn.q_proj", q_width, bias=config.attention_bias)
        k = linear(h, f"{at}.self_attn.k_proj", kv_width, bias=config.attention_bias)
        v = linear(h, f"{at}.self_attn.v_proj", kv_width, bias=config.attention_bias)
        attended = ops.attend(
            ops.rope(norm(q, f"{at}.self_attn.q_norm", config.head_width), rope, head_width=config.head_width),
            ops.rope(norm(k, f"{at}.self_attn.k_norm", config.head_width), rope, head_width=config.head_width),
            v,
            layer=layer,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_width=config.head_width,
            scale=scale_of(config),
            window=window,
            softcap=config.attention_softcap,
        )
        attended = linear(attended, f"{at}.self_attn.o_proj", config.hidden, bias=config.output_bias)
        x = ops.add(x, norm(attended, f"{at}.post_attention_layernorm"))
        h = norm(x, f"{at}.pre_feedforward_layernorm")
        gate = linear(h, f"{at}.mlp.gate_proj", config.intermediate)
        up = linear(h, f"{at}.mlp.up_proj", config.intermediate)
        down = linear(ops.gate(gate, up, activation=activation), f"{at}.mlp.down_proj", config.hidden)
        x = ops.add(x, norm(down, f"{at}.post_feedforward_layernorm"))
    x = norm(x, "model.norm")
    return ops.head(x, head_weight(config), width=config.vocabulary, softcap=config.logit_softcap)
