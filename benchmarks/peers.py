"""headway against its peers on the same files, in one interleaved run.

usage: python -m benchmarks.peers --install llama.cpp          (a virtual environment under benchmarks/.peers)
       python -m benchmarks.peers [--model smollm2-135m] [--repeats 5] [--threads 2] [--kernels cpu]
A peer that is not installed is left out, with a line that says so. Prompts are token ids of the same count for all;
peers run in processes of their own, one at a time. Prints a table for docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, head
from headway.config import environment
from headway.llm import LLM
from headway.models.pull import obtain
from headway.workload import EngineWorkload

FOLDER = ROOT / "benchmarks" / ".peers"
DECODE = [(1, 64), (1, 512), (4, 64), (8, 64), (16, 64), (32, 64), (16, 512)]
PREFILL = [128, 512, 2048]
STEPS = 8
PEERS: dict[str, dict[str, Any]] = {
    "llama.cpp": {
        "packages": ["llama-cpp-python==0.3.36"],
        "environment": {"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": "2"},
        "script": "llama_cpp_runner.py",
    },
}


def python_of(name: str) -> Path:
    """Return the interpreter of a peer's environment, there or not."""
    return FOLDER / name / "bin" / "python"


def install(name: str) -> None:
    """Make the peer's environment; llama.cpp is compiled for this machine, which takes some minutes."""
    peer = PEERS[name]
    venv.create(FOLDER / name, with_pip=True)
    subprocess.run(
        [python_of(name), "-m", "pip", "install", "-q", *peer["packages"]],
        check=True,
        env={**os.environ, **peer["environment"]},
    )


class Peer:
    """A peer's runner process."""

    def __init__(self, name: str, path: Path, threads: int) -> None:
        self.name = name
        script = ROOT / "benchmarks" / "peer" / PEERS[name]["script"]
        self._process = subprocess.Popen(
            [python_of(name), script, path, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = self._answer()
        self.version, self.load_s = hello["version"], hello["load_s"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def seconds(self, **request: Any) -> float:
        """Run one case."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def main() -> None:
    """Print tokens/s of all and the ratio to each peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", choices=PEERS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto")
    arguments = parser.parse_args()
    if arguments.install:
        install(arguments.install)
        return
    path = obtain(arguments.model, environment())
    for name in PEERS:
        if not python_of(name).exists():
            print(f"{name} is left out: python -m benchmarks.peers --install {name}", file=sys.stderr)
    peers = [Peer(name, path, arguments.threads) for name in PEERS if python_of(name).exists()]
    llm = LLM(arguments.model, threads=arguments.threads, kernels=arguments.kernels, prefix_cache=False)
    ours = EngineWorkload(llm)
    named = [f"{peer.name} ({peer.version})" for peer in peers]
    columns = ("figure", f"headway ({llm.started.kernels}, {llm.started.isa})", *named, *(f"of {n}" for n in named))
    head(f"benchmarks.peers --model {arguments.model}", columns)
    load = [f"{llm.started.seconds:.2f} s", *(f"{peer.load_s:.2f} s" for peer in peers), *("" for _ in peers)]
    print(f"| load | {' | '.join(load)} |")
    for batch, context in DECODE:
        rows: list[list[float]] = [[] for _ in range(1 + len(peers))]
        for _ in range(arguments.repeats):
            rows[0].append(batch / ours.decode_step_s(batch, context))
            for peer, row in zip(peers, rows[1:], strict=True):
                row.append(batch / peer.seconds(kind="decode", batch=batch, context=context, steps=STEPS))
        show(f"decode, batch {batch}, context {context}", rows)
    for tokens in PREFILL:
        rows = [[] for _ in range(1 + len(peers))]
        for _ in range(arguments.repeats):
            rows[0].append(tokens / ours.prefill_s(tokens))
            for peer, row in zip(peers, rows[1:], strict=True):
                row.append(tokens / peer.seconds(kind="prefill", tokens=tokens))
        show(f"prefill {tokens}", rows)
    for peer in peers:
        peer.close()


def show(figure: str, rows: list[list[float]]) -> None:
    """Print tokens/s, the first row's ratio to each other, and the spread."""
    cells = [f"{statistics.median(row):,.0f} ({min(row):,.0f} to {max(row):,.0f})" for row in rows]
    for row in rows[1:]:
        ratios = [mine / theirs for mine, theirs in zip(rows[0], row, strict=True)]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"| {figure}, tokens/s | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
