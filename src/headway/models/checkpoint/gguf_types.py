"""GGUF's tensor types: block layouts, and their decoders to the canonical codes, scales and offsets.

A decoder takes raw blocks [n, bytes] (uint8, rows contiguous) and returns codes [n, elements], scale [n, groups] and
offset [n, groups] or None; value = scale * (codes - zero) + offset, bit for bit what ggml computes. Layouts are those
of ggml-common.h; quants are unpacked eight bytes at a time as little-endian 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.kernels.tensor import Affine, Float32

Bytes = NDArray[np.uint8]
Decoded = tuple[Bytes, Float32, Float32 | None]
_Words = NDArray[np.uint64]

_CHUNK_ELEMENTS = 1 << 16
"""Elements decoded at a time: codes and values of a chunk stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """One tensor type: how many elements share a block, and how a block is read."""

    kind: str
    elements: int
    nbytes: int
    bits: int = 0
    group: int = 0
    """Elements that share a scale."""
    zero: int = 0
    decode: Callable[[Bytes], Decoded] | None = None
    """None for dense types."""


def dequantize(blocks: Bytes, block: BlockType, out: Float32) -> None:
    """Write the values of ``blocks`` [n, bytes] into ``out`` [n, elements] (C order), a cache-sized chunk at a time."""
    decode = block.decode
    assert decode is not None
    zero = np.uint8(block.zero)
    step = max(1, _CHUNK_ELEMENTS // block.elements)
    # Scales of a hostile file may be infinite or NaN; the values are then too, as in ggml, without a warning.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            codes, scale, offset = decode(blocks[start : start + step])
            if block.zero:
                # Wraps around to the right int8: every code - zero lies in [-128, 127].
                np.subtract(codes, zero, out=codes)
            values = out[start : start + step].reshape(len(codes), -1, block.group)
            values[...] = (codes.view(np.int8) if block.zero else codes).reshape(values.shape)
            values *= scale[:, :, None]
            if offset is not None:
                values += offset[:, :, None]


def decode_all(blocks: Bytes, block: BlockType, rows: int) -> Affine:
    """Return the canonical form of ``rows`` rows of blocks [n, bytes], decoded a chunk at a time."""
    decode = block.decode
    assert decode is not None
    groups = block.elements // block.group
    codes = np.empty((len(blocks), block.elements), np.uint8)
    scale = np.empty((len(blocks), groups), np.float32)
    offset: Float32 | None = None
    step = max(1, _CHUNK_ELEMENTS // block.elements)
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            codes[part], scale[part], minimum = decode(blocks[part])
            if minimum is not None:
                if offset is None:
                    offset = np.empty_like(scale)
                offset[part] = minimum
    return Affine(
        codes=codes.reshape(rows, -1),
        scale=scale.reshape(rows, -1),
        zero=block.zero,
        offset=None if offset is None else offset.reshape(rows, -1),
        group=block.group,
        bits=block.bits,
    )


def _half(blocks: Bytes, index: int) -> Float32:
    """Return the ``index``-th half-precision number of each block, [n, 1]; blocks have even sizes."""
    return blocks.view(np.dtype("<f2"))[:, index : index + 1].astype(np.float32)


def _words(blocks: Bytes, start: int, stop: int) -> _Words:
    """Return bytes ``start:stop`` of each block as 64-bit words, in an array of their own."""
    return blocks[:, start:stop].copy().view(np.dtype("<u8"))


def _repeat(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


_LOW = _repeat(0x0F)
_SIGN = _repeat(0x80)


def _nibbles(words: _Words, run: int) -> Bytes:
    """Return low and high nibbles of ``words`` [n, w], runs of ``run`` words of lows before as many of highs."""
    n, width = words.shape
    codes = np.empty((n, 2 * width), np.dtype("<u8"))
    highs = words >> np.uint64(4)
    # One strided operation per column: the inner loop runs over blocks, not over the few words of a block.
    for column in range(width):
        place = column // run * 2 * run + column % run
        np.bitwise_and(words[:, column], _LOW, out=codes[:, place])
        np.bitwise_and(highs[:, column], _LOW, out=codes[:, place + run])
    return codes.view(np.uint8)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Return bit j of the 32-bit mask at byte ``at`` of each block as 16 or 0, [n, 32]."""
    mask = np.ascontiguousarray(blocks[:, at : at + 4])
    bits = np.unpackbits(mask, axis=1, bitorder="little")
    bits <<= 4
    return bits


def _q4_0(blocks: Bytes) -> Decoded:
    return _nibbles(_words(blocks, 2, 18), 2), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Decoded:
    return _nibbles(_words(blocks, 4, 20), 2), _half(blocks, 0), _half(blocks, 1)


def _q5_0(blocks: Bytes) -> Decoded:
    codes = _nibbles(_words(blocks, 6, 22), 2)
    codes |= _fifth_bits(blocks, 2)
    return codes, _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Decoded:
    codes = _nibbles(_words(blocks, 8, 24), 2)
    codes |= _fifth_bits(blocks, 4)
    return codes, _half(blocks, 0), _half(blocks, 1)


def _q8_0(blocks: Bytes) -> Decoded:
    words = _words(blocks, 2, 34)
    words ^= _SIGN  # two's complement to offset binary: signed + 128
    return words.view(np.uint8), _half(blocks, 0), None


def _k_scales(blocks: Bytes) -> tuple[Float32, Float32]:
    """Return scale and offset [n, 8] of Q4_K and Q5_K: eight pairs of six bits in bytes 4..15."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), -(_half(blocks, 1) * minima.astype(np.float32))


def _q4_k(blocks: Bytes) -> Decoded:
    return _nibbles(_words(blocks, 16, 144), 4), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Decoded:
    codes = _nibbles(_words(blocks, 48, 176), 4)
    words = codes.view(np.dtype("<u8"))
    high = _words(blocks, 16, 48)
    one = _repeat(1)
    # Bit s of the 32 bytes qh is the fifth bit of sub-block s.
    for sub in range(8):
        for column in range(4):
            words[:, 4 * sub + column] |= ((high[:, column] >> np.uint64(sub)) & one) << np.uint64(4)
    return codes, *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Decoded:
    # A half of 128 elements: 64 bytes of low nibbles (first all lows, then all highs), 32 bytes of bit pairs.
    codes = _nibbles(_words(blocks, 0, 128), 8)
    words = codes.view(np.dtype("<u8"))
    high = _words(blocks, 128, 192)
    three = _repeat(3)
    for half in range(2):
        for quarter in range(4):
            for column in range(4):
                bits = (high[:, 4 * half + column] >> np.uint64(2 * quarter)) & three
                words[:, 16 * half + 4 * quarter + column] |= bits << np.uint64(4)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return codes, _half(blocks, 104) * scales, None


TYPES = {
    0: BlockType("f32", 1, 4),
    1: BlockType("f16", 1, 2),
    30: BlockType("bf16", 1, 2),
    2: BlockType("q4_0", 32, 18, bits=4, group=32, zero=8, decode=_q4_0),
    3: BlockType("q4_1", 32, 20, bits=4, group=32, decode=_q4_1),
    6: BlockType("q5_0", 32, 22, bits=5, group=32, zero=16, decode=_q5_0),
    7: BlockType("q5_1", 32, 24, bits=5, group=32, decode=_q5_1),
    8: BlockType("q8_0", 32, 34, bits=8, group=32, zero=128, decode=_q8_0),
    12: BlockType("q4_k", 256, 144, bits=4, group=32, decode=_q4_k),
    13: BlockType("q5_k", 256, 176, bits=5, group=32, decode=_q5_k),
    14: BlockType("q6_k", 256, 210, bits=6, group=16, zero=32, decode=_q6_k),
}
"""By ggml's type number."""

UNREAD = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Types that ggml knows and this reader does not, for the message."""
