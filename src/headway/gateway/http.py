"""One HTTP exchange over plain ASGI: headers, a bounded body, one answer."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec

from headway.errors import BodyTimeout, HeadwayError, InvalidRequest, TooLarge
from headway.telemetry.budget import Ledger
from headway.telemetry.clock import Clock

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON: Final = b"application/json"
LINGER_BYTES: Final = 64 * 1024 * 1024
LINGER_S: Final = 2.0
"""How much, and for how long, is read of a body after its refusal."""
_SANE_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_encoder = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client went away: there is nobody to answer (499 in logs, never sent)."""


class Exchange:
    """One request and its answer; ``started`` says whether the status line has left."""

    __slots__ = (
        "_send",
        "cause",
        "clock",
        "headers",
        "id",
        "ledger",
        "method",
        "model",
        "path",
        "query",
        "receive",
        "started",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, clock: Clock) -> None:
        self.ledger = Ledger(clock)
        self.clock = clock
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope.get("query_string", b"").decode("latin-1")
        # latin-1 decodes any byte; of repeated headers the last one counts.
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        asked = self.headers.get("x-request-id", "")
        self.id = asked if _SANE_ID.match(asked) else secrets.token_hex(12)
        self.ledger.request_id = self.id
        self.receive = receive
        self._send = send
        self.started = False
        self.status = 0
        self.model = ""
        self.cause = ""
        """Why the answer was cut short, for logs."""

    @property
    def wants_timing(self) -> bool:
        """The caller asked for its ledger."""
        return self.headers.get("x-include-timing", "").strip().lower() in ("1", "true")

    async def read_body(self, *, limit_bytes: int, limit_s: float) -> bytes:
        """Return the body; raises TooLarge, BodyTimeout, InvalidRequest (encoded) or ClientGone."""
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise InvalidRequest(
                f"Content-Encoding {encoding[:40]!r} is not supported; send the body unencoded (identity)",
                param="content-encoding",
            )
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limit_bytes:
            raise TooLarge(f"the body has {declared[:20]} bytes; the limit is {limit_bytes} bytes")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(limit_s):
                more = True
                while more:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit_bytes:
                        raise TooLarge(f"the body has more than {limit_bytes} bytes, which is the limit")
                    parts.append(part)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise BodyTimeout(f"the body did not arrive within {limit_s:g} s ({size} bytes did)") from None
        return b"".join(parts)

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status line and the headers that every answer has."""
        self.started = True
        self.status = status
        taken_ms = int((self.clock.now() - self.ledger.started) * 1000)
        common: Headers = [
            (b"x-request-id", self.id.encode("latin-1")),
            (b"openai-processing-ms", str(taken_ms).encode()),
        ]
        timing = self.ledger.server_timing()
        if timing:
            common.append((b"server-timing", timing.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers + common})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the body; waits while the client's buffer is full."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def respond(
        self,
        body: bytes,
        *,
        status: int = 200,
        kind: bytes = JSON,
        headers: Headers | None = None,
        linger: bool = False,
    ) -> None:
        """Send a whole answer; ``linger`` takes what the client still sends for a while, so that it can read it."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [(b"content-type", kind), length, *(headers or [])])
        body = b"" if self.method == "HEAD" else body
        if linger:
            await self.write(body)
            await self._drop_body()
            body = b""
        await self.write(body, more=False)

    async def _drop_body(self) -> None:
        """Read on and forget: a connection closed over unread data is reset, and the answer in it is lost."""
        left = LINGER_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while left > 0:
                    message = await self.receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    left -= len(message.get("body", b""))

    async def respond_json(self, value: Any) -> None:
        """Send a value as JSON."""
        await self.respond(_encoder.encode(value))

    async def refuse(self, error: HeadwayError, *, headers: Headers | None = None) -> None:
        """Send an error in OpenAI's shape, with what the official clients read to decide on a retry."""
        extra = list(headers or [])
        if error.should_retry is not None:
            extra.append((b"x-should-retry", b"true" if error.should_retry else b"false"))
        if error.retry_after_s is not None:
            # Jitter spreads the clients that were refused in the same instant.
            wait_s = max(0.05, error.retry_after_s) * random.uniform(1.0, 1.25)
            extra.append((b"retry-after", str(math.ceil(wait_s)).encode()))
            extra.append((b"retry-after-ms", str(math.ceil(wait_s * 1000)).encode()))
        unread = isinstance(error, TooLarge) or error.param == "content-encoding"
        if unread or isinstance(error, BodyTimeout):
            # The rest of the body is still on its way, and nobody wants it.
            extra.append((b"connection", b"close"))
        await self.respond(_encoder.encode(error.body()), status=error.status, headers=extra, linger=unread)
