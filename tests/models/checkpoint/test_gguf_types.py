from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.models.checkpoint.gguf import GGUFTensor
from headway.models.checkpoint.gguf_types import TYPES, BlockType

QUANTIZED = {number: block for number, block in TYPES.items() if block.decode is not None}


def quantized(block: BlockType, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return random blocks whose scales are ordinary numbers; every bit of the rest is random."""
    rng = np.random.default_rng(seed)
    n = rows * columns // block.elements
    raw = rng.integers(0, 256, (n, block.nbytes), dtype=np.uint8)
    halves = raw.view(np.float16)
    columns_of_scales = {"q6_k": [104], "q4_1": [0, 1], "q5_1": [0, 1], "q4_k": [0, 1], "q5_k": [0, 1]}
    for column in columns_of_scales.get(block.kind, [0]):
        halves[:, column] = rng.standard_normal(n).astype(np.float16)
    return raw.reshape(rows, -1)


def reference(raw: NDArray[np.uint8], number: int) -> NDArray[np.float32]:
    gguf = pytest.importorskip("gguf")
    values: NDArray[np.float32] = gguf.dequantize(raw, gguf.GGMLQuantizationType(number))
    return values


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: TYPES[number].kind)
def test_dequantised_values_are_those_of_the_gguf_package_bit_for_bit(number: int) -> None:
    block = TYPES[number]
    # More rows than one chunk holds, so that chunk borders are crossed.
    raw = quantized(block, rows=300, columns=512)
    tensor = GGUFTensor("w", (300, 512), block, raw.reshape(-1))
    ours, theirs = tensor.float32(), reference(raw, number)
    assert ours.shape == (300, 512)
    assert ours.flags.c_contiguous
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.reshape(300, 512).view(np.uint32))


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: TYPES[number].kind)
def test_affine_form_is_exact(number: int) -> None:
    block = TYPES[number]
    raw = quantized(block, rows=130, columns=512, seed=1)
    tensor = GGUFTensor("w", (130, 512), block, raw.reshape(-1))
    affine = tensor.affine()
    assert affine is not None
    assert affine.codes.shape == (130, 512)
    assert affine.scale.shape == (130, 512 // block.group)
    assert int(affine.codes.max()) < 1 << affine.bits
    assert (affine.offset is None) == (block.kind not in ("q4_1", "q5_1", "q4_k", "q5_k"))
    np.testing.assert_array_equal(affine.float32(), reference(raw, number).reshape(130, 512))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_that_the_gguf_package_writes_are_read_back(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    number = int(gguf.GGMLQuantizationType[kind])
    values = np.random.default_rng(2).standard_normal((8, 96)).astype(np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    tensor = GGUFTensor("w", (8, 96), TYPES[number], np.ascontiguousarray(raw).reshape(-1))
    np.testing.assert_array_equal(tensor.float32(), reference(raw, number))
    assert float(np.abs(tensor.float32() - values).max()) < 0.5


def cases() -> Any:
    return json.loads((Path(__file__).parents[2] / "data" / "numeric.json").read_text())


def test_numeric_case_q4_0() -> None:
    case = cases()["q4_0"]
    quants = bytes(int(byte, 16) for byte in case["bytes_0_1"]) + bytes(14)
    raw = np.frombuffer(np.float16(case["d"]).tobytes() + quants, np.uint8)
    values = GGUFTensor("w", (32,), TYPES[2], raw).float32()
    for element in (0, 1, 16, 17):
        assert values[element] == case[f"elem_{element}"]


def test_numeric_case_q4_1() -> None:
    case = cases()["q4_1"]
    scales = np.float16(case["d"]).tobytes() + np.float16(case["m"]).tobytes()
    raw = np.frombuffer(scales + bytes([int(case["byte_0"], 16)]) + bytes(15), np.uint8)
    values = GGUFTensor("w", (32,), TYPES[3], raw).float32()
    assert values[0] == case["elem_0"]
    assert values[16] == case["elem_16"]


@pytest.mark.parametrize("number", [0, 1, 30], ids=lambda number: TYPES[number].kind)
def test_dense_types(number: int) -> None:
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
    raw = np.ascontiguousarray(gguf.quantize(values, gguf.GGMLQuantizationType(number))).view(np.uint8)
    tensor = GGUFTensor("w", (4, 6), TYPES[number], raw.reshape(-1))
    np.testing.assert_array_equal(tensor.float32(), reference(raw, number).reshape(4, 6))
    assert tensor.affine() is None


def test_infinite_scales_give_infinite_values_without_a_warning() -> None:
    raw = np.full((1, TYPES[2].nbytes), 0, np.uint8)
    raw[:, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    values = GGUFTensor("w", (32,), TYPES[2], raw.reshape(-1)).float32()
    assert not np.isfinite(values).any()


def test_dequantising_needs_little_memory_beside_its_result() -> None:
    block = TYPES[14]
    raw = quantized(block, rows=2048, columns=1024)
    tensor = GGUFTensor("w", (2048, 1024), block, raw.reshape(-1))
    tracemalloc.start()
    values = tensor.float32()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < values.nbytes + 2**20
