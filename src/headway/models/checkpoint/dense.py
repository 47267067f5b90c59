"""Dense weights as both formats store them: float32, float16, bfloat16."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.kernels.tensor import Float32

DTYPES: dict[str, np.dtype[np.generic]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}
"""Storage of each dense kind; bfloat16 is the upper half of a float32."""


def dense_float32(raw: NDArray[np.uint8], kind: str) -> Float32:
    """Return the values of contiguous raw bytes in a new flat array; exact for all three kinds."""
    stored = raw.reshape(-1).view(DTYPES[kind])
    if kind == "bf16":
        wide = stored.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return stored.astype(np.float32)
