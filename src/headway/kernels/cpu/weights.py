"""Hands a model's weights to the native library: quantized ones in their canonical form, joined where they can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from headway.kernels.tensor import Affine, Float32, Tensor

LEAST_GROUP = 16


class Weights:
    """Which native weight each name became."""

    def __init__(self, native: Any, tensors: Mapping[str, Tensor], threads: int) -> None:
        self._native = native
        self._tensors = tensors
        self._threads = threads
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

    def table(self, name: str) -> int:
        """Return the native weight of an embedding table or head."""
        return self._found[(name,)]

    def vector(self, names: Sequence[str], offset: float = 0.0) -> int:
        """Hand over norm weights or biases, side by side."""
        values = np.concatenate([self._tensors[name].float32() for name in names]) + np.float32(offset)
        index: int = self._native.add_vector(np.ascontiguousarray(values, np.float32))
        return index

    def _parts(self, names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """Yield the names together if their storage is the same, else each alone."""
        if len({self._tensors[name].kind for name in names}) == 1:
            yield names
        else:
            yield from ((name,) for name in names)

    def _read(self, names: tuple[str, ...]) -> Affine | Float32:
        parts = [self._tensors[name] for name in names]
        affine = [part.affine() for part in parts]
        if all(one is not None and one.group % LEAST_GROUP == 0 for one in affine):
            return _join([one for one in affine if one is not None])
        return np.concatenate([part.float32() for part in parts])

    def _add(self, weight: Affine | Float32) -> int:
        index: int
        if isinstance(weight, Affine):
            bits = 4 if weight.bits <= 4 and weight.group % 8 == 0 else 8
            codes = np.ascontiguousarray(weight.codes)
            offset = None if weight.offset is None else np.ascontiguousarray(weight.offset, np.float32)
            scale = np.ascontiguousarray(weight.scale, np.float32)
            index = self._native.add_quantized(codes, scale, offset, weight.group, bits, weight.zero)
            return index
        bits16 = (weight.view(np.uint32) >> 16).astype(np.uint16)
        if np.array_equal(bits16.astype(np.uint32) << 16, weight.view(np.uint32)):  # bfloat16 without loss
            index = self._native.add_bf16(bits16)
        else:
            index = self._native.add_f32(np.ascontiguousarray(weight))
        return index


def _join(parts: Sequence[Affine]) -> Affine:
    first = parts[0]
    if len(parts) == 1:
        return first
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
