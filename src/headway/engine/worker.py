"""The engine process: take messages, step, send what came out, report; ends when its parent is gone."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading

import msgspec

from headway.engine.channel import Channel, Disconnected
from headway.engine.engine import Engine
from headway.engine.launch import launch
from headway.engine.launch_spec import EngineSpec
from headway.engine.messages import Abort, AbortWaiting, Failed, Status, Stop, Submit, Trace
from headway.errors import HeadwayError
from headway.telemetry.clock import MonotonicClock
from headway.telemetry.log import setup_logging
from headway.types import Load

STATUS_EVERY_S = 0.05


class Heartbeat(threading.Thread):
    """Tells the API process that this process is scheduled, and since when its present step has been running.

    A thread of its own: a step may take seconds, and the kernels let go of the GIL. A stopped process sends nothing.
    """

    def __init__(self, channel: Channel, every_s: float) -> None:
        super().__init__(daemon=True, name="heartbeat")
        self._channel = channel
        self._every_s = every_s
        self._done = threading.Event()
        self.load = Load()
        self.busy_since: float | None = None

    def run(self) -> None:
        """Send a bare Status at every interval."""
        with contextlib.suppress(Disconnected):
            while not self._done.wait(self._every_s):
                self._channel.send([Status(load=self.load, busy_since=self.busy_since)])

    def end(self) -> None:
        """Stop beating."""
        self._done.set()


def run_loop(engine: Engine, channel: Channel, beat: Heartbeat) -> None:
    """Turn until told to stop: receive, step, send, report."""
    clock = MonotonicClock()
    reported = 0.0
    quiet = False
    while True:
        for message in channel.receive(0.0 if engine.has_work else 1.0):
            match message:
                case Submit():
                    engine.submit(message)
                case Abort():
                    engine.abort(message)
                case AbortWaiting():
                    engine.abort_waiting(message)
                case Trace():
                    engine.trace(message.steps)
                case Stop():
                    return
            quiet = False
        if engine.has_work:
            beat.busy_since = clock.now()
            channel.send(engine.step())
            beat.busy_since = None
            quiet = False
        now = clock.now()
        if not quiet and (now - reported >= STATUS_EVERY_S or not engine.has_work):
            status = engine.take_status()
            beat.load = status.load
            channel.send([status])
            reported = now
            quiet = not engine.has_work


def _end_with_parent() -> None:
    """Have the kernel end this process with its parent: a stopped process would never read that it is gone."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere the closed socket has to do
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> int:
    """Run the engine that the parent described; ``argv``: the socket's file descriptor and the spec as JSON."""
    # Terminals, service managers and `timeout` signal the whole group; the parent drains, then says Stop or goes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent()
    setup_logging(level=logging.WARNING)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    spec = msgspec.json.decode(sys.argv[2], type=EngineSpec)
    beat = Heartbeat(channel, spec.config.heartbeat_s)
    try:
        beat.start()
        try:
            engine, _, started = launch(spec)
        except HeadwayError as error:
            channel.send([Failed(code=error.code, message=error.message)])
            return 1
        except MemoryError:
            channel.send([Failed(code="out_of_memory", message="the model does not fit this machine's memory")])
            return 1
        gc.collect()
        gc.freeze()  # what was loaded stays; later collections need not walk it
        status = engine.take_status()
        beat.load = status.load
        channel.send([started, status])
        run_loop(engine, channel, beat)
    except Disconnected:
        return 0
    finally:
        beat.end()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # skips the teardown of gigabytes
