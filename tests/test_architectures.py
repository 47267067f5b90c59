"""Checkpoints that transformers saves, answered by the whole engine as transformers answers them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headway.llm import LLM
from tests.models.conformance import randomize, transformers_logits
from tests.server import serving
from tests.tiny import make_tokenizer

PROMPTS = ("the quick brown fox", "def add(a, b):\n    return", "a token is a piece of text " * 6)
COUNT = 24
"""Tokens of each answer."""
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": False}),
    "llama-3": ("Llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 20}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 3, "head_dim": 16, "tie_word_embeddings": False}),
    "gemma3": ("Gemma3", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20, "num_hidden_layers": 6}),
}


def save(folder: Path, name: str, *, dtype: str = "float32", shard: str = "5GB") -> Path:
    """Write a random model and its tokenizer as transformers does."""
    import torch
    import transformers

    family, changes = MODELS[name]
    kind = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(**{**SHAPE, **changes, "vocab_size": make_tokenizer(folder)})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    return folder


def reference(folder: Path) -> Any:
    """Return what transformers makes of the directory, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def expected(model: Any, prompt: tuple[int, ...], **options: Any) -> list[int]:
    import torch

    # An end token that cannot come: random weights would stop at any time.
    settings = {"do_sample": False, "max_new_tokens": COUNT, "eos_token_id": None, "pad_token_id": 0, **options}
    ids = torch.tensor([list(prompt)])
    generated: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
    return generated[len(prompt) :]


def loaded(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), kernels="reference", kv_memory="8MB", block_tokens=16, threads=1, **settings)


def check(folder: Path) -> None:
    model = reference(folder)
    with loaded(folder) as llm:
        for answer in llm.generate(list(PROMPTS), temperature=0.0, max_tokens=COUNT, ignore_eos=True):
            assert list(answer.token_ids) == expected(model, answer.prompt_token_ids)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    check(save(tmp_path, name))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_in_several_shards_gives_the_same(dtype: str, tmp_path: Path) -> None:
    folder = save(tmp_path, "llama-3", dtype=dtype, shard="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    check(folder)


def test_a_saved_model_is_served(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen3", dtype="bfloat16", shard="30KB")
    prompt = [5, 6, 7, 8, 9, 10, 11]
    with serving(folder, "--kv-memory", "8MB", "--threads", "1") as server:
        body = {"prompt": prompt, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()
    assert answer["choices"][0]["token_ids"] == expected(reference(folder), tuple(prompt))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LLM]]:
    folder = save(tmp_path_factory.mktemp("llama"), "llama-2")
    with loaded(folder) as llm:
        yield reference(folder), llm


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_logprobs_order_is_that_of_the_models_log_softmax_before_penalties(
    llama: tuple[Any, LLM], penalty: float
) -> None:
    model, llm = llama
    (answer,) = llm.generate(
        PROMPTS[0], temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=5, repetition_penalty=penalty
    )
    prompt = answer.prompt_token_ids
    assert list(answer.token_ids) == expected(model, prompt, repetition_penalty=penalty)
    logits = transformers_logits(model, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1].astype(np.float64)
    truth = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, entry in zip(truth, answer.logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert [other.logprob for other in entry.top] == pytest.approx(sorted(row)[:-6:-1], abs=1e-4)


def test_prompt_logprobs_are_the_models(llama: tuple[Any, LLM]) -> None:
    model, llm = llama
    (answer,) = llm.generate(PROMPTS[2], temperature=0.0, max_tokens=0, prompt_logprobs=2)
    prompt = list(answer.prompt_token_ids)
    logits = transformers_logits(model, prompt).astype(np.float64)
    truth = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert answer.prompt_logprobs[0] is None
    found = [entry.logprob for entry in answer.prompt_logprobs if entry is not None]
    assert found == pytest.approx([truth[i, token] for i, token in enumerate(prompt[1:])], abs=1e-4)


def test_prefix_exact_at_block_boundaries_on_a_model(llama: tuple[Any, LLM]) -> None:
    _, llm = llama
    ids = tuple(3 + (i * 7) % 250 for i in range(49))
    with loaded(llm.path, prefix_cache=False) as plain:
        for count, cached in ((48, 0), (48, 32), (49, 48), (47, 32), (33, 32), (32, 16)):
            (answer,) = llm.generate([ids[:count]], temperature=0.0, max_tokens=12, ignore_eos=True)
            (alone,) = plain.generate([ids[:count]], temperature=0.0, max_tokens=12, ignore_eos=True)
            assert answer.token_ids == alone.token_ids, count
            assert answer.usage.cached_tokens == cached, count


def test_preempt_cycle_on_a_model_changes_no_token(llama: tuple[Any, LLM]) -> None:
    """Recomputed keys and values give the tokens that each gets alone: blocks for three sequences, six of them run."""
    _, llm = llama
    prompts = [tuple(3 + (7 * i + 11 * k) % 250 for i in range(16)) for k in range(6)]
    alone = [llm.generate([p], temperature=0.0, max_tokens=80, ignore_eos=True)[0].token_ids for p in prompts]
    block = 2 * 4 * 2 * 48 * 16  # bytes of a block: K and V, float32, 2 layers, all heads
    with LLM(
        str(llm.path), kernels="reference", kv_memory=str(3 * 6 * block), block_tokens=16, threads=1, prefix_cache=False
    ) as tight:
        assert tight.started.n_blocks == 18
        answers = tight.generate(prompts, temperature=0.0, max_tokens=80, ignore_eos=True)
        load = tight.engine.load()
    assert [answer.token_ids for answer in answers] == alone
    assert 1 <= load.preemptions <= 6
    assert (load.blocks_held, load.integrity) == (0, "")
