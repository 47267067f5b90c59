"""Native kernels on the real SmolLM2: near float32, and the same tokens whatever happens around a request."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from headway.bench.divergence import divergence, summary
from headway.config import EngineConfig
from headway.engine.runner import Runner, load_runner
from headway.engine.tokenizer import load_tokenizer
from headway.engine.work import Work
from headway.kernels import has_native
from headway.llm import LLM
from headway.models.checkpoint import open_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

if not has_native():
    pytest.skip("built with HEADWAY_NATIVE=0", allow_module_level=True)

TABLE = range(12)
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived a clockmaker who " * 4,
    "1, 2, 3, 5, 8,",
    "In chemistry, an acid is",
)


@cache
def loaded(smollm2: Path, kernels: str) -> Runner:
    return load_runner(open_checkpoint(smollm2), EngineConfig(kernels=kernels), n_blocks=len(TABLE))  # type: ignore[arg-type]


def test_distributions_are_near_float32_on_the_same_weights(smollm2: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(smollm2))
    text = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    token_ids = tokenizer.encode(text)[: 32 * len(TABLE)]
    work = [Work(token_ids, 0, TABLE, len(token_ids))]
    found, wanted = (loaded(smollm2, kernels).run(work).copy() for kernels in ("cpu", "reference"))
    result = summary([divergence(found, wanted, token_ids)])
    assert result.positions > 300
    assert result.mean_kl < 0.006
    assert result.top1 > 0.93
    assert abs(result.perplexity_ratio - 1) < 0.01


def tokens(llm: LLM, *which: int) -> list[list[int]]:
    """Return the greedy tokens of some of the prompts, run together."""
    prompts = [PROMPTS[i] for i in which]
    return [list(answer.token_ids) for answer in llm.generate(prompts, max_tokens=32, temperature=0, ignore_eos=True)]


@pytest.fixture(scope="module")
def alone(smollm2: Path) -> list[list[int]]:
    with LLM(str(smollm2), kernels="cpu", threads=1, kv_memory="256MiB", prefix_cache=False) as llm:
        return [tokens(llm, i)[0] for i in range(len(PROMPTS))]


@pytest.mark.parametrize("step_tokens", [7, 256])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_greedy_tokens_are_the_same_in_company(
    smollm2: Path, alone: list[list[int]], threads: int, step_tokens: int, prefix_cache: bool
) -> None:
    order = np.random.default_rng(step_tokens + threads).permutation(len(PROMPTS)).tolist()
    with LLM(
        str(smollm2),
        kernels="cpu",
        threads=threads,
        kv_memory="256MiB",
        step_tokens=step_tokens,
        prefix_cache=prefix_cache,
    ) as llm:
        for _ in range(2):  # the second time from the prefix cache, where there is one
            assert tokens(llm, *order) == [alone[i] for i in order]
