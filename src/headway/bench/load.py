"""Sends planned requests as an open or a closed loop, and keeps a record of each and of the generator's own lag."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from headway.bench.ask import Planned, Record, Target, ask, prepare
from headway.bench.client import Connections
from headway.bench.prompts import Prompts
from headway.bench.trace import TraceRow

TICK_S: Final = 0.01
PROGRESS_S: Final = 0.5
PAUSE_S: Final = 0.1
"""A stream of a closed loop rests for so long after a request that failed: a dead server is not hammered."""


class OpenLoop(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that are sent when they are due, ordered by ``at_s``, whether or not the server keeps up."""

    requests: Iterable[Planned]


class ClosedLoop(msgspec.Struct, frozen=True, kw_only=True):
    """Streams that each send their next request when the last has ended."""

    requests: Iterable[Planned]
    concurrency: int


Plan = OpenLoop | ClosedLoop


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands; the warm-up is in it."""

    elapsed_s: float
    sent: int
    running: int
    completed: int
    refused: int
    errors: int


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run gave."""

    records: list[Record]
    """Every request, also those of the warm-up, in the order in which they ended."""
    started: float
    """The monotonic instant from which the records' seconds count."""
    seconds: float
    """The measured span: from the end of the warm-up until sending stopped and every counted request had ended."""
    loop_lag_s: list[float]
    """By how much a tick of this process's event loop was late, each 10 ms of the span."""

    @property
    def counted(self) -> list[Record]:
        """Return the records that count."""
        return [record for record in self.records if not record.warm_up]

    def tagged(self, tag: str) -> list[Record]:
        """Return the records of one kind that count."""
        return [record for record in self.counted if record.tag == tag]


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Yield the instants of a Poisson process of ``rate`` a second, without end."""
    rng = random.Random(f"arrivals/{seed}")
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        yield at


def constant(rate: float) -> Iterator[float]:
    """Yield instants at equal distances, ``rate`` a second, without end."""
    return (index / rate for index in itertools.count())


def at_times(requests: Iterable[Planned], times: Iterable[float]) -> Iterator[Planned]:
    """Yield the requests, each due at its instant, until either ends."""
    for planned, at in zip(requests, times, strict=False):
        yield msgspec.structs.replace(planned, at_s=at)


def merge(*kinds: Iterable[Planned]) -> Iterator[Planned]:
    """Yield the requests of several open loops by time, so that one run mixes them."""
    return heapq.merge(*kinds, key=lambda planned: planned.at_s)


def synthetic(
    prompts: Prompts,
    *,
    input_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    shared_tokens: int = 0,
    seed: int = 0,
    tag: str = "",
) -> Iterator[Planned]:
    """Yield requests without end, lengths even between least and greatest, each with a prompt of its own."""
    rng = random.Random(f"lengths/{seed}")
    for index in itertools.count():
        tokens = rng.randint(*input_tokens)
        yield Planned(
            prompt=prompts.prompt(tokens, f"{tag}/{index}", shared_tokens=shared_tokens),
            input_tokens=tokens,
            output_tokens=rng.randint(*output_tokens),
            tag=tag,
        )


def replay(rows: Sequence[TraceRow], prompts: Prompts, *, tag: str = "") -> Iterator[Planned]:
    """Yield a trace's requests; each prompt is made when it is needed, for all of them may not fit the memory."""
    for index, row in enumerate(rows):
        yield Planned(
            at_s=row.at_s,
            prompt=prompts.from_blocks(row.input_tokens, row.hash_ids, f"{tag}/{index}"),
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            tag=tag,
        )


async def run_load(
    plan: Plan,
    target: Target,
    *,
    duration_s: float | None = None,
    most_requests: int | None = None,
    warmup_s: float = 0.0,
    on_progress: Callable[[Progress], None] | None = None,
) -> LoadResult:
    """Send what is planned and return when every request has ended.

    Sending stops ``duration_s`` after the warm-up, after ``most_requests`` that count, or at the end of the plan. What
    is in flight then is waited for and counted; the target's ``timeout_s`` bounds it.
    """
    run = _Run(target, warmup_s, duration_s, most_requests)
    ticker = asyncio.create_task(run.tick(on_progress))
    try:
        await (run.open_loop(plan) if isinstance(plan, OpenLoop) else run.closed_loop(plan))
    except ExceptionGroup as group:  # a request that cannot be made; its caller expects the error itself
        raise group.exceptions[0] from None
    finally:
        ticker.cancel()
        run.connections.close()
    return run.result()


