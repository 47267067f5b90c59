"""One Call's Requests run together, and their Chunks come out as one sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import msgspec

from headway.gateway.parse import Call
from headway.gateway.stage import Next
from headway.types import Backend, Chunk, Request, TokenLogprob

_AHEAD: Final = 64
"""Chunks buffered when several prompts answer faster than the client reads."""


def run(call: Call, pipeline: Next, backend: Backend) -> AsyncGenerator[Chunk, None]:
    """Yield the Chunks of all prompts; choice ``c`` of prompt ``p`` has the index ``p * n + c``."""
    sources = [_echoed(request, pipeline, backend) if call.echo else pipeline(request) for request in call.requests]
    return sources[0] if len(sources) == 1 else _merge(sources, call.params.n)


async def _merge(sources: list[AsyncGenerator[Chunk, None]], n: int) -> AsyncGenerator[Chunk, None]:
    queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue(_AHEAD)

    async def pump(place: int, source: AsyncGenerator[Chunk, None]) -> None:
        try:
            async with aclosing(source) as chunks:
                async for chunk in chunks:
                    await queue.put(msgspec.structs.replace(chunk, index=place * n + chunk.index))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(place, source)) for place, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Chunk):
                yield item
            else:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _echoed(request: Request, pipeline: Next, backend: Backend) -> AsyncGenerator[Chunk, None]:
    """Put the prompt's text (and its log-probabilities, when asked for) in front of every choice."""
    text = request.text if request.text is not None else await backend.detokenize(request.token_ids or ())
    begun: set[int] = set()
    async with aclosing(pipeline(request)) as chunks:
        async for chunk in chunks:
            if chunk.index in begun:
                yield chunk
                continue
            begun.add(chunk.index)
            logprobs = chunk.logprobs
            if request.params.logprobs is not None:
                logprobs = (*await _prompt_logprobs(chunk, backend), *logprobs)
            yield msgspec.structs.replace(chunk, text=text + chunk.text, logprobs=logprobs)


async def _prompt_logprobs(chunk: Chunk, backend: Backend) -> list[TokenLogprob]:
    """Return the prompt's tokens; the first has no probability, which not-a-number stands for."""
    out: list[TokenLogprob] = []
    for token_id, token in zip(chunk.prompt_token_ids, chunk.prompt_logprobs, strict=False):
        if token is None:
            piece = await backend.detokenize((token_id,))
            token = TokenLogprob(token_id=token_id, logprob=float("nan"), text=piece, raw=piece.encode())
        out.append(token)
    return out
