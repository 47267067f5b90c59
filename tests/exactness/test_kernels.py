"""A row's logits are the same bits in any batch, chunking, block table and number of threads (native kernels)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.runner import pack
from headway.engine.work import Work
from headway.kernels import has_native
from headway.kernels.ops import Ops, Program, Value
from headway.kernels.plan import record, weight_shapes
from headway.kernels.tensor import Float32
from headway.models import load
from headway.models.config import ModelConfig
from tests.kernels.support import AffineTensor, compile_model

if not has_native():
    pytest.skip("built with HEADWAY_NATIVE=0", allow_module_level=True)

from headway.kernels.cpu import NativeKernels, available
from tests.kernels.test_cpu import weight_of

BLOCK_TOKENS = 16
N_BLOCKS = 96
VOCABULARY = 300
CONFIG: dict[str, Any] = {
    "vocabulary": VOCABULARY,
    "hidden": 256,
    "layers": 3,
    "kv_heads": 2,
    "head_width": 32,
    "intermediate": 512,
    "context": 1024,
    "norm_eps": 1e-5,
    "tied": True,
    "window": 40,
    "windowed": (True, False, True),
}
MODELS = {
    "qwen3": ModelConfig(**CONFIG, architecture="qwen3", heads=6),
    "gemma3": ModelConfig(**CONFIG, architecture="gemma3", heads=4, activation="gelu_tanh"),
}
KVType = Literal["bf16", "int8"]
KV_TYPES: tuple[KVType, ...] = get_args(KVType)
KINDS = ("q4_1", "q4_0", "q6_k", "q8_0", "q4_k", "f32")
"""Storage of the weights, in turn."""


@cache
def weights(architecture: str) -> dict[str, Any]:
    config = MODELS[architecture]
    plan = record(lambda ops: load(architecture).forward(ops, config))
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for number, (name, shape) in enumerate(weight_shapes(plan).items()):
        rows, *columns = [size or VOCABULARY for size in shape]
        kind = KINDS[number % len(KINDS)]
        if not columns:
            found[name] = rng.uniform(0.5, 1.5, rows).astype(np.float32)
        elif kind == "f32":
            found[name] = (rng.standard_normal((rows, *columns)) / columns[0] ** 0.5).astype(np.float32)
        else:
            affine = weight_of(kind, rows, columns[0], seed=number).affine()
            assert affine is not None
            size = np.float32(columns[0] ** 0.5 * affine.float32().std())
            affine.scale[...] /= size
            if affine.offset is not None:
                affine.offset[...] /= size
            found[name] = AffineTensor(name, affine, kind)
    return found


@cache
def program(architecture: str, isa: str, threads: int, kv_dtype: KVType) -> Program:
    def model(ops: Ops) -> Value:
        value: Value = load(architecture).forward(ops, MODELS[architecture])
        return value

    return compile_model(
        NativeKernels(threads, isa, kv_dtype),
        model,
        weights(architecture),
        n_blocks=N_BLOCKS,
        block_tokens=BLOCK_TOKENS,
    )


def text(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, length)]


def alone(architecture: str, isa: str, token_ids: Sequence[int], kv_dtype: KVType = "bf16") -> Float32:
    """Return the logits of all positions, run at once, by one thread, in the first blocks."""
    table = range(-(-len(token_ids) // BLOCK_TOKENS))
    work = Work(token_ids, 0, table, len(token_ids))
    return program(architecture, isa, 1, kv_dtype).run(pack([work], BLOCK_TOKENS)).copy()


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("kv_dtype", KV_TYPES)
@settings(max_examples=12, deadline=None)
@given(
    threads=st.sampled_from([1, 2, 3]),
    lengths=st.lists(st.sampled_from([1, 2, 15, 16, 17, 50, 127, 128, 129, 200]), min_size=1, max_size=5),
    chunks=st.lists(st.sampled_from([1, 1, 1, 2, 3, 7, 8, 9, 16, 33, 130]), min_size=4, max_size=4),
    seed=st.integers(0, 10_000),
)
def test_a_row_is_the_same_bits_in_any_company(
    architecture: str, isa: str, kv_dtype: KVType, threads: int, lengths: list[int], chunks: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    texts = [text(length, seed + i) for i, length in enumerate(lengths)]
    expected = [alone(architecture, isa, token_ids, kv_dtype) for token_ids in texts]
    blocks = iter(int(block) for block in rng.permutation(N_BLOCKS))
    tables = [[next(blocks) for _ in range(-(-length // BLOCK_TOKENS))] for length in lengths]
    done = [0] * len(texts)
    while any(at < len(token_ids) for at, token_ids in zip(done, texts, strict=True)):
        work, places = [], []
        for i in rng.permutation(len(texts)):
            count = min(int(rng.choice(chunks)), len(texts[i]) - done[i])
            if count and rng.random() < 0.8:
                wanted = int(rng.integers(0, count + 1))
                work.append(Work(texts[i][done[i] : done[i] + count], done[i], tables[i], wanted))
                places += [(int(i), at) for at in range(done[i] + count - wanted, done[i] + count)]
                done[i] += count
        if work:
            found = program(architecture, isa, threads, kv_dtype).run(pack(work, BLOCK_TOKENS))
            for row, (i, at) in enumerate(places):
                np.testing.assert_array_equal(found[row], expected[i][at], err_msg=f"text {i}, position {at}")


def test_every_instruction_set_gives_the_same_bits() -> None:
    """More than is promised: they share one source, in which every float operation is written out in order."""
    if len(available()) < 2:
        pytest.skip("one instruction set only")
    token_ids = text(200, 7)
    for architecture, kv_dtype in product(MODELS, KV_TYPES):
        first, *others = (alone(architecture, isa, token_ids, kv_dtype) for isa in available())
        assert np.isfinite(first).all()
        assert float(first.std()) > 0.1
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_the_same_model_on_the_reference_is_near() -> None:
    from headway.kernels.reference import ReferenceKernels

    token_ids = text(150, 3)
    for architecture, config in MODELS.items():

        def model(ops: Ops, architecture: str = architecture, config: ModelConfig = config) -> Value:
            value: Value = load(architecture).forward(ops, config)
            return value

        reference = compile_model(
            ReferenceKernels(), model, weights(architecture), n_blocks=N_BLOCKS, block_tokens=BLOCK_TOKENS
        )
        wanted = reference.run(pack([Work(token_ids, 0, range(10), len(token_ids))], BLOCK_TOKENS))
        found = alone(architecture, available()[0], token_ids)
        error = np.sqrt(np.mean((found - wanted) ** 2)) / wanted.std()
        assert error < 0.03, "int8 activations move logits by about a hundredth of their spread"


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("kv_dtype", KV_TYPES)
def test_fusing_ops_changes_no_bit(architecture: str, kv_dtype: KVType, monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = text(150, 11)
    fused = alone(architecture, "scalar", token_ids, kv_dtype)
    monkeypatch.setattr("headway.kernels.cpu.fuse", list)
    plain = program.__wrapped__(architecture, "scalar", 1, kv_dtype)
    work = Work(token_ids, 0, range(10), len(token_ids))
    np.testing.assert_array_equal(plain.run(pack([work], BLOCK_TOKENS)), fused)
