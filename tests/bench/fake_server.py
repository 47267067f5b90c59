"""A server of known timing that speaks HTTP/1.1 and event streams, well or badly, as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Break = Literal["no_done", "no_finish", "reset", "error_event", "garbage", "hang", "not_a_stream"]


@dataclass
class Script:
    """How one answer goes."""

    ttft_s: float = 0.02
    itl_s: float = 0.005
    tokens: int | None = None
    """None sends what ``max_tokens`` asks for."""
    tokens_per_delta: int = 1
    role_frame: bool = True
    pings: bool = False
    usage: bool = True
    status: int = 200
    retry_after: str | None = None
    head_delay_s: float = 0.0
    broken: Break | None = None
    cut_bytes: int | None = None
    """Writes the answer in pieces of so many bytes."""
    content: str = "content"
    """The delta's field: content, reasoning_content or tool_calls."""


@dataclass
class FakeServer:
    """What the server is told, and what it saw."""

    script: Callable[[int, dict[str, Any]], Script]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    drops_kept: bool = False
    """Promises to keep connections, and closes them when the next request comes."""
    connections: int = 0
    running: int = 0
    most_running: int = 0
    tokens_per_word: float | None = None
    """What /tokenize counts a word as; None has no such path."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer what comes over one connection."""
        self.connections += 1
        try:
            while await self._exchange(reader, writer):
                if self.drops_kept:
                    await reader.readuntil(b"\r\n\r\n")
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")[:-2]
        path = first.split()[1]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        if path == "/tokenize":
            await self._tokenize(writer, body)
            return True
        self.paths.append(path)
        self.headers.append(headers)
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._answer(writer, body, self.script(len(self.bodies) - 1, body))
        finally:
            self.running -= 1

    async def _tokenize(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        if self.tokens_per_word is None:
            await _plain(writer, 404, b"{}")
        else:
            count = 1 + round(len(body["prompt"].split()) * self.tokens_per_word)
            await _plain(writer, 200, json.dumps({"count": count}).encode())

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any], script: Script) -> bool:
        await asyncio.sleep(script.head_delay_s)
        if script.status != 200:
            extra = f"retry-after: {script.retry_after}\r\n" if script.retry_after else ""
            await _plain(writer, script.status, b'{"error": {"message": "no"}}', extra)
            return True
        if script.broken == "not_a_stream":
            await _plain(writer, 200, b'{"choices": []}')
            return True
        if script.broken == "garbage":
            writer.write(b"NOT HTTP AT ALL\r\n\r\n")
            await writer.drain()
            return False
        out = _Chunked(writer, script.cut_bytes)
        await out.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if not await _stream(out, body, script):
            return False
        await out.raw(b"0\r\n\r\n")
        return True


@dataclass
class _Chunked:
    writer: asyncio.StreamWriter
    cut_bytes: int | None

    async def event(self, value: object) -> None:
        data = value if isinstance(value, str) else json.dumps(value)
        await self.text(f"data: {data}\n\n")

    async def text(self, text: str) -> None:
        data = text.encode()
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def raw(self, data: bytes) -> None:
        step = self.cut_bytes or len(data)
        for start in range(0, len(data), step):
            self.writer.write(data[start : start + step])
            if step < len(data):
                await asyncio.sleep(0)
        await self.writer.drain()


async def _stream(out: _Chunked, body: dict[str, Any], script: Script) -> bool:
    chat = "messages" in body
    tokens = body["max_tokens"] if script.tokens is None else script.tokens

    def choice(content: object, finish: str | None = None) -> dict[str, Any]:
        if not chat:
            return {"choices": [{"index": 0, "text": content or "", "finish_reason": finish}]}
        delta = {} if content is None else {script.content: content}
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    if script.role_frame and chat:
        first = {"role": "assistant", "content": ""}
        await out.event({"choices": [{"index": 0, "delta": first, "finish_reason": None}]})
    await asyncio.sleep(script.ttft_s - script.head_delay_s)
    for index in range(0, tokens, script.tokens_per_delta):
        if index:
            await asyncio.sleep(script.itl_s)
        if script.pings:
            await out.text(": ping\n\n")
        if script.broken and index >= tokens // 2:
            if script.broken == "reset":
                return False
            if script.broken == "error_event":
                await out.event({"error": {"message": "the engine died", "code": 500}})
                return True
            if script.broken == "hang":
                await asyncio.sleep(60)
        await out.event(choice([{"index": 0}] if script.content == "tool_calls" else "word "))
    if script.broken != "no_finish":
        await out.event(choice(None, "length"))
    if script.usage and body.get("stream_options", {}).get("include_usage"):
        await out.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
    if script.broken != "no_done":
        await out.event("[DONE]")
    return True


async def _plain(writer: asyncio.StreamWriter, status: int, body: bytes, extra: str = "") -> None:
    head = f"HTTP/1.1 {status} Word\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


@contextlib.asynccontextmanager
async def serving(script: Script | Callable[[int, dict[str, Any]], Script]) -> AsyncIterator[FakeServer]:
    """Serve on a free port of this loop; a function chooses by the request's number and body."""
    server = FakeServer(script if callable(script) else lambda number, body: script)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(server.handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
