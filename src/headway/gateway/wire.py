"""The answers of the OpenAI wire, as Structs: written by one encoder, described by /openapi.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from headway.types import ModelCard, TokenLogprob, Usage

_LOWEST: Final = -9999.0
"""JSON has no infinity; OpenAI writes this for a token that cannot come."""


class PromptDetails(msgspec.Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int = 0


class UsageBody(msgspec.Struct, kw_only=True):
    """Tokens of one answer, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage_body(usages: Iterable[Usage]) -> UsageBody:
    """Return the sum of several requests' usage."""
    prompt = completion = cached = 0
    for usage in usages:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        cached += usage.cached_tokens
    return UsageBody(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached),
    )


class Alternative(msgspec.Struct):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct):
    """A token that came."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat's tokens."""

    content: list[ChatToken]
    refusal: None = None


def chat_logprobs(tokens: Sequence[TokenLogprob], count: int) -> ChatLogprobs:
    """Return the chat form; ``count`` alternatives per token."""
    return ChatLogprobs(
        [
            ChatToken(
                token.text,
                max(token.logprob, _LOWEST),
                list(token.raw),
                [Alternative(other.text, max(other.logprob, _LOWEST), list(other.raw)) for other in token.top[:count]],
            )
            for token in tokens
        ]
    )


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion's tokens, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int, count: int) -> CompletionLogprobs:
    """Return the completion form; the first token's text starts at ``offset`` (characters)."""
    out = CompletionLogprobs([], [], [], [])
    for token in tokens:
        out.tokens.append(token.text)
        out.text_offset.append(offset)
        offset += len(token.text)
        if token.logprob != token.logprob:
            # Not a number: the first token of an echoed prompt, which nothing came before.
            out.token_logprobs.append(None)
            out.top_logprobs.append(None)
            continue
        out.token_logprobs.append(max(token.logprob, _LOWEST))
        best = {other.text: max(other.logprob, _LOWEST) for other in reversed(token.top[:count])}
        # The chosen token is always among them, as OpenAI does it.
        out.top_logprobs.append({**best, token.text: max(token.logprob, _LOWEST)})
    return out


def extend(into: CompletionLogprobs, more: CompletionLogprobs) -> None:
    """Append the lists of ``more``."""
    into.tokens += more.tokens
    into.token_logprobs += more.token_logprobs
    into.top_logprobs += more.top_logprobs
    into.text_offset += more.text_offset


class Delta(msgspec.Struct, kw_only=True):
    """What is new in a chat choice."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One choice's part of a chat chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """A data event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    timing: dict[str, Any] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice of a completion, or one choice's part of its stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """A completion, or a data event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    timing: dict[str, Any] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, kw_only=True):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    timing: dict[str, Any] | UnsetType = UNSET


def prompt_logprobs_body(tokens: Sequence[TokenLogprob | None], count: int) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: per prompt token {token id: {logprob, decoded_token}}; none for the first."""
    rows: list[dict[str, Any] | None] = []
    for token in tokens:
        if token is None or token.logprob != token.logprob:
            rows.append(None)
            continue
        rows.append(
            {
                str(each.token_id): {"logprob": max(each.logprob, _LOWEST), "decoded_token": each.text}
                for each in (*token.top[:count], token)
            }
        )
    return rows


class ModelBody(msgspec.Struct, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headway"
    max_model_len: int
    architecture: str
    kernels: str


class ModelList(msgspec.Struct, kw_only=True):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[ModelBody]


def model_body(card: ModelCard) -> ModelBody:
    """Return the wire form of a model card."""
    return ModelBody(
        id=card.name,
        created=card.created,
        max_model_len=card.context_tokens,
        architecture=card.architecture,
        kernels=card.kernels,
    )


class Tokens(msgspec.Struct, kw_only=True):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: Sequence[int]


class Detokenized(msgspec.Struct, kw_only=True):
    """The answer of /detokenize."""

    prompt: str


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The shape of every refusal."""

    error: ErrorDetail
