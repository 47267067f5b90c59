"""The reference on real weights against what transformers computed in float32 (``tests/data/golden``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.config import EngineConfig, environment
from headway.engine.runner import Runner, load_runner
from headway.engine.tokenizer import load_tokenizer
from headway.engine.work import Work
from headway.models.checkpoint import Checkpoint, open_checkpoint
from headway.models.pull import resolve

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
TABLE = range(64)


def open_model(alias: str) -> tuple[Checkpoint, Runner]:
    checkpoint = open_checkpoint(resolve(alias, environment()))
    return checkpoint, load_runner(checkpoint, EngineConfig(kernels="reference"), n_blocks=len(TABLE))


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
    checkpoint, runner = open_model(alias)
    golden = json.loads((GOLDEN / f"{alias}.json").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(checkpoint)
    for passage in golden["passages"]:
        token_ids = tokenizer.encode(passage["text"])
        assert len(token_ids) == passage["n_tokens"]
        assert passage_logprob(runner, token_ids) == pytest.approx(passage["sum_logprob"], abs=0.01, rel=1e-4)
    for item in golden["text"] + golden["chat"]:
        check_answer(runner, item)


def passage_logprob(runner: Runner, token_ids: list[int]) -> float:
    logprobs = log_softmax(runner.run([Work(token_ids, 0, TABLE, len(token_ids))]))
    return float(logprobs[np.arange(len(token_ids) - 1), token_ids[1:]].sum())


def test_smollm2_gives_the_golden_ids_and_logprobs() -> None:
    check_golden("smollm2-135m")


def test_qwen2_5_gives_the_golden_ids_and_logprobs() -> None:
    check_golden("qwen2.5-coder-0.5b")


def test_gemma3_equals_transformers_beyond_its_window() -> None:
    """The same weights in both; 600 tokens, so that the layers with a window of 512 drop the first ones."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    checkpoint, runner = open_model("gemma3-270m")
    shape = checkpoint.config
    config = Gemma3TextConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_width,
        sliding_window=512,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    state = {name: torch.from_numpy(checkpoint.tensor(name).float32()) for name in checkpoint.names()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.to_empty(device="cpu")
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.embed_tokens.embed_scale = torch.tensor(shape.hidden**0.5)
    golden = json.loads((GOLDEN / "smollm2-135m.json").read_text(encoding="utf-8"))
    text = " ".join(passage["text"] for passage in golden["passages"])
    token_ids = (load_tokenizer(checkpoint).encode(text) * 20)[:600]
    with torch.no_grad():
        wanted = model.eval()(torch.tensor([token_ids]), logits_to_keep=16).logits[0].numpy()
    found = runner.run([Work(token_ids, 0, TABLE, 16)])
    np.testing.assert_allclose(log_softmax(found), log_softmax(wanted), atol=1e-3)
    assert passage_logprob(runner, token_ids[:60]) / 59 > -4, "perplexity of plain prose above 55"
