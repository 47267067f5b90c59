"""HTTP/1.1 as a client that measures needs it: every piece of an answer bears the instant at which it arrived."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from typing import Final
from urllib.parse import urlsplit

import httptools
import msgspec

from headway.errors import InvalidRequest

IDLE_S: Final = 2.0
"""Servers close idle connections after 5 s or more; one that rested for longer than this is not risked."""
READ_BYTES: Final = 256 * 1024
EVENT_BYTES: Final = 16 * 1024 * 1024
HEAD_BYTES: Final = 256 * 1024


class WireError(Exception):
    """The server's bytes are not what HTTP or an event stream allows."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server is: ``prefix`` is what its paths begin with, without ``/v1``."""

    host: str
    port: int
    tls: bool
    prefix: str

    @property
    def authority(self) -> str:
        """Return the value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def parse_url(url: str) -> Origin:
    """Read a server's base URL, with or without ``/v1``; InvalidRequest for one that is none."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(f"--url {url!r}: {error}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InvalidRequest(f"--url {url!r}: expected http://HOST:PORT or https://HOST, with or without /v1")
    if parts.query or parts.fragment or parts.username is not None:
        raise InvalidRequest(f"--url {url!r}: no query, fragment or user may stand in it")
    tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Origin(host=parts.hostname, port=port or (443 if tls else 80), tls=tls, prefix=prefix)


def render(origin: Origin, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return a POST as bytes; ``headers`` have lower-case names; one that breaks lines is an InvalidRequest."""
    fields = {"host": origin.authority, "content-length": str(len(body)), **headers}
    lines = [f"POST {origin.prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise InvalidRequest("a header may not hold a line break")
    return "\r\n".join(lines).encode("utf-8") + b"\r\n\r\n" + body


class SseParser:
    """Splits a stream of bytes into the data of its events, however the bytes are cut; comments are dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._data: list[bytes] = []
        self._first = True

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of every event that ``data`` completes; WireError for one that never ends."""
        if not data:
            return []
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]  # the second half of a line end that was cut in two
            self._after_cr = False
            if not data:
                return []
        self._after_cr = data.endswith(b"\r")
        *lines, self._rest = (self._rest + data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")).split(b"\n")
        if len(self._rest) > EVENT_BYTES:
            raise WireError(f"an event of more than {EVENT_BYTES} bytes")
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> bytes | None:
        if self._first:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._first = False
        if not line:
            event = b"\n".join(self._data) if self._data else None
            self._data = []
            return event
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None


class _Reading:
    """What has arrived of one answer; httptools calls the ``on_`` methods."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.reusable = False
        self._pieces: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status < 200:  # 100 Continue, 103 Early Hints: the answer is still to come
            self.headers = {}
            return
        self.status = status
        self.reusable = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = self.status != 0

    def take(self) -> bytes:
        """Return the body's bytes that were not taken yet."""
        body = b"".join(self._pieces)
        self._pieces.clear()
        return body


class Answer:
    """One answer: its head is here, its body arrives."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._reading = _Reading()
        self.arrived_at = 0.0
        """When the last bytes arrived, in monotonic seconds."""
        self.arrived = False
        """Whether any byte came at all."""

    @property
    def status(self) -> int:
        """Return the status code."""
        return self._reading.status

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers, names in lower case."""
        return self._reading.headers

    @property
    def reusable(self) -> bool:
        """Return whether the connection may carry another request."""
        return self._reading.complete and self._reading.reusable

    async def read_head(self) -> None:
        """Wait for the status line and the headers."""
        got = 0
        while not self._reading.status:
            got += await self._read()
            if got > HEAD_BYTES and not self._reading.status:
                raise WireError(f"a head of more than {HEAD_BYTES} bytes")

    async def piece(self) -> tuple[float, bytes] | None:
        """Return the body's next piece with the instant at which it arrived; None at the end."""
        while True:
            body = self._reading.take()
            if body:
                return self.arrived_at, body
            if self._reading.complete:
                return None
            await self._read()

    async def read_all(self, limit_bytes: int = EVENT_BYTES) -> bytes:
        """Return the whole body."""
        body = bytearray()
        while (piece := await self.piece()) is not None:
            body += piece[1]
            if len(body) > limit_bytes:
                raise WireError(f"a body of more than {limit_bytes} bytes")
        return bytes(body)

    async def _read(self) -> int:
        data = await self._reader.read(READ_BYTES)
        self.arrived_at = time.monotonic()
        self.arrived = self.arrived or bool(data)
        if not data:
            framed = "content-length" in self.headers or "transfer-encoding" in self.headers
            if not self._reading.status or framed:
                raise ConnectionResetError("the server closed the connection before its answer was complete")
            self._reading.complete = True  # a body without a length ends with the connection
            return 0
        try:
            self._reading.parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise WireError(f"not HTTP/1.1: {error}") from error
        return len(data)


class Connections:
    """Connections to one server, kept for further requests; as many as are in use at once."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._tls = ssl.create_default_context() if origin.tls else None
        self._idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    @contextlib.asynccontextmanager
    async def exchange(self, request: bytes) -> AsyncIterator[Answer]:
        """Send a rendered request; the body must be read within the context, or the connection is not kept."""
        reader, writer, fresh = await self._obtain()
        answer = Answer(reader)
        try:
            # Not drained: a server that refuses early does not read the body, and its answer must be seen all the same.
            writer.write(request)
            try:
                await answer.read_head()
            except ConnectionError:
                if fresh or answer.arrived:
                    raise
                # The server had closed a kept connection, as it may at any time: it never saw the request.
                writer.transport.abort()
                reader, writer = await self._open()
                answer = Answer(reader)
                writer.write(request)
                await answer.read_head()
            yield answer
        finally:
            if answer.reusable and not writer.is_closing() and not reader.at_eof():
                self._idle.append((time.monotonic(), reader, writer))
            else:
                writer.transport.abort()

    async def _obtain(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bool]:
        """Return a connection, and whether it is new."""
        while self._idle:
            since, reader, writer = self._idle.pop()
            if time.monotonic() - since < IDLE_S and not writer.is_closing() and not reader.at_eof():
                return reader, writer, False
            writer.transport.abort()
        return *(await self._open()), True

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.origin.host, self.origin.port, ssl=self._tls, limit=READ_BYTES)

    def close(self) -> None:
        """Close what is idle."""
        for _, _, writer in self._idle:
            writer.transport.abort()
        self._idle.clear()
