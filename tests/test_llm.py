"""The offline API: the same engine in this process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.errors import ContextExceeded, InvalidRequest
from headway.llm import LLM
from headway.types import Finish, Message


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), kv_memory="8MB", block_tokens=16, threads=1) as loaded:
        yield loaded


def test_prompts_are_answered_together_and_in_order(llm: LLM) -> None:
    prompts = [f"the quick brown fox {i} " * (i + 1) for i in range(8)]
    together = llm.generate(prompts, max_tokens=12, temperature=0.0, ignore_eos=True)
    alone = [llm.generate(prompt, max_tokens=12, temperature=0.0, ignore_eos=True)[0] for prompt in prompts]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert all(answer.finish is Finish.LENGTH for answer in together)


def test_ids_text_and_conversations_are_prompts(llm: LLM) -> None:
    ids = tuple(llm.tokenizer.encode("the lazy dog"))
    by_text = llm.generate("the lazy dog", max_tokens=6, temperature=0.0)[0]
    by_ids = llm.generate([ids], max_tokens=6, temperature=0.0)[0]
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.prompt_token_ids == ids
    talk = llm.chat([Message(role="user", content="hello")], max_tokens=6, temperature=0.0)
    assert talk.prompt_token_ids[0] == 1


def test_a_stream_joins_to_the_whole_answer(llm: LLM) -> None:
    whole = llm.generate("a token is", max_tokens=20, temperature=0.0)[0]
    chunks = list(llm.stream("a token is", max_tokens=20, temperature=0.0))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None


def test_a_stream_that_is_left_gives_its_blocks_back(llm: LLM) -> None:
    stream = llm.stream("a token is", max_tokens=500, temperature=0.0, ignore_eos=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    load = llm.engine.load()
    assert (load.running, load.waiting, load.blocks_held, load.integrity) == (0, 0, 0, "")


def test_a_refused_prompt_leaves_the_others_unrun(llm: LLM) -> None:
    with pytest.raises(ContextExceeded, match="2048"):
        llm.generate(["fine", "the " * 3000], max_tokens=4)
    assert llm.engine.load().running == 0
    assert len(llm.generate("fine", max_tokens=4, ignore_eos=True)[0].token_ids) == 4


def test_score_is_the_sum_of_the_prompts_logprobs(llm: LLM) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    ids = tuple(llm.tokenizer.encode(text))
    answer = llm.generate([ids], max_tokens=1, prompt_logprobs=0)[0]
    score = llm.score(text)
    assert score.n_tokens == len(ids)
    expected = sum(entry.logprob for entry in answer.prompt_logprobs if entry is not None)
    assert score.sum_logprob == pytest.approx(expected, abs=1e-4)


def test_a_text_longer_than_the_context_is_scored_in_windows(tiny_model: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 20
    with LLM(str(tiny_model), kv_memory="8MB", context_tokens=64, threads=1) as short:
        windowed = short.score(text)
    with LLM(str(tiny_model), kv_memory="8MB", threads=1) as long:
        whole = long.score(text)
    assert windowed.n_tokens == whole.n_tokens > 128
    # Every token is counted once; windows see less context, so the figures differ, but not in kind.
    assert windowed.perplexity == pytest.approx(whole.perplexity, rel=0.5)


def test_n_is_refused_with_the_way_out(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="repeat the prompt"):
        llm.generate("x", n=2)


def test_windows_of_a_score_overlap_by_half(llm: LLM, tiny_model: Path) -> None:
    text = "the quick brown fox jumps over a lazy dog and a token " * 8
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 80
    expected = 0.0
    for begin in range(0, len(ids), 16):  # windows of 31 tokens, each with the last 15 of the one before
        window = ids[begin : begin + 31]
        (answer,) = llm.generate([tuple(window)], max_tokens=0, prompt_logprobs=0)
        expected += sum(entry.logprob for entry in answer.prompt_logprobs[15 if begin else 1 :] if entry is not None)
    with LLM(str(tiny_model), kv_memory="8MB", block_tokens=16, threads=1, context_tokens=32) as short:
        score = short.score(text)
    assert score.n_tokens == len(ids)
    assert score.sum_logprob == pytest.approx(expected, abs=1e-3)
    assert score.perplexity == pytest.approx(math.exp(-score.sum_logprob / (len(ids) - 1)))
