"""Stands in for the outside: a Backend that answers from a script and records what became of each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal

from headway.errors import DeadlineExceeded, HeadwayError, Overloaded
from headway.telemetry.clock import Clock, MonotonicClock
from headway.types import (
    Chunk,
    EngineTiming,
    Finish,
    Health,
    JsonObject,
    Load,
    Message,
    ModelCard,
    Request,
    TokenLogprob,
    Usage,
)

CARD = ModelCard(name="fake-1", context_tokens=2048, vocabulary=50_000, has_chat_template=True, created=1_700_000_000)

Step = Chunk | float | BaseException
"""What a script does next: yield a Chunk, sleep so many seconds, or raise."""


class FakeBackend:
    """A Backend whose tokens, delays, failures and hangs are set from outside.

    By default every choice answers ``pieces``, one token each. ``script`` replaces that with explicit steps.
    """

    def __init__(
        self,
        pieces: Sequence[str] = ("Hello", ",", " world", "!"),
        *,
        prefill_s: float = 0.0,
        between_s: float = 0.0,
        refuse: HeadwayError | None = None,
        fail_after: int | None = None,
        failure: BaseException | None = None,
        hang_after: int | None = None,
        slots: int | None = None,
        script: Callable[[Request], Sequence[Step]] | None = None,
        cards: Sequence[ModelCard] = (CARD,),
        clock: Clock | None = None,
    ) -> None:
        self.pieces = tuple(pieces)
        self.prefill_s = prefill_s
        self.between_s = between_s
        self.refuse = refuse
        self.fail_after = fail_after
        self.failure = failure or RuntimeError("a fault that nobody foresaw")
        self.hang_after = hang_after
        self.script = script
        self.cards = tuple(cards)
        self.clock = clock or MonotonicClock()
        self.health_now = Health(live=True, ready=True)
        self.load_now: Load | None = None
        self.requests: list[Request] = []
        self.ran: list[str] = []
        self.finished: list[str] = []
        self.cancelled: dict[str, str] = {}
        """Request id to the phase in which its generator was closed."""
        self.running = 0
        self.waiting = 0
        self.generated = 0
        self._waiters: set[asyncio.Task[Literal[True]]] = set()
        self._slots = asyncio.Semaphore(slots) if slots else None

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield the scripted answer."""
        self.requests.append(request)
        phase = ["queued"]
        try:
            if self.refuse is not None:
                raise self.refuse
            received = self.clock.now()
            await self._acquire(request)
            try:
                self.ran.append(request.id)
                self.running += 1
                phase[0] = "prefill"
                steps = self._scripted(request) if self.script else self._answer(request, received, phase)
                async for chunk in steps:
                    phase[0] = "decode"
                    yield chunk
            finally:
                self.running -= 1
                if self._slots is not None:
                    self._slots.release()
            self.finished.append(request.id)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled[request.id] = phase[0]
            raise

    async def _acquire(self, request: Request) -> None:
        if self._slots is None:
            return
        if not self._slots.locked():
            await self._slots.acquire()  # at once: who gets a slot has not waited
            return
        self.waiting += 1
        waiter = asyncio.create_task(self._slots.acquire())
        self._waiters.add(waiter)
        try:
            limit = None if request.deadline is None else max(0.0, request.deadline - self.clock.now())
            async with asyncio.timeout(limit):
                await waiter
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the request waited") from None
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._slots.release()
            if self.refuse is not None:
                raise self.refuse from None
            raise
        finally:
            self.waiting -= 1
            self._waiters.discard(waiter)

    async def _scripted(self, request: Request) -> AsyncGenerator[Chunk, None]:
        assert self.script is not None
        for step in self.script(request):
            if isinstance(step, Chunk):
                yield step
            elif isinstance(step, float):
                await asyncio.sleep(step)
            else:
                raise step

    async def _answer(self, request: Request, received: float, phase: list[str]) -> AsyncGenerator[Chunk, None]:
        scheduled = self.clock.now()
        await asyncio.sleep(self.prefill_s)
        prefilled = self.clock.now()
        prompt = prompt_ids(request)
        limit = request.params.max_tokens
        pieces = self.pieces if limit is None else self.pieces[:limit]
        ended = Finish.LENGTH if limit is not None and limit < len(self.pieces) else Finish.STOP
        timing = EngineTiming(
            received=received, scheduled=scheduled, prefilled=prefilled, first_token=self.clock.now(), cached_tokens=1
        )
        last = request.params.n - 1
        done = Usage(prompt_tokens=len(prompt), completion_tokens=len(pieces) * request.params.n, cached_tokens=1)
        if not pieces:
            for index in range(request.params.n):
                yield _chunk(request, index, None, 0, prompt, ended, timing, done if index == last else None)
        for place, piece in enumerate(pieces):
            if place:
                await asyncio.sleep(self.between_s)
            if self.fail_after == place:
                raise self.failure
            if self.hang_after == place:
                await asyncio.Event().wait()
            for index in range(request.params.n):
                end = ended if place == len(pieces) - 1 else None
                usage = done if end is not None and index == last else None
                self.generated += 1
                yield _chunk(request, index, piece, place, prompt, end, timing, usage)

    async def cancel(self, request_id: str, cause: str) -> None:
        """Record the wish."""
        self.cancelled.setdefault(request_id, cause)

    async def tokenize(
        self,
        *,
        text: str | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[JsonObject] = (),
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """Return one id per UTF-8 byte, with one in front for the start."""
        joined = text if text is not None else "".join(f"{m.role}:{m.content}\n" for m in messages or ())
        return ((0,) if add_special_tokens else ()) + tuple(byte + 1 for byte in joined.encode())

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Undo ``tokenize``."""
        return bytes((x - 1) % 256 for x in token_ids if x).decode(errors="replace")

    def models(self) -> tuple[ModelCard, ...]:
        """Return the cards that were given."""
        return self.cards

    def load(self) -> Load:
        """Return what was set, or the fake's own counts."""
        return self.load_now or Load(running=self.running, waiting=self.waiting, blocks_free=8)

    def health(self) -> Health:
        """Return what was set."""
        return self.health_now

    async def drain(self, limit_s: float) -> None:
        """Refuse whatever comes next and whatever waits."""
        self.refuse = Overloaded("draining", retry_after_s=limit_s)
        for waiter in self._waiters:
            waiter.cancel()

    async def close(self) -> None:
        """Do nothing."""


def prompt_ids(request: Request) -> tuple[int, ...]:
    """Return the ids that the fake takes the prompt for."""
    if request.token_ids is not None:
        return request.token_ids
    if request.text is not None:
        return tuple(byte + 1 for byte in request.text.encode())
    return tuple(range(1, 1 + 5 * len(request.messages or ())))


def logprob(token_id: int, text: str, alternatives: int) -> TokenLogprob:
    """Return a made-up log-probability with alternatives, the chosen token first."""
    top = [TokenLogprob(token_id=token_id, logprob=-0.25, text=text, raw=text.encode())]
    top += [
        TokenLogprob(token_id=token_id + i, logprob=-1.0 - i, text=f"alt{i}", raw=b"alt%d" % i)
        for i in range(1, alternatives)
    ]
    return TokenLogprob(token_id=token_id, logprob=-0.25, text=text, raw=text.encode(), top=tuple(top[:alternatives]))


def _chunk(
    request: Request,
    index: int,
    piece: str | None,
    place: int,
    prompt: tuple[int, ...],
    finish: Finish | None,
    timing: EngineTiming,
    usage: Usage | None,
) -> Chunk:
    params = request.params
    extra: dict[str, Any] = {}
    if place == 0:
        extra["prompt_token_ids"] = prompt
        extra["timing"] = timing
        if params.prompt_logprobs is not None:
            known = [logprob(x, chr((x - 1) % 128), params.prompt_logprobs) for x in prompt[1:]]
            extra["prompt_logprobs"] = (None, *known)
    if piece is not None:
        extra |= {"text": piece, "token_ids": (100 + place,)}
        if params.logprobs is not None:
            extra["logprobs"] = (logprob(100 + place, piece, params.logprobs),)
    return Chunk(index=index, finish=finish, usage=usage, **extra)
