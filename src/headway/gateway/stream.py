"""A stream of server-sent events: keep-alive before and between tokens, back-pressure, errors after the first byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Final

from headway.config import ServerConfig
from headway.errors import HeadwayError
from headway.gateway.events import DONE, PING, Events, error_event, timing_comment
from headway.gateway.http import Exchange, Headers
from headway.gateway.lifeline import Lifeline
from headway.gateway.wire import UsageBody, usage_body
from headway.telemetry.metrics import Metrics
from headway.types import Chunk, Usage

HEADERS: Final[Headers] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """Writes one answer as events.

    The headers leave with the first Chunk or with the first ping, whichever comes first: a refusal that the backend
    knows within ``ping_s`` is an HTTP status, and a long prefill still keeps the connection alive.
    """

    def __init__(self, exchange: Exchange, events: Events, lifeline: Lifeline, config: ServerConfig, metrics: Metrics):
        self._exchange = exchange
        self._events = events
        self._lifeline = lifeline
        self._config = config
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._last_write = 0.0
        self._write_began: float | None = None
        self.usages: list[Usage] = []

    async def run(self, chunks: AsyncGenerator[Chunk, None]) -> None:
        """Write the Chunks as they come; cuts the lifeline when the client does not read."""
        loop = asyncio.get_running_loop()
        self._last_write = loop.time()
        keeper = loop.create_task(self._keep())
        ledger = self._exchange.ledger
        delivered: float | None = None
        try:
            async for chunk in chunks:
                if chunk.usage is not None:
                    self.usages.append(chunk.usage)
                data = self._events.encode(chunk)
                if data:
                    await self._write(data)
                if chunk.text:
                    now = ledger.deliver()
                    if delivered is not None:
                        self._metrics.inter_token.observe(now - delivered)
                    delivered = now
            ledger.last_chunk()
        finally:
            keeper.cancel()

    def usage(self) -> UsageBody:
        """Return the tokens counted so far."""
        return usage_body(self.usages)

    async def end(self, *, usage: bool, timing: dict[str, Any] | None) -> None:
        """Write the usage event when asked for, and [DONE]."""
        data = b"" if timing is None else timing_comment(timing)
        if usage or timing is not None:
            data += self._events.usage(self.usage(), timing)
        async with asyncio.timeout(self._config.write_s):
            await self._write(data + DONE, more=False)

    async def fail(self, error: HeadwayError) -> None:
        """Tell the client of an error after the first byte; never a quiet end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.write_s):
                await self._write(error_event(error) + DONE, more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        loop = asyncio.get_running_loop()
        async with self._lock:
            self._write_began = loop.time()
            try:
                if not self._exchange.started:
                    await self._exchange.start(200, list(HEADERS))
                await self._exchange.write(data, more=more)
            finally:
                self._write_began = None
                self._last_write = loop.time()

    async def _keep(self) -> None:
        """Ping while idle, and cut a client off that reads nothing; one timer for both, so that a token costs none."""
        loop = asyncio.get_running_loop()
        ping_s, write_s = self._config.ping_s, self._config.write_s
        while True:
            now = loop.time()
            if self._write_began is not None:
                due = self._write_began + write_s
                if due <= now:
                    self._lifeline.cut("slow_reader")
                    return
            else:
                due = self._last_write + ping_s
                if due <= now:
                    try:
                        await self._write(PING)
                    except OSError:
                        self._lifeline.cut("disconnect")
                        return
                    continue
            # A write may begin right after this and block, so never sleep past its limit.
            await asyncio.sleep(max(0.0005, min(due - now, write_s)))
