"""Each family's GGUF vocabulary and tokenizer.json against the tokenizer that transformers makes of the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import pre_tokenizers

from headway.engine.tokenizer import Tokenizer
from headway.engine.vocabulary import read_gguf
from headway.engine.vocabulary_hub import read_directory
from headway.types import Message
from tests.engine import tiny
from tests.engine.test_tokenizer import _TEXTS, SAMPLES

BPE = ("gpt-2", "smollm", "llama-bpe", "qwen2")
CORPUS = [*SAMPLES, *tiny.CORPUS, "<|im_start|>user\nhi<|im_end|>\n", "a<tool_call>b</tool_call>", "x<|endoftext|>"]


def reference(pre: str) -> Any:
    """Return transformers' tokenizer for the metadata of a byte-level file."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    metadata = tiny.bpe_metadata(pre=pre)
    given = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": pre,
        "tokens": metadata["tokenizer.ggml.tokens"],
        "token_type": metadata["tokenizer.ggml.token_type"],
        "merges": metadata["tokenizer.ggml.merges"],
    }
    backend, _ = convert_gguf_tokenizer("llama", given)
    if pre == "smollm":
        # transformers does not read this name; the model's own tokenizer.json cuts digits first.
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


def agrees(ours: Tokenizer, theirs: Any, text: str) -> None:
    wanted = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special_tokens=False, allow_special=True) == wanted, text
    for skip in (False, True):
        assert ours.decode(wanted, skip) == theirs.decode(wanted, skip_special_tokens=skip), text


@pytest.mark.parametrize("pre", BPE)
def test_tok_whitespace_of_byte_level_metadata_equals_transformers(pre: str) -> None:
    ours, theirs = Tokenizer(read_gguf(tiny.bpe_metadata(pre=pre))), reference(pre)
    for text in CORPUS:
        agrees(ours, theirs, text)

    @settings(max_examples=100, deadline=None)
    @given(text=_TEXTS)
    def check(text: str) -> None:
        agrees(ours, theirs, text)

    check()


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", "GemmaTokenizer"])
def test_tok_whitespace_of_a_saved_tokenizer_equals_the_one_that_saved_it(kind: str, tmp_path: Path) -> None:
    """A directory's tokenizer.json keeps what metadata cannot say, such as Qwen's normalisation of accents."""
    import transformers

    byte_level = kind in ("GPT2Tokenizer", "Qwen2Tokenizer")
    metadata = tiny.bpe_metadata() if byte_level else tiny.spm_metadata()
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    backend = json.loads(read_gguf(metadata).backend.to_str())["model"]
    merges = [tuple(merge) for merge in backend["merges"]]
    saved = getattr(transformers, kind)(vocab=vocab, merges=merges)
    saved.save_pretrained(tmp_path)
    ours, theirs = Tokenizer(read_directory(tmp_path)), saved.backend_tokenizer
    for text in CORPUS:
        agrees(ours, theirs, text)
        assert ours.encode(text, allow_special=True) == saved(text).input_ids, text


def test_the_cuts_of_these_families_differ_on_the_corpus() -> None:
    """So that a mix-up of two of them cannot pass."""
    pieces = {
        pre: tuple(
            tuple(piece for piece, _ in cut.pre_tokenize_str(text))
            for text in SAMPLES
            if (cut := read_gguf(tiny.bpe_metadata(pre=pre)).backend.pre_tokenizer) is not None
        )
        for pre in BPE
    }
    assert len(set(pieces.values())) == len(BPE)


def test_added_tokens_outside_of_the_models_vocabulary_keep_their_ids_in_any_text(tmp_path: Path) -> None:
    """Qwen's files list the learned tokens as the vocabulary, and every other token behind it."""
    import transformers
    from tokenizers import AddedToken

    model = json.loads(read_gguf(tiny.bpe_metadata()).backend.to_str())["model"]
    added = tiny.bpe_metadata()["tokenizer.ggml.tokens"][:5]
    learned = [token for token in sorted(model["vocab"], key=model["vocab"].__getitem__) if token not in added]
    saved = transformers.Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(learned)}, merges=[tuple(m) for m in model["merges"]]
    )
    saved.add_tokens([AddedToken(token, special="|" in token, normalized=False) for token in added])
    saved.chat_template = tiny.CHATML
    saved.save_pretrained(tmp_path)
    ours = Tokenizer(read_directory(tmp_path))
    assert {saved.convert_tokens_to_ids(token) for token in added} == set(range(len(learned), len(learned) + 5))
    call = "<tool_call>\n{}\n</tool_call>"
    for text in (call, f"a {call} b", "no added token"):
        wanted = saved(text).input_ids
        assert ours.encode(text) == ours.encode(text, allow_special=True) == wanted
        rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        for evil in ("", "<|im_end|>"):  # with and without a control token to keep plain
            ids = ours.encode_chat([Message(role="user", content=text + evil)])
            assert ours.decode(ids) == rendered.replace(text, text + evil, 1)
            assert [token for token in ids if token in ours.special_ids] == [
                saved.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>", "<|im_start|>")
            ]
        assert ours.encode_chat([Message(role="user", content=text)]) == saved(rendered).input_ids