class _Run:
    """The state of one run; only its own coroutines change it."""

    def __init__(self, target: Target, warmup_s: float, duration_s: float | None, most: int | None) -> None:
        self._target = target
        self.connections = Connections(target.origin())
        self._started = time.monotonic()
        self._warmup_s = warmup_s
        self._end_s = math.inf if duration_s is None else warmup_s + duration_s
        self._left = math.inf if most is None else most
        self._sent = 0
        self._records: list[Record] = []
        self._lags: list[float] = []
        self._by_outcome = {"completed": 0, "refused": 0, "error": 0}
        self._stopped_s = 0.0

    def _now(self) -> float:
        return time.monotonic() - self._started

    def _prepare(self, planned: Planned) -> bytes:
        return prepare(self._target, self.connections.origin, planned)

    async def open_loop(self, plan: OpenLoop) -> None:
        """Send each request when it is due, however many are in flight."""
        prepared = ((planned, self._prepare(planned)) for planned in plan.requests)
        first = next(prepared, None)
        self._started = time.monotonic()  # once more: the first request may be due at once, and is ready only now
        async with asyncio.TaskGroup() as group:
            for planned, request in itertools.chain([first] if first else [], prepared):
                if planned.at_s >= self._end_s:
                    await self._sleep_until(self._end_s)
                    break
                if self._left <= 0:
                    break
                await self._sleep_until(planned.at_s)
                warm_up = self._count(planned.at_s)
                group.create_task(self._send(request, planned, planned.at_s, warm_up))
                await asyncio.sleep(0)  # of requests due at once, each goes out before the next is made
            self._stopped_s = self._now()

    async def closed_loop(self, plan: ClosedLoop) -> None:
        """Keep ``concurrency`` requests in flight."""
        requests = iter(plan.requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(plan.concurrency):
                group.create_task(self._stream(requests))

    async def _stream(self, requests: Iterator[Planned]) -> None:
        while self._left > 0 and self._now() < self._end_s:
            planned = next(requests, None)
            if planned is None:
                break
            request = self._prepare(planned)
            now = self._now()
            record = await self._send(request, planned, now, self._count(now))
            if record.outcome != "completed":
                await asyncio.sleep(PAUSE_S)
        self._stopped_s = max(self._stopped_s, min(self._now(), self._end_s))

    def _count(self, scheduled_s: float) -> bool:
        """Count a request that is about to be sent; return whether it belongs to the warm-up."""
        warm_up = scheduled_s < self._warmup_s
        self._sent += 1
        self._left -= 0 if warm_up else 1
        return warm_up

    async def _send(self, request: bytes, planned: Planned, scheduled_s: float, warm_up: bool) -> Record:
        record = await ask(
            self.connections,
            request,
            planned,
            scheduled_s=scheduled_s,
            started=self._started,
            timeout_s=self._target.timeout_s,
            warm_up=warm_up,
        )
        self._by_outcome[record.outcome] += 1
        self._records.append(record)
        return record

    async def _sleep_until(self, at_s: float) -> None:
        # An event loop's timers may fire early by a rounding.
        while (left := at_s - self._now()) > 0:  # noqa: ASYNC110 - it waits for time, which sets no event
            await asyncio.sleep(left)

    async def tick(self, on_progress: Callable[[Progress], None] | None) -> None:
        """Measure how late this event loop is, and show how the run stands."""
        shown = 0.0
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = self._now()
            if now >= self._warmup_s:
                self._lags.append(max(0.0, time.monotonic() - before - TICK_S))
            if on_progress is not None and now - shown >= PROGRESS_S:
                shown = now
                on_progress(self._progress(now))

    def _progress(self, now: float) -> Progress:
        return Progress(
            elapsed_s=now,
            sent=self._sent,
            running=self._sent - len(self._records),
            completed=self._by_outcome["completed"],
            refused=self._by_outcome["refused"],
            errors=self._by_outcome["error"],
        )

    def result(self) -> LoadResult:
        """Return what the run gave."""
        ends = [record.done_s for record in self._records if not record.warm_up]
        seconds = max([self._stopped_s, *ends]) - self._warmup_s
        return LoadResult(
            records=self._records, started=self._started, seconds=max(seconds, 0.0), loop_lag_s=self._lags
        )
