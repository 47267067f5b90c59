"""Chunks to one body."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET, UnsetType

from headway.gateway.parse import Call
from headway.gateway.wire import (
    ChatAnswer,
    ChatChoice,
    ChatMessage,
    CompletionAnswer,
    CompletionChoice,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs_body,
    usage_body,
)
from headway.telemetry.budget import Ledger
from headway.types import Chunk, Finish, TokenLogprob, Usage


class Choice(msgspec.Struct):
    """One choice as its Chunks come in."""

    index: int
    texts: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish: Finish | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)


class Collected(msgspec.Struct):
    """All that the backend sent."""

    choices: list[Choice]
    usages: list[Usage]


async def collect(chunks: AsyncGenerator[Chunk, None], count: int, ledger: Ledger) -> Collected:
    """Read all Chunks of ``count`` choices; the first content counts as delivered when it arrives here."""
    out = Collected([Choice(index) for index in range(count)], [])
    async for chunk in chunks:
        choice = out.choices[chunk.index]
        if chunk.text:
            choice.texts.append(chunk.text)
            if ledger.first_content is None:
                ledger.deliver()
        choice.token_ids.extend(chunk.token_ids)
        choice.logprobs.extend(chunk.logprobs)
        if chunk.prompt_token_ids:
            choice.prompt_token_ids = chunk.prompt_token_ids
        if chunk.prompt_logprobs:
            choice.prompt_logprobs = chunk.prompt_logprobs
        if chunk.finish is not None:
            choice.finish, choice.stop_reason = chunk.finish, chunk.stop_reason
        if chunk.usage is not None:
            out.usages.append(chunk.usage)
    ledger.last_chunk()
    return out


def answer(call: Call, collected: Collected, *, answer_id: str, created: int) -> ChatAnswer | CompletionAnswer:
    """Return the body of the Call's endpoint."""
    usage = usage_body(collected.usages)
    if not call.chat:
        return CompletionAnswer(
            id=answer_id,
            created=created,
            model=call.model,
            choices=[_completion_choice(call, choice) for choice in collected.choices],
            usage=usage,
        )
    first = collected.choices[0]
    out = ChatAnswer(
        id=answer_id,
        created=created,
        model=call.model,
        choices=[_chat_choice(call, choice) for choice in collected.choices],
        usage=usage,
    )
    if call.return_token_ids:
        out.prompt_token_ids = first.prompt_token_ids
    if call.params.prompt_logprobs is not None:
        out.prompt_logprobs = prompt_logprobs_body(first.prompt_logprobs, call.params.prompt_logprobs)
    return out


def _chat_choice(call: Call, choice: Choice) -> ChatChoice:
    count = call.params.logprobs
    return ChatChoice(
        index=choice.index,
        message=ChatMessage(content=choice.text),
        logprobs=None if count is None else chat_logprobs(choice.logprobs, count),
        finish_reason=choice.finish,
        stop_reason=_stop_reason(choice),
        token_ids=choice.token_ids if call.return_token_ids else UNSET,
    )


def _completion_choice(call: Call, choice: Choice) -> CompletionChoice:
    count = call.params.logprobs
    out = CompletionChoice(
        index=choice.index,
        text=choice.text,
        logprobs=None if count is None else completion_logprobs(choice.logprobs, 0, count),
        finish_reason=choice.finish,
        stop_reason=_stop_reason(choice),
    )
    if call.return_token_ids:
        out.token_ids, out.prompt_token_ids = choice.token_ids, choice.prompt_token_ids
    if call.params.prompt_logprobs is not None and not call.echo:
        out.prompt_logprobs = prompt_logprobs_body(choice.prompt_logprobs, call.params.prompt_logprobs)
    return out


def _stop_reason(choice: Choice) -> str | int | UnsetType:
    return UNSET if choice.stop_reason is None else choice.stop_reason
