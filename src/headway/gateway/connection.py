"""One TCP connection: what uvicorn's HTTP/1.1 protocol leaves open is bounded here, and every refusal has our shape.

Bounded are the size of a request's head, the time that it may take, what may be sent ahead of an answer (pipelining),
and the time that a client may read nothing while an answer waits in the send buffer.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headway.config import ServerConfig
from headway.errors import BodyTimeout, HeadersTooLarge, HeadwayError, InvalidRequest

AHEAD_BYTES: Final = 64 * 1024
"""What a client may send while an answer is under way and another of its requests waits."""
LOOK_S: Final = 1.0
"""How often a connection is looked after; the limits are kept to within this."""


class Connection(HttpToolsProtocol):
    """A connection that cannot be held, or made to hold memory, for longer than the settings allow."""

    settings: ServerConfig = ServerConfig()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._running: RequestResponseCycle | None = None
        self._in_head = False
        self._head_bytes = 0
        self._ahead_bytes = 0
        self._waiting_since: float | None = self.loop.time()
        """Since when a head is awaited; None while a request is served and between requests."""
        self._unsent = (0, 0.0)
        """Bytes in the send buffer, and since when it has been exactly so many."""
        self._look_s = min(LOOK_S, self.settings.body_s / 4, self.settings.write_s / 4)
        self._timer = self.loop.call_later(self._look_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of this connection, also those that wait behind another."""
        self._timer.cancel()
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (self._running, *waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, then see whether the bounds still hold."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.settings.head_bytes:
                self._refuse(HeadersTooLarge(f"the request's head has more than {self.settings.head_bytes} bytes"))
                return
        self._ahead_bytes = self._ahead_bytes + len(data) if self.pipeline else 0
        if self._ahead_bytes > AHEAD_BYTES:
            self.transport.close()
        elif self._waiting_since is None and not self._answering:
            self._waiting_since = self.loop.time()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Start the request, or let it wait behind the one that is being answered."""
        self._in_head, self._waiting_since = False, None
        super().on_headers_complete()
        if self.pipeline:
            # Who does not read does not see the client go; what may come ahead is bounded instead.
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(InvalidRequest("the request is not valid HTTP/1.1"))

    @property
    def _answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _refuse(self, error: HeadwayError) -> None:
        """Answer without the application, and close; in the middle of an answer nothing can be said any more."""
        if not (self._answering and self._running is not None and self._running.response_started):
            body = msgspec.json.encode(error.body())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _look(self) -> None:
        """End a connection whose client sends no whole head, or takes nothing of what it is sent."""
        now = self.loop.time()
        self._timer = self.loop.call_later(self._look_s, self._look)
        size, since = self._unsent
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent != size:
            self._unsent = (unsent, now)
        elif now - since >= self.settings.write_s:
            self.transport.abort()
            return
        if self.transport.is_closing() or self._waiting_since is None:
            return
        if now - self._waiting_since >= self.settings.body_s:
            if self._in_head:
                self._refuse(BodyTimeout(f"the request's head did not arrive within {self.settings.body_s:g} s"))
            else:
                self.transport.close()


def connection_of(settings: ServerConfig) -> type[Connection]:
    """Return the protocol class that uvicorn makes its connections of."""
    return type("Connection", (Connection,), {"settings": settings})
