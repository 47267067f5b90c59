"""Servers to load, each started in a process of its own, one at a time: headway, llama.cpp's and vLLM's."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from tests.server import serving

from headway.config import environment
from headway.models.pull import obtain

START_S = 600.0
"""vLLM compiles at each start."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A server that answers."""

    name: str
    url: str
    model: str
    pids: tuple[int, ...]

    def resident_mb(self) -> float:
        """Return the resident memory of its processes."""
        total = 0
        for pid in self.pids:
            text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
            total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS"))
        return total / 1024


@contextlib.contextmanager
def served(
    name: str, model: str, *, threads: int = 2, context: int = 4608, streams: int = 16, options: Sequence[str] = ()
) -> Iterator[Served]:
    """Start a server by name (headway, llama.cpp, vllm) and end it afterwards."""
    path = obtain(model, environment())
    if name == "headway":
        with serving(model, "--threads", str(threads), *options) as server:
            yield Served(name=name, url=server.url, model=server.model, pids=(server.process.pid, server.engine_pid()))
        return
    port = _free_port()
    with subprocess.Popen(
        _argv(name, path, model, port, threads, context, streams),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
    ) as process:
        try:
            _until_ready(process, f"http://127.0.0.1:{port}/health")
            yield Served(name=name, url=f"http://127.0.0.1:{port}", model=model, pids=(process.pid,))
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _argv(name: str, path: Path, model: str, port: int, threads: int, context: int, streams: int) -> list[str]:
    from benchmarks.peers import FOLDER, directory, server_binary

    if name == "llama.cpp":
        file = next(path.glob("*.gguf")) if path.is_dir() else path
        return [
            *(str(server_binary()), "-m", str(file), "--alias", model, "--host", "127.0.0.1", "--port", str(port)),
            *("-t", str(threads), "-tb", str(threads), "-np", str(streams), "-c", str(streams * context)),
            *("-b", "2048", "-ub", "512", "--no-webui"),
        ]
    return [
        *(str(FOLDER / "vllm" / "bin" / "vllm"), "serve", str(directory(model, path)), "--served-model-name", model),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(context)),
        *("--max-num-seqs", str(streams), "--no-enable-log-requests"),
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            sys.exit(f"{process.args!r} ended with status {process.returncode}")
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    sys.exit(f"{process.args!r} is not ready after {START_S:g} s")
