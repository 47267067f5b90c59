"""Admission: what could not be answered is refused at once, and says when to come back."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from headway.errors import DeadlineExceeded, Overloaded
from headway.gateway.stage import Next
from headway.telemetry.budget import Ledgers
from headway.telemetry.clock import Clock
from headway.types import Backend, Chunk, Request

WINDOW: Final = 64
"""Requests over which throughput is measured."""
LONGEST_S: Final = 60.0
DRAIN_RETRY_S: Final = 2.0
"""While draining: soon, since another replica, or the next process, answers then."""


class Admit:
    """Refuses while draining, when the queue is full, and work whose deadline has passed."""

    name = "admit"

    def __init__(self, backend: Backend, clock: Clock, ledgers: Ledgers, *, max_running: int, max_waiting: int) -> None:
        self._backend = backend
        self._clock = clock
        self._ledgers = ledgers
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._ended: deque[float] = deque(maxlen=WINDOW)
        self.draining = False
        self.admitted = 0
        """Sequences admitted and not ended."""

    async def __call__(self, request: Request, then: Next) -> AsyncGenerator[Chunk, None]:
        """Yield the next step's Chunks, or raise Overloaded or DeadlineExceeded."""
        ledger = self._ledgers.get(request.id)
        assert ledger is not None
        with ledger.stage("admit"):
            self._check(request)
        self.admitted += request.params.n
        try:
            async with aclosing(then(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            self._ended.append(self._clock.now())
        finally:
            self.admitted -= request.params.n

    def _check(self, request: Request) -> None:
        if self.draining:
            raise Overloaded("the server is shutting down; send the request again", retry_after_s=DRAIN_RETRY_S)
        if request.deadline is not None and self._clock.now() >= request.deadline:
            raise DeadlineExceeded("the request's deadline had passed before it was dispatched")
        waiting = self.waiting()
        if waiting >= self._max_waiting:
            raise Overloaded(
                f"the queue is full: {waiting} requests wait, the limit is {self._max_waiting}",
                retry_after_s=self.predicted_wait_s(),
            )

    def waiting(self) -> int:
        """Return how many requests wait: the backend's figure may be old, what was admitted here is exact."""
        return max(self._backend.load().waiting, self.admitted - self._max_running)

    def predicted_wait_s(self) -> float:
        """Return when the present queue will be gone: as the backend predicts, else at the recent throughput."""
        predicted = self._backend.load().wait_s
        if predicted > 0.0:
            return min(LONGEST_S, max(0.1, predicted))
        if len(self._ended) < 2:
            return 1.0
        span = self._clock.now() - self._ended[0]
        rate = len(self._ended) / max(span, 1e-3)
        return min(LONGEST_S, max(0.1, self.waiting() / rate))
