"""Hands a model's weights to the native library: quantized ones in their canonical form, joined where they can be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.kernels.cpu import _native
from headway.kernels.tensor import Affine, Float32, Tensor

STRIP = 16
WIDEST_GROUP = 1 << 15  # sums of a group stay inside 32 bits
Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Raw rows of a GGUF file, which the library unpacks and repacks in one pass."""

    kind: str
    columns: int
    parts: list[NDArray[np.uint8]]


class Weights:
    """Which native weight each name became."""

    def __init__(self, native: _native.Program, tensors: Mapping[str, Tensor]) -> None:
        self._native = native
        self._tensors = tensors
        self._found: dict[tuple[str, ...], int] = {}

    def load(self, linears: Sequence[tuple[str, ...]], tables: Sequence[str]) -> None:
        """Repack all products' weights and the tables; one tensor is unpacked while another is repacked."""
        wanted = dict.fromkeys(
            [(name,) for name in tables] + [names for group in linears for names in self._parts(group)]
        )
        with ThreadPoolExecutor(1, "load") as ahead:
            order = list(wanted)
            following = ahead.submit(self._read, order[0]) if order else None
            for place, names in enumerate(order):
                assert following is not None
                read = following.result()
                following = ahead.submit(self._read, order[place + 1]) if place + 1 < len(order) else None
                self._found[names] = self._add(read)

    def joined(self, names: tuple[str, ...]) -> int | None:
        """Return the native weight of these names together, or None if they were not joined."""
        return self._found.get(names)

    def alone(self, name: str) -> int:
        """Return the native weight of one tensor."""
        return self._found[(name,)]

    def vector(self, names: Sequence[str], offset: float = 0.0) -> int:
        """Hand over norm weights or biases, side by side."""
        values = np.concatenate([self._tensors[name].float32() for name in names]) + np.float32(offset)
        return self._native.add_vector(np.ascontiguousarray(values, np.float32))

    def _parts(self, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Yield the names together if their storage is the same, else each alone."""
        if len({self._tensors[name].kind for name in names}) == 1:
            yield names
        else:
            yield from ((name,) for name in names)

    def _read(self, names: tuple[str, ...]) -> Affine | Float32 | _Blocks:
        parts = [self._tensors[name] for name in names]
        blocks = [part.blocks() for part in parts]
        if all(one is not None for one in blocks):
            whole = [one for one in blocks if one is not None]
            return _Blocks(parts[0].kind, parts[0].shape[1], whole)
        affine = [part.affine() for part in parts]
        if all(one is not None and _fits(one) for one in affine):
            return _join([one for one in affine if one is not None])
        return np.concatenate([part.float32() for part in parts])

    def _add(self, weight: Affine | Float32 | _Blocks) -> int:
        if isinstance(weight, _Blocks):
            return self._native.add_blocks(weight.kind, weight.columns, weight.parts)
        if isinstance(weight, Affine):
            offset = None if weight.offset is None else np.ascontiguousarray(weight.offset, np.float32)
            return self._native.add_quantized(
                np.ascontiguousarray(weight.codes),
                np.ascontiguousarray(weight.scale, np.float32),
                offset,
                weight.group,
                4 if weight.bits <= 4 else 8,
                weight.zero,
            )
        upper = _bfloat16(weight)
        if upper is not None:
            return self._native.add_bf16(upper)
        half = _float16(weight)
        if half is not None:
            return self._native.add_f16(half)
        return self._native.add_f32(weight)


def _fits(weight: Affine) -> bool:
    """Whether the library runs these codes; else they are dequantized."""
    return weight.bits <= 8 and weight.group % STRIP == 0 and weight.group <= WIDEST_GROUP


def packed_bytes(tensor: Tensor) -> int:
    """Return the memory that a tensor takes once repacked; rows come in strips of 16."""
    rows, columns = tensor.shape if len(tensor.shape) == 2 else (1, math.prod(tensor.shape))
    return int(-(-rows // STRIP) * STRIP * columns * _bits(tensor.kind)) // 8


def _bits(kind: str) -> float:
    if kind.startswith("int"):  # rounded as it is loaded: "int4-g128" has minima, "int8-g128" has none
        bits, group = kind[3:].split("-g")
        return int(bits) + (32 if bits == "4" else 16) / int(group)
    return _BITS.get(kind, 32)


# Codes of 4 or 8 bits, and a half-precision scale (and minimum, where there is one) per group.
_BITS = {
    "q4_0": 4 + 16 / 32,
    "q4_1": 4 + 32 / 32,
    "q4_k": 4 + 32 / 32,
    "q5_0": 8 + 16 / 32,
    "q5_1": 8 + 32 / 32,
    "q5_k": 8 + 32 / 32,
    "q6_k": 8 + 16 / 16,
    "q8_0": 8 + 16 / 32,
    "bf16": 16,
    "f16": 16,
}


def _bfloat16(weight: Float32) -> Bits | None:
    """Return the upper halves, or None if any lower half says something."""
    if weight.view(np.uint16)[..., 0::2].any():  # little-endian: the lower half comes first
        return None
    return np.ascontiguousarray(weight.view(np.uint16)[..., 1::2])


def _float16(weight: Float32) -> Bits | None:
    """Return half-precision bits, or None if any value would change."""
    with np.errstate(all="ignore"):
        half = weight.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), weight):
            return None
    return half.view(np.uint16)


def _join(parts: Sequence[Affine]) -> Affine:
    first = parts[0]
    if len(parts) == 1:
        return first
    shapes = {(part.group, part.bits, part.zero, part.offset is None) for part in parts}
    assert len(shapes) == 1, f"weights of one kind with different forms: {shapes}"
    offset = (
        None if first.offset is None else np.concatenate([part.offset for part in parts if part.offset is not None])
    )
    return Affine(
        codes=np.concatenate([part.codes for part in parts]),
        scale=np.concatenate([part.scale for part in parts]),
        zero=first.zero,
        offset=offset,
        group=first.group,
        bits=first.bits,
    )
