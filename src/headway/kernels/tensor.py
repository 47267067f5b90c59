"""A weight as its checkpoint holds it, and the canonical form of quantized ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Affine:
    """The canonical quantized form, exact for every format read: ``W = scale * (codes - zero) + offset``.

    N is out_features (rows), K in_features (columns), ``group`` columns share a scale, G = K / group.
    """

    codes: NDArray[np.uint8]
    """[N, K], unsigned."""
    scale: Float32
    """[N, G]"""
    zero: int
    """Integer zero point of the whole tensor (Q4_0: 8, Q8_0: 128, Q6_K: 32; 0 where ``offset`` serves)."""
    offset: Float32 | None
    """[N, G] float minimum (Q4_1, Q5_1, Q4_K, Q5_K); None where the zero point serves."""
    group: int
    bits: int

    def float32(self) -> Float32:
        """Return the weights, [N, K]."""
        n, k = self.codes.shape
        grouped = self.codes.reshape(n, k // self.group, self.group).astype(np.float32)
        if self.zero:
            grouped -= np.float32(self.zero)
        grouped *= self.scale[:, :, None]
        if self.offset is not None:
            grouped += self.offset[:, :, None]
        return grouped.reshape(n, k)


class Tensor(Protocol):
    """One named weight, usually a view of a memory-mapped file; conversions happen when asked for."""

    @property
    def name(self) -> str:
        """The Hugging Face name, such as ``model.layers.0.self_attn.q_proj.weight``."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """(out_features, in_features) or (width,)."""
        ...

    @property
    def kind(self) -> str:
        """Storage: f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        ...

    def float32(self) -> Float32:
        """Return the values, dequantized, in a new array (C order)."""
        ...

    def affine(self) -> Affine | None:
        """Return the canonical quantized form, or None for a dense kind."""
        ...

    def blocks(self) -> NDArray[np.uint8] | None:
        """Return the rows' raw blocks [N, bytes], where ``kind`` is a quantized kind of GGUF; else None."""
        ...
