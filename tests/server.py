"""Runs `headway serve` as a user would, in a process of its own, on a free port of the loopback address."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

READY = re.compile(r"^ready (http://\S+) model=(\S+) start=([0-9.]+)$")


class Server:
    """A running server; ``lines`` is everything that it printed on stdout so far."""

    def __init__(self, process: subprocess.Popen[str], url: str, model: str, start_s: float, lines: list[str]) -> None:
        self.process = process
        self.url = url
        self.model = model
        self.start_s = start_s
        self.lines = lines

    def get(self, path: str) -> Any:
        """Return a JSON answer."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)

    def load(self) -> dict[str, Any]:
        """Return /health/load."""
        load: dict[str, Any] = self.get("/health/load")
        return load

    def until_idle(self, limit_s: float = 2.0) -> dict[str, Any]:
        """Wait until nothing runs, waits or holds blocks."""
        deadline = time.monotonic() + limit_s
        while True:
            load = self.load()
            if load["running"] == load["waiting"] == load["blocks_held"] == 0:
                return load
            assert time.monotonic() < deadline, load
            time.sleep(0.02)

    def engine_pid(self) -> int:
        """Return the process id of the engine, the server's child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="ascii")
        for child in children.split():
            if "headway.engine.worker" in Path(f"/proc/{child}/cmdline").read_text(encoding="utf-8"):
                return int(child)
        raise AssertionError(f"no engine among the children {children!r}")

    def terminate(self, limit_s: float = 15.0) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)


def environ() -> dict[str, str]:
    """Return an environment in which the package is found from any folder, and Python buffers as it does by default."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**plain, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextlib.contextmanager
def serving(model: Path | str, *arguments: str, log: Path | None = None, limit_s: float = 60.0) -> Iterator[Server]:
    """Start a server, yield it when it is ready, end it."""
    argv = [sys.executable, "-m", "headway.cli", "serve", str(model), "--port", "0", *arguments]
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("w")) if log else subprocess.DEVNULL
        process = stack.enter_context(
            subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ())
        )
        stack.callback(_end, process)
        watchdog = threading.Timer(limit_s, process.kill)
        watchdog.start()
        assert process.stdout is not None
        first = process.stdout.readline()
        watchdog.cancel()
        match = READY.match(first.strip())
        assert match is not None, f"no ready line but {first!r}; {log.read_text() if log else ''}"
        lines = [first]
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
        reader.start()
        yield Server(process, match[1], match[2], float(match[3]), lines)
        _end(process)
        reader.join(5)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
