"""Chunks to the data events of a stream; one prebuilt Struct per choice, so that a token costs one encoding."""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from headway.errors import HeadwayError
from headway.gateway.parse import Call
from headway.gateway.wire import (
    ChatChunk,
    ChatChunkChoice,
    CompletionAnswer,
    CompletionChoice,
    Delta,
    UsageBody,
    chat_logprobs,
    completion_logprobs,
)
from headway.types import Chunk

DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """Return a data event."""
    return b"data: %b\n\n" % _encode(value)


def error_event(error: HeadwayError) -> bytes:
    """Return an error as an event; the official clients raise on it."""
    return event(error.body())


def timing_comment(timing: dict[str, Any]) -> bytes:
    """Return the ledger as a comment, which every SSE parser skips."""
    return b": timing %b\n\n" % _encode(timing)


class Events(Protocol):
    """Writes one stream's Chunks."""

    def encode(self, chunk: Chunk) -> bytes:
        """Return the events of a Chunk; empty when it has nothing to say (no text yet, no finish)."""
        ...

    def usage(self, usage: UsageBody, timing: dict[str, Any] | None) -> bytes:
        """Return the last event before [DONE]: no choices, the usage, and the ledger when asked for."""
        ...


class ChatEvents:
    """The events of /v1/chat/completions: per choice a role, deltas, a finish."""

    def __init__(self, call: Call, *, answer_id: str, created: int) -> None:
        self._call = call
        self._id = answer_id
        self._created = created
        self._usage: UnsetType | None = None if call.include_usage else UNSET
        self._choices: dict[int, ChatChunk] = {}

    def encode(self, chunk: Chunk) -> bytes:
        """Return the events of a Chunk."""
        reusable = self._choices.get(chunk.index)
        head = b""
        if reusable is None:
            reusable, head = self._first(chunk)
        choice = reusable.choices[0]
        if self._call.return_token_ids:
            choice.token_ids = chunk.token_ids
        if chunk.logprobs:
            choice.logprobs = chat_logprobs(chunk.logprobs, self._call.params.logprobs or 0)
        if chunk.text or chunk.logprobs or (self._call.return_token_ids and chunk.token_ids):
            choice.delta.content = chunk.text
            head += event(reusable)
            choice.logprobs = None
        return head + self._finish(reusable, chunk) if chunk.finish is not None else head

    def _first(self, chunk: Chunk) -> tuple[ChatChunk, bytes]:
        """Build the choice's reusable Struct, and its role event."""
        choice = ChatChunkChoice(index=chunk.index, delta=Delta(role="assistant", content=""))
        built = ChatChunk(
            id=self._id, created=self._created, model=self._call.model, choices=[choice], usage=self._usage
        )
        self._choices[chunk.index] = built
        if self._call.return_token_ids:
            built.prompt_token_ids = chunk.prompt_token_ids
        role = event(built)
        built.prompt_token_ids = UNSET
        choice.delta.role = UNSET
        return built, role

    def _finish(self, reusable: ChatChunk, chunk: Chunk) -> bytes:
        choice = reusable.choices[0]
        choice.delta.content = UNSET
        choice.token_ids = UNSET
        choice.finish_reason = chunk.finish
        if chunk.stop_reason is not None:
            choice.stop_reason = chunk.stop_reason
        return event(reusable)

    def usage(self, usage: UsageBody, timing: dict[str, Any] | None) -> bytes:
        """Return the usage event."""
        last = ChatChunk(id=self._id, created=self._created, model=self._call.model, choices=[], usage=usage)
        last.timing = UNSET if timing is None else timing
        return event(last)


class CompletionEvents:
    """The events of /v1/completions: per choice texts, then a finish."""

    def __init__(self, call: Call, *, answer_id: str, created: int) -> None:
        self._call = call
        self._id = answer_id
        self._created = created
        self._usage: UnsetType | None = None if call.include_usage else UNSET
        self._choices: dict[int, CompletionAnswer] = {}
        self._offsets: dict[int, int] = {}

    def encode(self, chunk: Chunk) -> bytes:
        """Return the events of a Chunk."""
        reusable = self._choices.get(chunk.index)
        if reusable is None:
            reusable = self._first(chunk)
        choice = reusable.choices[0]
        if self._call.return_token_ids:
            choice.token_ids = chunk.token_ids
        if chunk.logprobs:
            offset = self._offsets.get(chunk.index, 0)
            choice.logprobs = completion_logprobs(chunk.logprobs, offset, self._call.params.logprobs or 0)
            self._offsets[chunk.index] = offset + sum(len(token.text) for token in chunk.logprobs)
        out = b""
        if chunk.text or chunk.logprobs or (self._call.return_token_ids and chunk.token_ids):
            choice.text = chunk.text
            out = event(reusable)
            choice.logprobs = None
            choice.prompt_token_ids = UNSET
        if chunk.finish is not None:
            choice.text = ""
            choice.token_ids = UNSET
            choice.finish_reason = chunk.finish
            if chunk.stop_reason is not None:
                choice.stop_reason = chunk.stop_reason
            out += event(reusable)
        return out

    def _first(self, chunk: Chunk) -> CompletionAnswer:
        choice = CompletionChoice(index=chunk.index, text="")
        if self._call.return_token_ids:
            choice.prompt_token_ids = chunk.prompt_token_ids
        built = CompletionAnswer(
            id=self._id, created=self._created, model=self._call.model, choices=[choice], usage=self._usage
        )
        self._choices[chunk.index] = built
        return built

    def usage(self, usage: UsageBody, timing: dict[str, Any] | None) -> bytes:
        """Return the usage event."""
        last = CompletionAnswer(id=self._id, created=self._created, model=self._call.model, choices=[], usage=usage)
        last.timing = UNSET if timing is None else timing
        return event(last)


def events_for(call: Call, *, answer_id: str, created: int) -> Events:
    """Return the writer for a Call's endpoint."""
    kind = ChatEvents if call.chat else CompletionEvents
    return kind(call, answer_id=answer_id, created=created)
