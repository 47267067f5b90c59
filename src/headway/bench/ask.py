"""One request as a client sees it: when it was due, sent, first answered, last answered, and how it ended."""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from headway.bench.client import Answer, Connections, Origin, SseParser, WireError, parse_url, render
from headway.errors import InvalidRequest

REFUSALS: Final = frozenset({429, 503})
"""What a server says when it is full: no error, for it keeps its word to the others."""
DETAIL_CHARS: Final = 300
ERROR_BYTES: Final = 1024 * 1024

Outcome = Literal["completed", "refused", "error"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What every request of a run has in common."""

    url: str
    model: str
    endpoint: Literal["chat", "completions"] = "chat"
    api_key: str | None = None
    headers: dict[str, str] = {}
    timeout_s: float = 300.0
    """Limit of one request, from its sending to its last byte."""
    temperature: float = 0.0
    ignore_eos: bool = False

    def origin(self) -> Origin:
        """Return where the server is; InvalidRequest for a bad URL."""
        return parse_url(self.url)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A request to be sent ``at_s`` seconds after the start (an open loop), or when a stream is free (a closed one)."""

    prompt: str | list[dict[str, Any]]
    """A text, or the messages of a chat."""
    output_tokens: int
    at_s: float = 0.0
    input_tokens: int | None = None
    """What the prompt is meant to be; reported where the server tells no usage."""
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    """Further fields of the body, which win over ours; a None leaves the field out."""
    tag: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request; instants are seconds since the start of the run."""

    tag: str
    warm_up: bool
    """It fell in the warm-up and does not count."""
    scheduled_s: float
    sent_s: float
    """Just before the first byte is written, or the connection opened where none was idle."""
    first_s: float | None
    last_s: float | None
    done_s: float
    deltas_s: tuple[float, ...]
    """When each delta with content arrived."""
    outcome: Outcome
    status: int | None
    error: str | None
    """The kind of error: connect, timeout, reset, protocol, truncated, stream_error, not_a_stream, http_NNN."""
    detail: str
    retry_after_s: float | None
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    counted_by: Literal["usage", "deltas"]
    finish_reason: str | None

    @property
    def lag_s(self) -> float:
        """Return by how much the generator itself was late."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Return the time to the first content, from the instant at which the request was due."""
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def ttft_from_sent_s(self) -> float | None:
        """Return the time to the first content without the generator's own lag."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Return the time to the end, from the instant at which the request was due."""
        return self.done_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time of a token after the first."""
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Return the gaps between deltas with content."""
        return [after - before for before, after in zip(self.deltas_s, self.deltas_s[1:], strict=False)]


class _Failure(Exception):
    """Ends a request as an error of a kind."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None  # the name that vLLM gives it now
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    def has_content(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class _Stream:
    """What one request's answer has shown so far."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.retry_after_s: float | None = None
        self.deltas: list[float] = []
        self.usage = _Usage()
        self.finish_reason: str | None = None
        self.done_at: float | None = None
        self._open: set[int] = set()
        """Choices that have begun and have no finish_reason yet."""

    def event(self, at: float, data: bytes) -> None:
        """Take one event's data."""
        if data.strip() == b"[DONE]":
            self.done_at = at
            return
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _Failure("protocol", f"{error} in {data[:80]!r}") from error
        if event.error is not None:
            raise _Failure("stream_error", str(event.error))
        self.usage = event.usage or self.usage
        content = False
        for choice in event.choices or ():
            content = choice.has_content() or content
            self._open.add(choice.index)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                self._open.discard(choice.index)
        if content:
            self.deltas.append(at)

    def check(self) -> None:
        """Raise when the stream ended before its end."""
        if self.finish_reason is None or self._open:
            raise _Failure("truncated", "the stream ended without a finish_reason")
        if self.done_at is None:
            raise _Failure("truncated", "the stream ended without [DONE]")


def prepare(target: Target, origin: Origin, planned: Planned) -> bytes:
    """Return the bytes of a request, made before it is due so that making them delays nothing."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": planned.output_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.endpoint == "chat":
        text = planned.prompt
        body["messages"] = [{"role": "user", "content": text}] if isinstance(text, str) else text
    elif isinstance(planned.prompt, str):
        body["prompt"] = planned.prompt
    else:
        raise InvalidRequest("a prompt of messages needs the endpoint chat, not completions")
    body = {name: value for name, value in (body | planned.body).items() if value is not None}
    path = "/v1/chat/completions" if target.endpoint == "chat" else "/v1/completions"
    own = {name.lower(): value for name, value in planned.headers.items()}
    return render(origin, path, request_headers(target) | own, msgspec.json.encode(body))


def request_headers(target: Target) -> dict[str, str]:
    """Return the headers that every request of a run has."""
    headers = {"content-type": "application/json", "accept": "text/event-stream", "user-agent": "headway-bench"}
    if target.api_key:
        headers["authorization"] = f"Bearer {target.api_key}"
    return headers | {name.lower(): value for name, value in target.headers.items()}


async def ask(
    connections: Connections,
    request: bytes,
    planned: Planned,
    *,
    scheduled_s: float,
    started: float,
    timeout_s: float,
    warm_up: bool = False,
) -> Record:
    """Send a prepared request and follow its stream to the end; never raises for what the server or network does.

    ``started`` is the monotonic instant from which the record's seconds count.
    """
    stream = _Stream()
    outcome: Outcome = "completed"
    kind, detail = None, ""
    sent = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s), connections.exchange(request) as answer:
            stream.status = answer.status
            if answer.status != 200:
                outcome, kind, detail = await _refused(answer, stream)
            else:
                await _follow(answer, stream)
    except _Failure as failure:
        outcome, kind, detail = "error", failure.kind, str(failure)
    except (TimeoutError, OSError, WireError) as error:
        outcome, kind = "error", _kind(error, connected=stream.status is not None)
        detail = str(error) or f"no end within {timeout_s:g} s"
    done = time.monotonic() if kind or stream.done_at is None else stream.done_at
    usage, deltas = stream.usage, tuple(at - started for at in stream.deltas)
    counted = usage.completion_tokens
    return Record(
        tag=planned.tag,
        warm_up=warm_up,
        scheduled_s=scheduled_s,
        sent_s=sent - started,
        first_s=deltas[0] if deltas else None,
        last_s=deltas[-1] if deltas else None,
        done_s=done - started,
        deltas_s=deltas,
        outcome=outcome,
        status=stream.status,
        error=kind,
        detail=detail[:DETAIL_CHARS],
        retry_after_s=stream.retry_after_s,
        input_tokens=planned.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None,
        output_tokens=len(deltas) if counted is None else counted,
        counted_by="deltas" if counted is None else "usage",
        finish_reason=stream.finish_reason,
    )


async def _follow(answer: Answer, stream: _Stream) -> None:
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        body = await answer.read_all(ERROR_BYTES)
        raise _Failure("not_a_stream", body[:DETAIL_CHARS].decode("utf-8", "replace"))
    events = SseParser()
    while (arrived := await answer.piece()) is not None:
        at, piece = arrived
        for data in events.feed(piece):
            stream.event(at, data)
    stream.check()


async def _refused(answer: Answer, stream: _Stream) -> tuple[Outcome, str | None, str]:
    body = await answer.read_all(ERROR_BYTES)
    detail = body[:DETAIL_CHARS].decode("utf-8", "replace")
    if answer.status in REFUSALS:
        stream.retry_after_s = retry_after_s(answer.headers)
        return "refused", None, detail
    return "error", f"http_{answer.status}", detail


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of retry-after-ms, as the official clients read it first, else of Retry-After; None for none.

    Retry-After may hold a date; a bad value counts as none.
    """
    exact, value = headers.get("retry-after-ms", "").strip(), headers.get("retry-after", "").strip()
    try:
        if exact[:1].isdecimal():
            return float(exact) / 1e3
        if value[:1].isdecimal():
            return float(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _kind(error: Exception, *, connected: bool) -> str:
    # TimeoutError is an OSError too: the system's own (a connect that nobody answers) counts as what it is to a client.
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, WireError):
        return "protocol"
    if isinstance(error, ConnectionResetError | BrokenPipeError | ConnectionAbortedError):
        return "reset"
    return "reset" if connected else "connect"
