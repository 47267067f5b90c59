"""A GGUF file's SentencePiece vocabulary (scores, no merges) against the sentencepiece library itself."""

from __future__ import annotations

import io
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.tokenizer import Tokenizer
from headway.engine.vocabulary import TokenType, read_gguf
from tests.engine import tiny
from tests.engine.test_tokenizer import SAMPLES


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Tokenizer]:
    """A vocabulary trained as Llama's was, as the library has it and as a GGUF file would tell it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*tiny.CORPUS, *SAMPLES] * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=520,
        byte_fallback=True,
        split_digits=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=request.param,
        minloglevel=2,
    )
    library = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(library.get_piece_size())

    def kind(index: int) -> TokenType:
        if library.is_unknown(index):
            return TokenType.UNKNOWN
        if library.is_control(index):
            return TokenType.CONTROL
        return TokenType.BYTE if library.is_byte(index) else TokenType.NORMAL

    metadata = tiny.spm_metadata(
        tokens=[library.id_to_piece(index) for index in ids],
        scores=[library.get_score(index) for index in ids],
        token_type=[int(kind(index)) for index in ids],
        add_space_prefix=request.param,
    )
    return library, Tokenizer(read_gguf(metadata))


_TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), st.sampled_from(" \n\tabtheln1'中é▁")),
    max_size=40,
)


def agrees(library: Any, tokenizer: Tokenizer, text: str) -> None:
    """Assert that ids and text are the library's.

    A text that begins with a space gets no second one in front, as transformers has it for these files: only the
    library and tokenizers of the first Llama add one.
    """
    if tokenizer._vocabulary.strip_first_space and text.startswith((" ", "▁")):
        return
    wanted = library.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == wanted, text
    assert tokenizer.encode(text) == [1, *wanted], text
    assert tokenizer.decode(wanted) == library.decode(wanted), text


def test_ids_and_texts_equal_the_librarys(pair: tuple[Any, Tokenizer]) -> None:
    for text in SAMPLES:
        agrees(*pair, text)


def test_random_texts_give_the_librarys_ids(pair: tuple[Any, Tokenizer]) -> None:
    @settings(max_examples=300, deadline=None)
    @given(text=_TEXTS)
    def check(text: str) -> None:
        agrees(*pair, text)

    check()


def test_ids_equal_those_of_transformers_reader_of_gguf(pair: tuple[Any, Tokenizer]) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer

    library, tokenizer = pair
    if not tokenizer._vocabulary.strip_first_space:
        pytest.skip("transformers does not read add_space_prefix")
    ids = range(library.get_piece_size())
    reference, _ = convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": "llama",
            "tokens": [library.id_to_piece(index) for index in ids],
            "scores": [library.get_score(index) for index in ids],
        },
    )

    @settings(max_examples=300, deadline=None)
    @given(text=_TEXTS)
    def check(text: str) -> None:
        wanted = reference.encode(text, add_special_tokens=False).ids
        # The reference takes control tokens that are spelled in a text for such.
        assert tokenizer.encode(text, add_special_tokens=False, allow_special=True) == wanted
        assert tokenizer.decode(wanted) == reference.decode(wanted, skip_special_tokens=False)

    check()
    for text in SAMPLES:
        wanted = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False, allow_special=True) == wanted
