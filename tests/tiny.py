"""A tiny random llama in Hugging Face layout, made in a moment: the whole server runs on it without real weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the slow server answers at last",
    "a token is a piece of text; a block holds the keys and values of many tokens",
    "def add(a, b):\n    return a + b\n",
]
HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH, INNER = 64, 2, 4, 2, 16, 128


def make_tokenizer(folder: Path, *, template: str | None = CHAT_TEMPLATE) -> int:
    """Write tokenizer files; return the vocabulary's size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[
            AddedToken(name, special=True, normalized=False) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    size: int = tokenizer.get_vocab_size()
    return size


def make_model(
    folder: Path, *, context: int = 2048, layers: int = LAYERS, template: str | None = CHAT_TEMPLATE, seed: int = 0
) -> Path:
    """Write a whole checkpoint into ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = make_tokenizer(folder, template=template)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH,
        "intermediate_size": INNER,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> NDArray[np.float32]:
        values: NDArray[np.float32] = (rng.standard_normal(shape) * (1.5 / np.sqrt(shape[-1]))).astype(np.float32)
        return values

    tensors = {
        "model.embed_tokens.weight": weight(vocabulary, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": weight(HEADS * WIDTH, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": weight(KV_HEADS * WIDTH, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": weight(KV_HEADS * WIDTH, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": weight(HIDDEN, HEADS * WIDTH),
            f"{prefix}mlp.gate_proj.weight": weight(INNER, HIDDEN),
            f"{prefix}mlp.up_proj.weight": weight(INNER, HIDDEN),
            f"{prefix}mlp.down_proj.weight": weight(HIDDEN, INNER),
            f"{prefix}input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    save_file(tensors, folder / "model.safetensors")
    return folder
