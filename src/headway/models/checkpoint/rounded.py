"""Weights that are rounded to fewer bits when they are loaded: to nearest, in groups along K."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.kernels.tensor import Affine, Float32, Tensor

Bits = Literal[4, 8]

_GROUPS = (128, 64, 32)
"""The widest that divides K."""
_CHUNK = 1 << 18
"""Elements rounded at a time: they stay in the second-level cache."""


class RoundedTensor:
    """A matrix in 4 bits with scale and minimum a group, or in 8 bits with a scale; made anew whenever it is asked for.

    Whatever the file holds, quantized or not, is dequantized first.
    """

    def __init__(self, tensor: Tensor, bits: Bits) -> None:
        self._tensor = tensor
        self._bits = bits
        self.group = next(group for group in _GROUPS if tensor.shape[1] % group == 0)
        self.name = tensor.name
        self.shape = tensor.shape
        self.kind = f"int{bits}-g{self.group}"
        self.nbytes = tensor.nbytes

    def float32(self) -> Float32:
        """Return the rounded values."""
        return self.affine().float32()

    def affine(self) -> Affine:
        """Return codes and scales."""
        return round_to_nearest(self._tensor.float32(), self._bits, self.group)

    def blocks(self) -> None:
        """Return None: the file holds something else."""
        return


def rounded(tensor: Tensor, bits: Bits) -> Tensor:
    """Return the tensor rounded, or itself where it is no matrix whose rows divide into groups."""
    fits = len(tensor.shape) == 2 and any(tensor.shape[1] % group == 0 for group in _GROUPS)
    return RoundedTensor(tensor, bits) if fits else tensor


def round_to_nearest(weight: Float32, bits: Bits, group: int) -> Affine:
    """Return weight [N, K] in groups of ``group`` columns; half-precision scales, as the kernels keep them."""
    n, k = weight.shape
    codes: NDArray[np.uint8] = np.empty((n, k), np.uint8)
    scale = np.empty((n, k // group), np.float32)
    offset = np.empty_like(scale) if bits == 4 else None
    step = max(1, _CHUNK // k)
    with np.errstate(all="ignore"):
        for start in range(0, n, step):
            part = slice(start, start + step)
            values = weight[part].reshape(-1, k // group, group)
            low, high = values.min(-1), values.max(-1)
            if offset is None:
                scale[part] = _half(np.maximum(-low, high) / np.float32(127))
                shifted = values * _inverse(scale[part])[:, :, None] + np.float32(128)
            else:
                low = np.minimum(low, 0)  # a weight of zero stays near zero
                scale[part] = _half((np.maximum(high, 0) - low) / np.float32(15))
                offset[part] = _half(low)
                shifted = (values - offset[part][:, :, None]) * _inverse(scale[part])[:, :, None]
            np.clip(np.rint(shifted), 0, 2**bits - 1, out=shifted)
            codes[part] = shifted.reshape(-1, k)
    return Affine(codes, scale, zero=128 if bits == 8 else 0, offset=offset, group=group, bits=bits)


def _half(values: Float32) -> Float32:
    """Return values with the 11 bits that half precision has, of any size: the kernels bring scales into its range."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * np.float32(2048)) / np.float32(2048), exponent).astype(np.float32)


def _inverse(scale: Float32) -> Float32:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
