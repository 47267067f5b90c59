"""The whole engine on the real SmolLM2 against what transformers computed: ids, texts and log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.llm import LLM, Completion
from headway.types import Message

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "golden" / "smollm2-135m.json").read_text(encoding="utf-8")
)
ANSWERS: list[dict[str, Any]] = GOLDEN["text"] + GOLDEN["chat"]
LONGEST = 64


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(str(smollm2), kernels="reference", kv_memory="600MB") as loaded:
        yield loaded


def check(answer: Completion, item: dict[str, Any]) -> None:
    wanted = item["greedy_token_ids"]
    assert list(answer.prompt_token_ids) == item["prompt_token_ids"]
    assert list(answer.token_ids) == wanted
    assert answer.text == item["greedy_text"].removesuffix("<|im_end|>")
    first = {entry.token_id: entry.logprob for entry in answer.logprobs[0].top}
    assert [token_id for token_id, _ in item["first_step_top8"]] == list(first)
    for token_id, logprob in item["first_step_top8"]:
        assert first[token_id] == pytest.approx(logprob, abs=1e-3)
    for entry in answer.logprobs:
        assert entry.logprob == entry.top[0].logprob, "greedy: the chosen token is the best"


def prompt_of(item: dict[str, Any]) -> str | list[Message]:
    return [Message(**message) for message in item["messages"]] if "messages" in item else str(item["prompt"])


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_text_and_conversations_give_the_golden_ids_one_by_one(llm: LLM, number: int) -> None:
    item = ANSWERS[number]
    count = len(item["greedy_token_ids"])
    check(llm.generate([prompt_of(item)], max_tokens=count, temperature=0.0, logprobs=8)[0], item)


def test_all_together_with_a_warm_cache_they_give_the_same_up_to_a_step_of_tiny_margin(llm: LLM) -> None:
    """BLAS rounds differently by shape, so a step whose two best tokens are all but equal may go either way."""
    answers = llm.generate([prompt_of(item) for item in ANSWERS], max_tokens=LONGEST, temperature=0.0)
    for answer, item in zip(answers, ANSWERS, strict=True):
        assert answer.usage.cached_tokens <= len(item["prompt_token_ids"]) - 1
        pairs = zip(answer.token_ids, item["greedy_token_ids"], item["top1_top2_margin"], strict=False)
        differing = next((margin for found, wanted, margin in pairs if found != wanted), None)
        assert differing is None or differing < 0.01


def test_passages_have_the_golden_log_probability(llm: LLM) -> None:
    for passage in GOLDEN["passages"]:
        score = llm.score(passage["text"])
        assert score.n_tokens == passage["n_tokens"]
        assert score.sum_logprob == pytest.approx(passage["sum_logprob"], abs=1e-3 * passage["n_tokens"])
        assert score.perplexity == pytest.approx(passage["perplexity"], rel=1e-3)


def test_eval_prints_the_golden_log_probability(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passage = GOLDEN["passages"][0]
    text = tmp_path / "passage.txt"
    text.write_text(passage["text"], encoding="utf-8")
    options = ["--json", "--kv-memory", "200MB", "--kernels", "reference"]
    assert main(["eval", str(smollm2), "--text-file", str(text), *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["n_tokens"] == passage["n_tokens"]
    assert printed["sum_logprob"] == pytest.approx(passage["sum_logprob"], abs=0.01)
