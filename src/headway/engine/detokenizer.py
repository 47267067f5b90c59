"""Token ids to text, piece by piece: never half a character, and the same text for any chunking."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

_REPLACEMENT_DECODER = codecs.getincrementaldecoder("utf-8")


class TokenBytes(Protocol):
    """What a Detokenizer needs of a Tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's own bytes."""
        ...


class Detokenizer:
    """Decodes one sequence as it grows.

    The joined pieces are ``b"".join(bytes of each token).decode("utf-8", "replace")`` of the whole sequence. Bytes that
    may still become a character wait for the next token; ``flush`` gives up on them (U+FFFD).
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        *,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
        strip_first_space: bool = False,
    ) -> None:
        """Decode what follows the tokens ``after`` (the prompt).

        Where the prompt ends inside a character, the answer's first bytes complete it, and the character belongs to
        the answer: prompt and answer together lose nothing. ``strip_first_space`` drops one space in front, as
        SentencePiece vocabularies do for a text of its own (not for the continuation of a prompt).
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _REPLACEMENT_DECODER("replace")
        self._strip = strip_first_space
        tail = unfinished(b"".join(tokenizer.token_bytes(i) for i in after[-4:]))
        self._decoder.decode(tail)

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete."""
        skipped = self._skipped
        raw = b"".join([self._tokenizer.token_bytes(index) for index in token_ids if index not in skipped])
        return self._shown(self._decoder.decode(raw))

    def flush(self) -> str:
        """Return what is left: U+FFFD where the sequence ends inside a character."""
        return self._shown(self._decoder.decode(b"", True))

    def _shown(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def unfinished(raw: bytes) -> bytes:
    """Return the bytes at the end that begin a UTF-8 character without completing it."""
    decoder = _REPLACEMENT_DECODER("replace")
    decoder.decode(raw)
    return decoder.getstate()[0]


def decode_all(tokenizer: TokenBytes, token_ids: Iterable[int], *, skip_special_tokens: bool, strip: bool) -> str:
    """Return the text of a whole sequence: what a Detokenizer gives in any number of pieces."""
    whole = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, strip_first_space=strip)
    return whole.feed(token_ids) + whole.flush()
