"""Builds small checkpoints, and GGUF files with anything in them, byte by byte."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.errors import CheckpointError
from headway.models.checkpoint import open_checkpoint
from headway.models.checkpoint.shapes import expected_shapes
from headway.models.config import ModelConfig

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
F32_TENSOR = 0

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: Any) -> bytes:
    """Return a metadata value; an array's content is (element type, values)."""
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        inner, values = content
        return struct.pack("<IQ", inner, len(values)) + b"".join(value(inner, each) for each in values)
    return struct.pack(_SCALARS[kind], content)


def key(name: str | bytes, kind: int, content: Any) -> bytes:
    return string(name) + struct.pack("<I", kind) + value(kind, content)


def info(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    head = string(name) + struct.pack("<I", len(dims))
    return head + b"".join(struct.pack("<Q", dim) for dim in dims) + struct.pack("<IQ", kind, offset)


def gguf(
    keys: Sequence[bytes],
    infos: Sequence[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ", version, len(infos) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys
    )
    head += b"".join(keys) + b"".join(infos)
    return head + b"\0" * (-len(head) % alignment) + data


def rewrite(path: Path, raw: bytes) -> None:
    """Write a file anew; truncating one in place makes some file systems flush it to disk each time."""
    path.unlink(missing_ok=True)
    path.write_bytes(raw)


TINY: dict[str, Any] = {
    "architecture": "llama",
    "vocabulary": 40,
    "hidden": 32,
    "layers": 1,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 8,
    "intermediate": 64,
    "context": 64,
    "norm_eps": 1e-5,
}


def tiny(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**TINY, **changes})


def weights(config: ModelConfig, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Return random weights of every shape that the config needs, by Hugging Face name."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in expected_shapes(config)}


def gguf_keys(config: ModelConfig) -> list[bytes]:
    arch = config.architecture
    return [
        key("general.architecture", STRING, arch),
        key(f"{arch}.block_count", U32, config.layers),
        key(f"{arch}.context_length", U32, config.context),
        key(f"{arch}.embedding_length", U32, config.hidden),
        key(f"{arch}.feed_forward_length", U32, config.intermediate),
        key(f"{arch}.attention.head_count", U32, config.heads),
        key(f"{arch}.attention.head_count_kv", U32, config.kv_heads),
        key(f"{arch}.attention.key_length", U32, config.head_width),
        key(f"{arch}.attention.layer_norm_rms_epsilon", F32, config.norm_eps),
        key(f"{arch}.vocab_size", U32, config.vocabulary),
    ]


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    **_GGUF_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, architecture: str = "llama") -> str:
    """Return the GGUF name; written from ggml's tables, apart from the code under test."""
    names = _GEMMA_NAMES if architecture == "gemma3" else _GGUF_NAMES
    stem, leaf = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{leaf}"
    return f"{names[stem]}.{leaf}"


def permute(array: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder q or k rows as llama.cpp's converter does (``LlamaModel.permute``)."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def tiny_gguf(config: ModelConfig | None = None, *, keys: Sequence[bytes] = (), drop: Sequence[str] = ()) -> bytes:
    """Return a whole small model as float32 GGUF, converted as llama.cpp's script would."""
    config = config or tiny()
    infos, data = [], b""
    for name, array in weights(config).items():
        if name in drop:
            continue
        if config.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            array = permute(array, config.heads if "q_proj" in name else config.kv_heads)
        if config.architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + np.float32(1)
        infos.append(info(gguf_name(name, config.architecture), array.shape[::-1], F32_TENSOR, len(data)))
        data += array.astype("<f4").tobytes()
        data += b"\0" * (-len(data) % 32)
    return gguf([*gguf_keys(config), *keys], infos, data)


def hf_config(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": config.architecture,
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.intermediate,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        **changes,
    }


def safetensors_bytes(tensors: Mapping[str, tuple[str, Sequence[int], bytes]], **changes: Any) -> bytes:
    """Return a safetensors file; ``changes`` replace whole rows of the header."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return with_header(json.dumps({**header, **changes}).encode(), data)


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def as_f32(arrays: Mapping[str, NDArray[np.float32]]) -> dict[str, tuple[str, Sequence[int], bytes]]:
    return {name: ("F32", array.shape, array.tobytes()) for name, array in arrays.items()}


def hf_directory(
    folder: Path, config: ModelConfig | None = None, *, arrays: Mapping[str, NDArray[np.float32]] | None = None,
    **changes: Any,
) -> Path:  # fmt: skip
    """Write a whole small Hugging Face directory; ``changes`` go into config.json."""
    config = config or tiny()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config, **changes)))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(as_f32(arrays or weights(config))))
    return folder


def refused_cheaply(path: Path, message: str, *, most_bytes: float) -> CheckpointError:
    """Open what must be refused, and return the error: within a second of work and so many bytes of memory.

    Time and memory are taken in turns, as counting memory makes everything several times slower.
    """
    started = time.process_time()
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert time.process_time() - started < 1
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most_bytes
    return caught.value
