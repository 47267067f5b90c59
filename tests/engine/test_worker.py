"""The engine process's loop: what it says while it runs, while a step is stuck, and when it ends a request."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from headway.engine.channel import Channel
from headway.engine.messages import (
    Abort,
    Emitted,
    FromEngine,
    Status,
    Stop,
    ToEngine,
    decode_from_engine,
)
from headway.engine.worker import Heartbeat, run_loop
from headway.telemetry.clock import MonotonicClock
from tests.engine.fake_runner import Bench, submit


class Loop:
    """``run_loop`` in a thread, and the other end of its channel."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._ours = ours
        self._parent = Channel(ours)
        self.bench = Bench()
        self.bench.engine.clock = MonotonicClock()
        channel = Channel(theirs)
        self._theirs = theirs
        self.beat = Heartbeat(channel, 0.02)
        self._thread = threading.Thread(target=run_loop, args=(self.bench.engine, channel, self.beat))
        self._buffer = bytearray()
        self.beat.start()
        self._thread.start()

    def send(self, *messages: ToEngine) -> None:
        self._parent.send(list(messages))  # type: ignore[arg-type]

    def heard(self, limit_s: float = 5.0) -> Iterator[FromEngine]:
        """Yield messages as they come, for at most ``limit_s``."""
        deadline = time.monotonic() + limit_s
        self._ours.settimeout(0.05)
        while time.monotonic() < deadline:
            while len(self._buffer) >= 4 and len(self._buffer) >= 4 + int.from_bytes(self._buffer[:4], "little"):
                end = 4 + int.from_bytes(self._buffer[:4], "little")
                yield from decode_from_engine(bytes(self._buffer[4:end]))
                del self._buffer[:end]
            try:
                self._buffer += self._ours.recv(1 << 16)
            except TimeoutError:
                continue
        raise AssertionError("what was waited for did not come")

    def close(self) -> None:
        self.send(Stop())
        self._thread.join(5)
        assert not self._thread.is_alive()
        self.beat.end()
        self.beat.join(5)
        self._ours.close()
        self._theirs.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    running = Loop()
    yield running
    running.close()


def test_an_answer_comes_out_and_the_idle_engine_reports_nothing_held(loop: Loop) -> None:
    loop.send(submit("a", (1, 2, 3), ignore_eos=True))
    tokens: list[int] = []
    for message in loop.heard():
        if isinstance(message, Emitted):
            tokens += message.token_ids
            if message.finish is not None:
                break
    assert tokens == loop.bench.runner.greedy((1, 2, 3), 8)
    status = next(m for m in loop.heard() if isinstance(m, Status) and m.load.steps == 8)
    assert (status.load.running, status.load.blocks_held) == (0, 0)


def test_health_hung_a_stuck_step_says_since_when(loop: Loop) -> None:
    stuck = threading.Event()

    def stick(work: object) -> None:
        stuck.wait(5)

    loop.bench.runner.before_run = stick
    began = time.monotonic()
    loop.send(submit("a", (1, 2, 3), max_tokens=1))
    try:
        beats = (m for m in loop.heard() if isinstance(m, Status) and m.busy_since is not None)
        first, second = next(beats), next(beats)
        assert first.busy_since == second.busy_since, "the same step"
        assert first.busy_since is not None
        assert first.busy_since >= began
    finally:
        stuck.set()
    assert next(m for m in loop.heard() if isinstance(m, Emitted))


def test_the_time_to_free_counts_from_the_decision_and_not_from_the_end_of_the_step(loop: Loop) -> None:
    entered, go = threading.Event(), threading.Event()

    def hold(work: object) -> None:
        entered.set()
        go.wait(5)

    loop.bench.runner.before_run = hold
    loop.send(submit("a", (1, 2, 3), max_tokens=50, ignore_eos=True))
    assert entered.wait(5)
    loop.send(Abort(id="a", since=time.monotonic()))
    time.sleep(0.1)
    go.set()
    freed = next(m.freed for m in loop.heard() if isinstance(m, Status) and m.freed)
    ((phase, cause, seconds),) = freed
    assert (phase, cause) == ("decode", "disconnect")
    assert 0.1 <= seconds < 2.0
