"""Text to token ids and back, for one model; made from a GGUF file's metadata or a Hugging Face directory."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken

from headway.engine.control import ControlTokens
from headway.engine.detokenizer import decode_all
from headway.engine.template import ChatTemplate, plain_messages, strings_in
from headway.engine.vocabulary import Kind, Vocabulary, read_gguf
from headway.engine.vocabulary_hub import read_directory
from headway.errors import InvalidRequest, TemplateError
from headway.models.checkpoint import Checkpoint
from headway.types import JsonObject, Message

_log = logging.getLogger(__name__)


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer that a checkpoint holds; CheckpointError says what is wrong with it."""
    if checkpoint.metadata:
        return Tokenizer(read_gguf(checkpoint.metadata))
    return Tokenizer(read_directory(checkpoint.path))


class Tokenizer:
    """One model's vocabulary and chat template. Safe to call from several threads; encoding releases the GIL."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._backend = vocabulary.backend
        added: dict[int, AddedToken] = self._backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = vocabulary.special_ids
        self._control = ControlTokens(self._backend, added, self.special_ids)
        self._literal = {index: token.content.encode() for index, token in added.items()}
        self._bytes: dict[int, bytes] = {}
        self._fingerprint = ""
        self._lock = threading.Lock()
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.chat: ChatTemplate | None = None
        self._no_chat = (
            "This model has no chat template (it is a base model); send a prompt to /v1/completions instead."
        )
        if vocabulary.templates:
            try:
                self.chat = ChatTemplate(
                    vocabulary.templates,
                    bos_token=self._spelling(vocabulary.bos_id),
                    eos_token=self._spelling(vocabulary.eos_id),
                )
            except TemplateError as error:  # raw prompts need no template: the model serves them all the same
                self._no_chat = error.message
                _log.warning("conversations will be refused: %s", error.message)
            else:
                self._control.widen(self.chat.literals)

    @property
    def vocabulary_size(self) -> int:
        """One more than the greatest id; a model may have more rows than this (padding)."""
        return len(self._vocabulary.tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Return the ids of a text, with BOS and EOS as the model wants them if ``add_special_tokens``.

        Control tokens spelled in the text count as such only if ``allow_special`` (raw prompts), else as plain text.
        """
        _refuse_surrogates(text)
        if allow_special:
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return ids
        return self._control.encode(text, all_plain=True, add_special_tokens=add_special_tokens)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of a conversation; control tokens come from the template alone.

        InvalidRequest names the message that the template cannot render, or says that there is no template, or why it
        was refused.
        """
        if self.chat is None:
            raise InvalidRequest(self._no_chat, param="messages")
        plain = plain_messages(messages)
        texts = list(strings_in([plain, list(tools)]))
        for text in texts:
            _refuse_surrogates(text)
        marks = self._control.marks_for(texts)
        if marks is None:
            rendered = self.chat.render(plain, tools, add_generation_prompt)
            return self.encode(rendered, add_special_tokens=False, allow_special=True)
        roles = [message["role"] for message in plain]
        marked: list[dict[str, Any]] = marks.mark(plain)
        # Roles are checked words: templates compare them, so they stay as they are.
        marked = [{**message, "role": role} for message, role in zip(marked, roles, strict=True)]
        rendered = self.chat.render(marked, marks.mark(list(tools)), add_generation_prompt)
        text, no_start, no_end = marks.remove(rendered)
        return self._control.encode(text, no_start=no_start, no_end=no_end)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of a whole sequence; ids that name no token have no text."""
        return decode_all(
            self, token_ids, skip_special_tokens=skip_special_tokens, strip=self._vocabulary.strip_first_space
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's own bytes, which need not be whole characters; none where the id names no token."""
        raw = self._bytes.get(token_id)
        if raw is None:
            raw = self._spell(token_id)
            if raw:  # ids that name no token are not remembered: there is no end of them
                self._bytes[token_id] = raw
        return raw

    def token_text(self, token_id: int) -> str:
        """Return the token's own text, with U+FFFD for bytes that are no whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def fingerprint(self) -> str:
        """Return a hash of what every id means: equal for two models that can share token ids."""
        with self._lock:
            if not self._fingerprint:
                digest = hashlib.blake2b(digest_size=16)
                for index, token in enumerate(self._vocabulary.tokens):
                    if token is not None:
                        raw = self.token_bytes(index)
                        digest.update(b"%d %d %d " % (index, index in self.special_ids, len(raw)) + raw)
                self._fingerprint = digest.hexdigest()
            return self._fingerprint

    def _spelling(self, token_id: int | None) -> str:
        return "" if token_id is None else self._vocabulary.tokens[token_id] or ""

    def _spell(self, token_id: int) -> bytes:
        tokens, kind = self._vocabulary.tokens, self._vocabulary.kind
        token = tokens[token_id] if 0 <= token_id < len(tokens) else None
        if token is None:
            return b""
        if token_id in self._literal:
            return self._literal[token_id]
        if kind is Kind.BYTE_LEVEL:
            try:
                return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
            except KeyError:
                return token.encode()
        if kind is Kind.WORDPIECE:
            return token[2:].encode() if token.startswith("##") else b" " + token.encode()
        value = self._vocabulary.byte_values.get(token_id)
        return token.replace("▁", " ").encode() if value is None else bytes((value,))


def _refuse_surrogates(text: str) -> None:
    """A lone surrogate (from a JSON escape) is no character: no tokenizer has ids for it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The text holds the lone surrogate U+{ord(text[error.start]):04X} at {error.start}, which is no "
            "character; remove it."
        ) from None


def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 and following, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
