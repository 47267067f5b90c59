"""How well steps are predicted: at the first start, at a later one, and in steady load.

usage: python -m benchmarks.cost [--models smollm2-135m,qwen2.5-coder-0.5b] [--seconds 20]
Requests of mixed lengths keep eight sequences running; an error is |predicted - took| / took of a step. Prints a table
for docs/performance.md.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import head
from headway.bench.measure import percentile
from headway.config import environment
from headway.engine.messages import Submit
from headway.llm import LLM
from headway.types import Params, StepReport

RUNNING = 8


def load(llm: LLM, seconds: float, seed: int) -> list[StepReport]:
    """Keep the engine busy for a while and return what its steps took and had been predicted to take."""
    rng = random.Random(seed)
    engine, clock = llm.engine, llm.engine.clock
    reports: list[StepReport] = []
    count, until = 0, clock.now() + seconds
    while clock.now() < until:
        while engine.load().running + engine.load().waiting < RUNNING:
            count += 1
            prompt = rng.choice((20, 60, 120, 400, 1500))
            engine.submit(
                Submit(
                    id=f"{seed}/{count}",
                    token_ids=tuple(rng.randrange(5, 40_000) for _ in range(prompt)),
                    params=Params(max_tokens=rng.randrange(5, 80), temperature=0.0, ignore_eos=True),
                    itl_s=0.1,
                )
            )
        engine.step()
        reports += engine.take_status().steps
    return reports


def errors(reports: Sequence[StepReport]) -> list[float]:
    """Return the relative errors."""
    return [abs(step.predicted - step.seconds) / step.seconds for step in reports]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="smollm2-135m,qwen2.5-coder-0.5b")
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    columns = ("model", "start", "calibrated in", "steps", "median error", "of the first 50", "p90", "decodes alone")
    head(f"benchmarks.cost --models {arguments.models}", columns)
    kept = environment().cache / "cost"
    with tempfile.TemporaryDirectory() as folder:
        aside = Path(folder) / "cost"
        if kept.exists():
            shutil.move(kept, aside)
        try:
            for model in arguments.models.split(","):
                for start in ("first", "later"):
                    with LLM(model, prefix_cache=False) as llm:
                        reports = load(llm, arguments.seconds, seed=len(start))
                        found = errors(reports)
                        alone = errors([step for step in reports if not step.prefill_tokens])
                        print(
                            f"| {model} | {start} | {1e3 * llm.started.calibrated_s:.0f} ms | {len(found)}"
                            f" | {percentile(found, 0.5):.1%} | {percentile(found[:50], 0.5):.1%}"
                            f" | {percentile(found, 0.9):.1%} | {percentile(alone, 0.5):.1%} |",
                            flush=True,
                        )
        finally:
            shutil.rmtree(kept, ignore_errors=True)
            if aside.exists():
                shutil.move(aside, kept)


if __name__ == "__main__":
    main()
