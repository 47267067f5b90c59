"""The reference on real weights against what transformers computed in float32 (``tests/data/golden``).

The files are looked for in HEADWAY_MODELS, a directory of ``<alias>.gguf``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.config import EngineConfig
from headway.engine.runner import Runner, load_runner
from headway.engine.work import Work
from headway.models.checkpoint import open_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
TABLE = range(64)


def open_runner(alias: str) -> Runner:
    folder = os.environ.get("HEADWAY_MODELS")
    path = Path(folder or ".") / f"{alias}.gguf"
    if not folder or not path.exists():
        pytest.skip(f"HEADWAY_MODELS has no {alias}.gguf")
    return load_runner(open_checkpoint(path), EngineConfig(kernels="reference"), n_blocks=len(TABLE))


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))


def check_answer(runner: Runner, item: dict[str, Any]) -> None:
    prompt, wanted = item["prompt_token_ids"], item["greedy_token_ids"]
    logits = runner.run([Work(prompt, 0, TABLE, 1)])
    first = log_softmax(logits[0])
    for token_id, logprob in item["first_step_top8"]:
        assert first[token_id] == pytest.approx(logprob, abs=1e-3)
    for i, token_id in enumerate(wanted):
        chosen = int(logits[0].argmax())
        assert chosen == token_id, f"step {i}: margin of the golden run {item['top1_top2_margin'][i]}"
        logits = runner.run([Work([token_id], len(prompt) + i, TABLE, 1)])


def check_golden(alias: str) -> None:
    runner = open_runner(alias)
    golden = json.loads((GOLDEN / f"{alias}.json").read_text(encoding="utf-8"))
    for item in golden["text"] + golden["chat"]:
        check_answer(runner, item)


def passage_logprob(runner: Runner, token_ids: list[int]) -> float:
    logprobs = log_softmax(runner.run([Work(token_ids, 0, TABLE, len(token_ids))]))
    return float(logprobs[np.arange(len(token_ids) - 1), token_ids[1:]].sum())


def test_smollm2_gives_the_golden_ids_and_logprobs() -> None:
    check_golden("smollm2-135m")


def test_qwen2_5_gives_the_golden_ids_and_logprobs() -> None:
    check_golden("qwen2.5-coder-0.5b")
