"""The one clock: monotonic seconds, the same in every process of a machine; tests put a fake in its place."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time in seconds since an arbitrary, machine-wide origin; never goes back."""

    def now(self) -> float:
        """Return the present instant."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC, which Linux shares between processes."""

    def now(self) -> float:
        """Return the present instant."""
        return time.monotonic()


class FakeClock:
    """A clock that stands still until it is told to advance."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def now(self) -> float:
        """Return the instant that was set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (never back)."""
        assert seconds >= 0.0
        self._now += seconds
