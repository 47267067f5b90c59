"""Ends the work on a request when its client goes away or its time is up, and remembers why."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Literal

from headway.errors import RequestTimeout
from headway.gateway.http import ClientGone, Receive
from headway.telemetry.clock import Clock

Cause = Literal["disconnect", "deadline", "slow_reader"]


class Lifeline:
    """A scope around the work of one request.

    Leaving it because of ``cut`` raises RequestTimeout (deadline) or ClientGone (disconnect, slow_reader); the work
    inside sees a cancellation, from whatever it waits for.
    """

    def __init__(self, receive: Receive, clock: Clock, deadline: float | None, *, grace_s: float = 0.0) -> None:
        self._receive = receive
        self._clock = clock
        self._deadline = deadline
        self._grace_s = grace_s
        """A backend that drops expired work itself knows more (it never ran): let its answer win."""
        self._scope = asyncio.timeout(None)
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.cause: Cause | None = None

    async def __aenter__(self) -> Lifeline:
        """Start to watch; the request's body must have been read."""
        await self._scope.__aenter__()
        loop = asyncio.get_running_loop()
        self._watcher = loop.create_task(self._watch())
        if self._deadline is not None:
            left_s = max(0.0, self._deadline - self._clock.now())
            self._timer = loop.call_later(left_s + self._grace_s, self.cut, "deadline")
        return self

    def cut(self, cause: Cause) -> None:
        """End the work; the first cause counts."""
        if self.cause is None:
            self.cause = cause
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def _watch(self) -> None:
        # After the body, ``receive`` says nothing but that the client is gone.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.cut("disconnect")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching; translate the cut."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            if self.cause == "deadline":
                raise RequestTimeout("the request's time was up before its answer was complete") from None
            raise ClientGone from None
