"""What a busy neighbour on one core costs: decode steps alone and beside a process pinned to it, in turns.

usage: python -m benchmarks.neighbour [--model smollm2-135m] [--batch 1] [--context 512] [--seconds 4] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.common import head, row
from headway.llm import LLM
from headway.workload import EngineWorkload


@contextmanager
def busy(core: int) -> Iterator[None]:
    """Keep a core busy by a process of its own."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(0.3)
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Print tokens/s and step times of both, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    with LLM(arguments.model, prefix_cache=False) as llm:
        workload = EngineWorkload(llm)

        def steps() -> list[float]:
            found: list[float] = []
            began = time.perf_counter()
            while time.perf_counter() - began < arguments.seconds:
                found += workload.decode_steps_s(arguments.batch, arguments.context)
            return found

        alone, beside = [], []
        for _ in range(arguments.rounds):
            alone.append(steps())
            with busy(core):
                beside.append(steps())
    head(f"benchmarks.neighbour --model {arguments.model} --batch {arguments.batch}")
    for name, rounds in (("alone", alone), (f"beside a process on core {core}", beside)):
        row(f"{name}: tokens/s", [arguments.batch * len(one) / sum(one) for one in rounds], "", digits=1)
        row(f"{name}: median step", [1e3 * statistics.median(one) for one in rounds], "ms", digits=2)
        row(f"{name}: p99 step", [1e3 * statistics.quantiles(one, n=100)[98] for one in rounds], "ms", digits=2)
    kept = [len(b) / sum(b) / (len(a) / sum(a)) for a, b in zip(alone, beside, strict=True)]
    row("throughput kept", kept, "", digits=2)
    spread = [statistics.quantiles(one, n=100)[98] / statistics.median(one) for one in beside]
    row("beside: p99 step over the median", spread, "", digits=2)


if __name__ == "__main__":
    main()
