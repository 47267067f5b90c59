"""The ledger: where every millisecond of one request went, on one clock.

Stages are non-overlapping intervals on the critical path. Time that no stage claims before the first content is
``unattributed``: a stage that forgets to account for itself shows there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from headway.telemetry.clock import Clock
from headway.types import EngineTiming

ORDER: Final = (
    "accept",
    "parse",
    "auth",
    "limits",
    "admit",
    "moderate_in",
    "classify",
    "cache",
    "embed",
    "retrieve",
    "rerank",
    "prompt",
    "shorten",
    "route",
    "queue",
    "prefill",
    "first_token",
    "decode",
    "moderate_out",
    "flush",
)
"""Every stage that a request can pass, in order (docs/path.md); a stage that is off does not appear in a ledger."""


class Span(msgspec.Struct, frozen=True):
    """What one stage took: two instants on the machine-wide clock."""

    stage: str
    start: float
    end: float
    estimated: bool = False
    """Derived from the outside, because the backend reported no instants of its own."""


class Ledger:
    """The account of one request, started in the outermost layer; its one writer is the task that serves it."""

    __slots__ = (
        "_clock",
        "_dispatched",
        "_last_chunk",
        "_timing",
        "cached_tokens",
        "degraded",
        "finished",
        "first_content",
        "prompt_tokens",
        "request_id",
        "spans",
        "started",
        "tokens",
    )

    def __init__(self, clock: Clock, request_id: str = "") -> None:
        self._clock = clock
        self.request_id = request_id
        self.started = clock.now()
        self.spans: list[Span] = []
        self.first_content: float | None = None
        """When the first non-empty delta was delivered: not a role chunk, not a ping."""
        self.finished: float | None = None
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.tokens = 0
        """Completion tokens, once counted."""
        self.degraded: list[str] = []
        self._timing: EngineTiming | None = None
        self._dispatched: float | None = None
        self._last_chunk: float | None = None

    @property
    def dispatched(self) -> bool:
        """The request was handed to a backend."""
        return self._dispatched is not None

    @property
    def answering(self) -> bool:
        """The engine has sampled a token, or content was delivered."""
        return self.first_content is not None or (self._timing is not None and self._timing.first_token > 0.0)

    def claim(self, stage: str, start: float, end: float, *, estimated: bool = False) -> None:
        """Enter an interval; it may not overlap an earlier one, so its start gives way."""
        assert stage in ORDER, stage
        if self.spans:
            start = max(start, self.spans[-1].end)
        self.spans.append(Span(stage, start, max(start, end), estimated))

    def end(self, stage: str) -> None:
        """Claim everything since the last stage (or since the start) for ``stage``."""
        self.claim(stage, self.spans[-1].end if self.spans else self.started, self._clock.now())

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Claim the time inside the block; what lies between two blocks stays unattributed."""
        start = self._clock.now()
        try:
            yield
        finally:
            self.claim(stage, start, self._clock.now())

    def dispatch(self) -> None:
        """Mark the hand-over to the backend; ``queue`` starts here: tokenising and the way to the engine are in it."""
        if self._dispatched is None:
            self._dispatched = self._clock.now()

    def engine(self, timing: EngineTiming) -> None:
        """Take over the engine's instants; they are entered when the first content has been delivered."""
        self._timing = timing
        self.cached_tokens = max(self.cached_tokens, timing.cached_tokens)

    def deliver(self) -> float:
        """Mark a delivered non-empty delta and return the instant; the first one is the TTFT."""
        now = self._clock.now()
        if self.first_content is None:
            self._enter_engine(now)
            self.first_content = now
        return now

    def _enter_engine(self, now: float) -> None:
        for span in self._engine_spans(now):
            self.claim(span.stage, span.start, span.end, estimated=span.estimated)

    def _engine_spans(self, now: float) -> list[Span]:
        """Return queue, prefill and first_token up to ``now``; an upstream's bad clock cannot break the order."""
        if self._dispatched is None:
            return []
        at = self._dispatched
        timing = self._timing
        if timing is None or not timing.scheduled:
            return [Span("prefill", at, now, estimated=True)]
        scheduled = min(max(timing.scheduled, at), now)
        prefilled = min(max(timing.prefilled or timing.first_token or scheduled, scheduled), now)
        return [
            Span("queue", at, scheduled),
            Span("prefill", scheduled, prefilled),
            Span("first_token", prefilled, now),
        ]

    def last_chunk(self) -> None:
        """Mark the arrival of the backend's last Chunk: decode ends, flush starts."""
        now = self._clock.now()
        if self.first_content is None:
            self._enter_engine(now)
        else:
            self.claim("decode", self.first_content, now)
        self._last_chunk = now

    def finish(self) -> None:
        """Mark the end of the answer; nothing is entered after it."""
        if self.finished is None:
            self.finished = self._clock.now()
            if self._last_chunk is not None:
                self.claim("flush", self._last_chunk, self.finished)

    @property
    def ttft(self) -> float | None:
        """Seconds from the start to the first delivered content; None when there was none."""
        return None if self.first_content is None else self.first_content - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None below two tokens."""
        if self.first_content is None or self._last_chunk is None or self.tokens < 2:
            return None
        return max(0.0, self._last_chunk - self.first_content) / (self.tokens - 1)

    @property
    def unattributed(self) -> float:
        """Seconds up to the first content (or, without one, up to the last stage) that no stage claims."""
        end = self.first_content
        if end is None:
            end = self.spans[-1].end if self.spans else self.started
        claimed = sum(min(span.end, end) - span.start for span in self.spans if span.start < end)
        return max(0.0, end - self.started - claimed)

    def to_json(self) -> dict[str, Any]:
        """Return the wire's ``timing``; milliseconds, from the request's start."""
        ttft, tpot = self.ttft, self.tpot
        end = self.finished if self.finished is not None else self._clock.now()
        return {
            "stages": [self._stage_json(span) for span in self.spans],
            "ttft_ms": None if ttft is None else _ms(ttft),
            "tpot_ms": None if tpot is None else _ms(tpot),
            "e2e_ms": _ms(end - self.started),
            "unattributed_ms": _ms(self.unattributed),
            "cached_tokens": self.cached_tokens,
            "degraded": list(self.degraded),
        }

    def _stage_json(self, span: Span) -> dict[str, Any]:
        row: dict[str, Any] = {
            "stage": span.stage,
            "start_ms": _ms(span.start - self.started),
            "ms": _ms(span.end - span.start),
        }
        if span.estimated:
            row["estimated"] = True
        return row

    def server_timing(self) -> str:
        """Return the ``Server-Timing`` value: the stages known now, by name and duration."""
        known = list(self.spans)
        if self.first_content is None:
            # The headers leave before the first content: the engine's part is known, though not entered yet.
            known += self._engine_spans(self._clock.now())
        return ", ".join(f"{span.stage};dur={_ms(span.end - span.start)}" for span in known)


def _ms(seconds: float) -> float:
    return round(seconds * 1000.0, 3)


class Ledgers:
    """The ledgers of running requests, and a bounded number of recent ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running: dict[str, Ledger] = {}
        self._recent: OrderedDict[str, Ledger] = OrderedDict()

    def open(self, request_id: str, ledger: Ledger) -> None:
        """Register a running request; its id must be free."""
        assert request_id not in self._running, request_id
        self._running[request_id] = ledger

    def close(self, request_id: str, *, keep: bool = True) -> None:
        """Move a request to the recent ones, dropping the oldest beyond the limit; or forget it."""
        ledger = self._running.pop(request_id, None)
        if ledger is None or not keep:
            return
        self._recent[request_id] = ledger
        self._recent.move_to_end(request_id)
        while len(self._recent) > self._limit:
            self._recent.popitem(last=False)

    def is_running(self, request_id: str) -> bool:
        """Say whether the id is taken by a running request."""
        return request_id in self._running

    def get(self, request_id: str) -> Ledger | None:
        """Return the ledger of a running or recent request."""
        return self._running.get(request_id) or self._recent.get(request_id)

    def __len__(self) -> int:
        return len(self._running)
