"""The conversation of a runner with benchmarks/peers.py: a hello, then one answer to each line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def answer(make: Callable[[str, int], Any], version: str) -> None:
    """Make a runner of MODEL and THREADS, say how long that took, and time what is asked: its methods by name.

    What the libraries print goes to stderr: stdout is the conversation.
    """
    talk, sys.stdout = sys.stdout, sys.stderr
    began = time.perf_counter()
    runner = make(sys.argv[1], int(sys.argv[2]))
    runner.prefill(16)
    print(json.dumps({"version": version, "load_s": time.perf_counter() - began}), file=talk, flush=True)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        print(json.dumps({"seconds": getattr(runner, request.pop("kind"))(**request)}), file=talk, flush=True)
