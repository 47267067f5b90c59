"""The border between the loop and the device: what one step runs, and who runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.kernels.draws import Draws, Floats


class Work(NamedTuple):
    """One sequence's part of a step."""

    token_ids: Sequence[int]
    """The tokens to compute, at positions ``start``, ``start + 1``, ..."""
    start: int
    table: Sequence[int]
    """The sequence's blocks, from position 0 on."""
    logits: int
    """How many of the last rows need logits: 0, 1, or all."""


class Runner(Protocol):
    """Runs steps; owns the device and the keys and values in its blocks."""

    @property
    def vocabulary(self) -> int:
        """Width of the logits."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        ...

    @property
    def n_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    def run(self, work: Sequence[Work]) -> NDArray[np.float32]:
        """Return logits [sum of ``logits``, vocabulary], rows in the order of ``work``; valid until the next call."""
        ...

    @property
    def draw(self) -> Callable[[Floats, Draws], NDArray[np.int32]]:
        """Returns one token for each draw, from rows of logits."""
        ...
