from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import EngineConfig
from headway.engine.runner import PoolSize, Runner, load_runner, pack
from headway.engine.work import Work
from headway.errors import CheckpointError, ConfigError
from headway.kernels.machine import Finding
from headway.models import architectures, load
from headway.models.config import ModelConfig
from tests.models.conformance import MemoryCheckpoint

MIB = 2**20
CONFIG = ModelConfig(
    architecture="llama",
    vocabulary=40,
    hidden=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=4,
    intermediate=24,
    context=64,
    norm_eps=1e-5,
    tied=True,
)


def checkpoint(**changes: Any) -> MemoryCheckpoint:
    from headway.kernels.plan import record, weight_shapes

    config = CONFIG
    plan = record(lambda ops: load(config.architecture).forward(ops, config))
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal([size or 1 for size in shape], dtype=np.float32) / np.float32(4)
        for name, shape in weight_shapes(plan).items()
    }
    return MemoryCheckpoint(config, {**arrays, **changes})


def make_runner(n_blocks: int = 16) -> Runner:
    return load_runner(checkpoint(), EngineConfig(kernels="reference", threads=1, block_tokens=4), n_blocks=n_blocks)


def test_pack_lays_work_out_in_order() -> None:
    batch = pack(
        [Work([5], 8, [3, 1, 2], 1), Work([7, 8, 9], 0, [4], 0), Work([1, 2], 3, (6, 5), 2)],
        block_tokens=4,
    )
    assert batch.token_ids.tolist() == [5, 7, 8, 9, 1, 2]
    assert batch.positions.tolist() == [8, 0, 1, 2, 3, 4]
    assert batch.starts.tolist() == [0, 1, 4, 6]
    assert batch.lengths.tolist() == [9, 3, 5]
    assert batch.tables.tolist() == [[3, 1, 2], [4, 0, 0], [6, 5, 0]]
    assert batch.logit_rows.tolist() == [0, 4, 5]
    assert all(array.dtype == np.int32 for array in (batch.token_ids, batch.tables, batch.logit_rows))


def test_pack_copies_no_more_of_a_table_than_the_step_reads() -> None:
    assert pack([Work([1], 4, list(range(100)), 1)], block_tokens=4).tables.shape == (1, 2)


@pytest.mark.parametrize(
    "bad", [Work([], 0, [1], 0), Work([1], 0, [1], 2), Work([1], 4, [1], 1)], ids=["empty", "logits", "blocks"]
)
def test_pack_refuses_impossible_work(bad: Work) -> None:
    with pytest.raises(AssertionError):
        pack([bad], block_tokens=4)


def test_rows_of_logits_come_in_the_order_of_work_and_only_where_wanted() -> None:
    runner = make_runner()
    whole = runner.run([Work([1, 2, 3, 4, 5], 0, [0, 1], 5)]).copy()
    assert whole.shape == (5, 40)
    assert whole.dtype == np.float32
    none = runner.run([Work([1, 2, 3], 0, [2], 0)])
    assert none.shape == (0, 40)
    mixed = runner.run([Work([4], 3, [2], 1), Work([9], 0, [5], 0), Work([1, 2, 3, 4, 5], 0, [7, 6], 2)])
    np.testing.assert_allclose(mixed, whole[[3, 3, 4]], rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 100))
def test_logits_do_not_depend_on_the_company(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    texts = [[int(token) for token in rng.integers(0, 40, length)] for length in lengths]
    runner = RUNNERS[0]
    together = runner.run([Work(text, 0, [2 * i, 2 * i + 1], 1) for i, text in enumerate(texts)]).copy()
    for text, logits in zip(texts, together, strict=True):
        np.testing.assert_allclose(runner.run([Work(text, 0, [14, 15], 1)])[0], logits, rtol=1e-4, atol=1e-5)


RUNNERS = [make_runner()]


def test_memory_of_other_sequences_is_never_seen() -> None:
    runner = make_runner()
    alone = runner.run([Work([1, 2, 3], 0, [3], 1)]).copy()
    for block in range(16):
        runner.run([Work([9, 8, 7, 6], 0, [block], 0)])
    np.testing.assert_array_equal(runner.run([Work([1, 2, 3], 0, [3], 1)]), alone)


def size(**changes: Any) -> PoolSize:
    values: dict[str, Any] = {
        "available": Finding(1000 * MIB, "MemAvailable of the machine"),
        "weights": 200 * MIB,
        "block": MIB,
        "block_tokens": 32,
        "context": 1024,
        "max_running": 64,
    }
    return PoolSize(**{**values, **changes})


def test_the_pool_takes_half_of_what_the_weights_leave() -> None:
    assert size().blocks() == 400


def test_the_pool_is_no_larger_than_all_sequences_need() -> None:
    assert size(max_running=3).blocks() == 3 * 32
    assert size(max_running=3, context=33).blocks() == 3 * 2


def test_a_pool_size_that_was_asked_for_is_taken() -> None:
    assert size().blocks(kv_bytes=10 * MIB + 5) == 10


@pytest.mark.parametrize(
    ("changes", "kv_bytes", "message"),
    [
        ({"context": 131072}, None, r"131,072 tokens, which takes 4,096.0 MiB .* 1,000.0 MiB are available"),
        ({"weights": 2000 * MIB}, None, r"the weights take 2,000.0 MiB, 0 bytes are left"),
        ({}, 900 * MIB, r"engine.kv_memory of 900.0 MiB does not fit: .* 800.0 MiB are left"),
        ({}, 1000, r"holds no block of 32 tokens \(1.0 MiB\)"),
    ],
)
def test_too_little_memory_is_refused_with_the_numbers(
    changes: dict[str, Any], kv_bytes: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        size(**changes).blocks(kv_bytes)


def test_load_sizes_the_pool_by_itself() -> None:
    runner = load_runner(checkpoint(), EngineConfig(max_running=2, block_tokens=16, threads=1))
    assert (runner.n_blocks, runner.block_tokens, runner.vocabulary, runner.context) == (8, 16, 40, 64)
    runner = load_runner(checkpoint(), EngineConfig(kv_memory="64KiB", block_tokens=16, threads=1, context_tokens=32))
    assert runner.n_blocks == 64 * 1024 // (2 * 2 * 2 * 4 * 4 * 16)
    assert runner.context == 32


def test_a_context_above_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_tokens of 65 is above the model's context of 64"):
        load_runner(checkpoint(), EngineConfig(context_tokens=65))


def test_an_unknown_architecture_names_those_that_exist() -> None:
    assert {"gemma3", "llama", "qwen2", "qwen3"} <= set(architectures())
    assert all(hasattr(load(name), "forward") for name in architectures())
    for name in ("gpt9", "layers", "pull", "config", "checkpoint", "os", "../llama", ""):
        with pytest.raises(CheckpointError, match=r"available: .*llama"):
            load(name)


def test_a_weight_that_does_not_fit_is_named() -> None:
    wrong = {"model.norm.weight": np.zeros(15, np.float32)}
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is 15, but the config asks for 16"):
        load_runner(checkpoint(**wrong), EngineConfig(kernels="reference", threads=1), n_blocks=4)
