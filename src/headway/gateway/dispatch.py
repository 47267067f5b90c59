"""The hand-over to the backend: from here on the engine's own instants fill the ledger."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from headway.errors import EngineDied
from headway.gateway.stage import Next
from headway.telemetry.budget import Ledgers
from headway.types import Chunk, Request


class Dispatch:
    """The innermost stage: starts ``queue``, counts tokens, and lets no answer end without a finish per choice."""

    name = "queue"

    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers

    async def __call__(self, request: Request, then: Next) -> AsyncGenerator[Chunk, None]:
        """Yield the backend's Chunks; raises EngineDied when they stop without having finished."""
        ledger = self._ledgers.get(request.id)
        assert ledger is not None
        ledger.dispatch()
        unfinished = set(range(request.params.n))
        prompt = output = 0
        try:
            async with aclosing(then(request)) as chunks:
                async for chunk in chunks:
                    output += len(chunk.token_ids)
                    prompt = len(chunk.prompt_token_ids) or prompt
                    if chunk.timing is not None:
                        ledger.engine(chunk.timing)
                    if chunk.finish is not None:
                        unfinished.discard(chunk.index)
                    if chunk.usage is not None:
                        prompt, output = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
                        ledger.cached_tokens = max(ledger.cached_tokens, chunk.usage.cached_tokens)
                    yield chunk
        finally:
            # Also when cut short: what was generated is counted.
            ledger.prompt_tokens += prompt
            ledger.tokens += output
        if unfinished:
            raise EngineDied(f"the answer of request {request.id!r} ended without a finish reason")
