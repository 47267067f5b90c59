from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.detokenizer import Detokenizer, unfinished
from headway.engine.tokenizer import Tokenizer
from tests.engine import tiny

_TOKENIZERS = {"bpe": tiny.bpe, "spm": tiny.spm}


def _chunks(items: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(items) + 1) for cut in cuts), len(items)]
    return [items[start:end] for start, end in itertools.pairwise(edges)]


def _pieces(tokenizer: Tokenizer, chunks: list[list[int]], **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.feed(chunk) for chunk in chunks), detokenizer.flush()]


@pytest.mark.parametrize("name", _TOKENIZERS)
@settings(deadline=None)
@given(data=st.data())
def test_same_text_for_any_chunking(name: str, data: st.DataObject) -> None:
    tokenizer = _TOKENIZERS[name]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocabulary_size + 1), max_size=20))
    cuts = data.draw(st.lists(st.integers(0, 20), max_size=8))
    skip = data.draw(st.booleans())
    pieces = _pieces(tokenizer, _chunks(ids, cuts), skip_special_tokens=skip)
    shown = [index for index in ids if not (skip and index in tokenizer.special_ids)]
    whole = b"".join(map(tokenizer.token_bytes, shown)).decode("utf-8", "replace")
    assert "".join(pieces) == whole
    assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None)
@given(text=st.text(max_size=20), cuts=st.lists(st.integers(0, 80), max_size=20))
def test_no_half_character_of_a_text_in_single_bytes(text: str, cuts: list[int]) -> None:
    pieces = _pieces(tiny.bpe(), _chunks(tiny.byte_ids(text), cuts))
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 10**6), max_size=20), skip=st.booleans())
def test_equals_the_tokenizers_library_on_whole_characters(ids: list[int], skip: bool) -> None:
    tokenizer = tiny.bpe()
    ids = [index % tokenizer.vocabulary_size for index in ids]
    reference = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == reference


@settings(deadline=None)
@given(text=st.text(st.sampled_from("helo wrd the中é€\n"), max_size=30))
def test_sentencepiece_decode_equals_the_tokenizers_library(text: str) -> None:
    tokenizer = tiny.spm()
    ids = tokenizer.encode(text)
    for skip in (False, True):
        assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_family_emoji_comes_in_whole_characters() -> None:
    family = "👨‍👩‍👧"
    detokenizer = Detokenizer(tiny.bpe())
    pieces = [detokenizer.feed([index]) for index in tiny.byte_ids(family)]
    assert [piece for piece in pieces if piece] == list(family)


def test_an_unfinished_character_waits_and_is_replaced_at_the_end() -> None:
    detokenizer = Detokenizer(tiny.bpe())
    assert detokenizer.feed(tiny.byte_ids("a€")[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize(("text", "first"), [("so €5", 3), ("so 👨5", 3), ("👨5", 0)])
def test_a_character_begun_by_the_prompt_is_whole_in_the_answer(text: str, first: int) -> None:
    ids = tiny.byte_ids(text)
    for cut in range(first + 1, len(ids) - 1):
        detokenizer = Detokenizer(tiny.bpe(), after=ids[:cut])
        assert detokenizer.feed(ids[cut:]) + detokenizer.flush() == text[first:]


def test_without_the_prompt_such_bytes_are_replaced() -> None:
    detokenizer = Detokenizer(tiny.bpe())
    assert detokenizer.feed(tiny.byte_ids("€5")[1:]) == "\ufffd\ufffd5"


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [1, *tiny.byte_ids("hi"), 2]
    assert _pieces(tiny.bpe(), [ids]) == ["hi", ""]
    assert _pieces(tiny.bpe(), [ids], skip_special_tokens=False) == ["<|im_start|>hi<|im_end|>", ""]


def test_only_a_text_of_its_own_loses_its_first_space() -> None:
    hello = tiny.spm().encode("hello", add_special_tokens=False)
    assert _pieces(tiny.spm(), [hello]) == [" hello", ""]
    assert _pieces(tiny.spm(), [hello], strip_first_space=True) == ["hello", ""]
    assert _pieces(tiny.spm(), [hello, hello], strip_first_space=True) == ["hello", " hello", ""]
    assert tiny.spm().decode(hello) == "hello"


@pytest.mark.parametrize(
    ("raw", "tail"),
    [
        (b"", b""),
        (b"abc", b""),
        ("€".encode(), b""),
        (b"a\xe2\x82", b"\xe2\x82"),
        (b"\xf0\x9f\x91", b"\xf0\x9f\x91"),
        (b"\xff", b""),
    ],
)
def test_unfinished(raw: bytes, tail: bytes) -> None:
    assert unfinished(raw) == tail
