"""One TCP connection: what uvicorn's HTTP/1.1 protocol leaves open is bounded here, and every refusal has our shape.

Bounded are the size of a request's head and of all else that is not body, the time that a head may take, what may be
sent ahead of an answer (pipelining), and the time that a client may read nothing while an answer waits in the send
buffer. Two of its habits are mended: it drops the body of a request that offers another protocol, and it chunks answers
to HTTP/1.0.

Private names of uvicorn are overridden: pyproject.toml allows the versions that have them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, Final

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headway.config import ServerConfig
from headway.errors import BodyTimeout, HeadersTooLarge, HeadwayError, InvalidRequest

AHEAD_BYTES: Final = 64 * 1024
"""What a client may send of further requests while an answer is under way."""
UNSENT_BYTES: Final = 64 * 1024
"""What the kernel takes before a client's network does; it would take megabytes, and hide that nobody reads."""
LOOK_S: Final = 1.0
"""How often a connection is looked after; the limits are kept to within this."""


class Connection(HttpToolsProtocol):
    """A connection that cannot be held, or made to hold memory, for longer than the settings allow."""

    settings: ServerConfig = ServerConfig()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        super().connection_made(transport)
        raw = transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):  # another system, or no TCP
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._running: RequestResponseCycle | None = None
        self._in_head = False
        self._framing_bytes = 0
        """Bytes since the last that was a body's, or that began a request: heads, trailers, chunk extensions."""
        self._ahead_bytes = 0
        self._plain_head = b""
        """The head just read, without the other protocol that it offers; empty for one that offers none."""
        self._waiting_since: float | None = self.loop.time()
        """Since when a head is awaited; None while a request is served and between requests."""
        self._unsent = (0, 0.0)
        """Bytes in the send buffer, and since when it has been exactly so many."""
        self._look_s = min(LOOK_S, self.settings.body_s / 4, self.settings.write_s / 4)
        self._timer = self.loop.call_later(self._look_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of this connection, also those that wait behind another."""
        self._timer.cancel()
        self._forsake()
        super().connection_lost(exc)

    # What comes in

    def data_received(self, data: bytes) -> None:
        """Parse, then see whether the bounds still hold."""
        self._unset_keepalive_if_required()
        self._framing_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            known = error.__context__  # what a callback raised
            self._refuse(
                known if isinstance(known, HeadwayError) else InvalidRequest("the request is not valid HTTP/1.1")
            )
            return
        if self.transport.is_closing():
            return
        if self._framing_bytes > self.settings.head_bytes:
            self._refuse(self._head_too_large())
        elif self._ahead_bytes > AHEAD_BYTES:
            self.transport.close()
        elif self._waiting_since is None and not self._answering:
            self._waiting_since = self.loop.time()

    def _parse(self, data: bytes) -> None:
        """Feed the parser; a request that offers another protocol is read again as one that does not.

        Java's client offers HTTP/2 with its first request, body and all; the parser takes what follows for that.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._plain_head + data[upgrade.args[0] :]
                self._plain_head = b""
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            else:
                return

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head, self._framing_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are dropped, lest one passes for a header that a proxy has checked."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, or let it wait behind the one that is being answered."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.settings.head_bytes:
            raise self._head_too_large()
        if self.parser.should_upgrade():
            self._plain_head = self._without_upgrade()
            return
        self._in_head, self._waiting_since = False, None
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _UntilClosed()
        if self.pipeline:
            # Who does not read does not see the client go; what may come ahead is bounded instead.
            self._ahead_bytes += size
            self.flow.resume_reading()

    def _without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise InvalidRequest("CONNECT is not supported: this is no proxy")
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._framing_bytes = 0
        if self.pipeline:
            self._ahead_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has arrived whole, unless it is about to be read again."""
        if not self._plain_head:
            super().on_message_complete()

    def _should_upgrade_to_ws(self) -> bool:
        return False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if not self.pipeline:
            self._ahead_bytes = 0
        super()._start_asgi_task(cycle, app)

    # What goes out

    @property
    def _answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _head_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(f"the request's head has more than {self.settings.head_bytes} bytes")

    def _refuse(self, error: HeadwayError) -> None:
        """Answer without the application, and close; in the middle of an answer nothing can be said any more."""
        if not (self._answering and self._running is not None and self._running.response_started):
            body = msgspec.json.encode(error.body())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
        self._forsake()

    def _forsake(self) -> None:
        """Let every request know that there is nobody to answer."""
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (self._running, *waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

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


class _UntilClosed(int):
    """The length of an answer to HTTP/1.0, which knows no chunks: it ends with the connection, however long it is."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> int:
        return self


def connection_of(settings: ServerConfig) -> type[Connection]:
    """Return the protocol class that uvicorn makes its connections of."""
    return type("Connection", (Connection,), {"settings": settings})
