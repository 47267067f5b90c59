"""Every weight that a model file will read, with its shape; checked when a checkpoint opens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headway.errors import CheckpointError
from headway.models.config import ModelConfig

if TYPE_CHECKING:
    from headway.models.checkpoint import Checkpoint


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every weight, in the order of the forward pass."""
    hidden, width = config.hidden, config.head_width
    q, kv = config.heads * width, config.kv_heads * width
    linears = [
        ("self_attn.q_proj", q, hidden, config.attention_bias),
        ("self_attn.k_proj", kv, hidden, config.attention_bias),
        ("self_attn.v_proj", kv, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, q, config.output_bias),
        ("mlp.gate_proj", config.intermediate, hidden, config.mlp_bias),
        ("mlp.up_proj", config.intermediate, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, config.intermediate, config.mlp_bias),
    ]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.architecture == "gemma3":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    yield "model.embed_tokens.weight", (config.vocabulary, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for norm in norms:
            yield f"{prefix}{norm}.weight", (hidden,)
        if config.architecture in ("qwen3", "gemma3"):
            yield f"{prefix}self_attn.q_norm.weight", (width,)
            yield f"{prefix}self_attn.k_norm.weight", (width,)
        for name, rows, columns, bias in linears:
            yield f"{prefix}{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}{name}.bias", (rows,)
    yield "model.norm.weight", (hidden,)
    if not config.tied:
        yield "lm_head.weight", (config.vocabulary, hidden)


def check_shapes(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError at the first weight that is absent or of another shape than the config says."""
    names = frozenset(checkpoint.names())
    for name, shape in expected_shapes(checkpoint.config):
        if name not in names:
            if name == "lm_head.weight":
                raise CheckpointError(
                    f"{str(checkpoint.path)!r} has no lm_head.weight and does not say that it is tied: set"
                    " tie_word_embeddings to true if the embedding table is the head, else the file is incomplete"
                )
            raise CheckpointError(
                f"{str(checkpoint.path)!r} has no tensor {name!r} of shape {shape}, which its config needs;"
                f" the file is incomplete or no {checkpoint.config.architecture} model"
            )
        found = checkpoint.tensor(name).shape
        if found != shape:
            raise CheckpointError(
                f"{str(checkpoint.path)!r}: tensor {name!r} has shape {found}, but its config needs {shape}"
            )
