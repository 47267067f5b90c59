"""Tiny vocabularies for tests: a byte-level one, trained on a few lines, and a SentencePiece one, written by hand."""

from __future__ import annotations

import functools
import json
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from headway.engine.tokenizer import Tokenizer
from headway.engine.vocabulary import read_gguf

CORPUS = (
    "the quick brown fox jumps over the lazy dog. The end of the END, and then the stop!\n\n",
    "def hello(name):\n    return f'hello {name}'\n" * 3,
    "中文测试 日本語 한국어 👨‍👩‍👧 é ü\n" * 3,
    "User: hi\nAssistant: hello there, how are you?\n\nUser: bye\n" * 3,
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def _trained() -> dict[str, Any]:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    model: dict[str, Any] = json.loads(backend.to_str())["model"]
    return model


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    """Return GGUF metadata of a byte-level vocabulary: three control tokens, two user-defined, the rest."""
    model = _trained()
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*added, *learned],
        "tokenizer.ggml.token_type": [3, 3, 3, 4, 4] + [1] * len(learned),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }
    return _changed(metadata, changes)


_PIECES = [
    *("▁", "▁t", "he", "▁the", "▁a", "h", "e", "l", "o", "▁h", "▁he", "ll", "llo", "▁hello", "▁w", "or", "▁wor", "ld"),
    *("▁world", "w", "r", "d", "t", "a", "in", "s", ".", ",", "\n", "é", "中"),
]


def spm_metadata(**changes: Any) -> dict[str, Any]:
    """Return GGUF metadata of a SentencePiece vocabulary with byte tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *_PIECES]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(_PIECES))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(_PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return _changed(metadata, changes)


def _changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Apply changes by short name (``pre`` is ``tokenizer.ggml.pre``); None removes the key."""
    for name, value in changes.items():
        key = name.replace("__", ".") if "__" in name else f"tokenizer.ggml.{name}"
        if value is None:
            metadata.pop(key, None)
        else:
            metadata[key] = value
    return metadata


@functools.cache
def bpe() -> Tokenizer:
    """Return the byte-level tokenizer."""
    return Tokenizer(read_gguf(bpe_metadata()))


@functools.cache
def spm() -> Tokenizer:
    """Return the SentencePiece tokenizer."""
    return Tokenizer(read_gguf(spm_metadata()))


def byte_ids(text: str) -> list[int]:
    """Return a text as byte-level tokens of one byte each."""
    tokenizer = bpe()
    of_byte = {tokenizer.token_bytes(index): index for index in range(tokenizer.vocabulary_size)}
    return [of_byte[bytes((byte,))] for byte in text.encode()]
