"""Every Op's signature, the Batch that a step runs, and the contract of an implementation.

A model file is a plain function over ``Ops``. It is run once, on a ``plan.Recorder``, which writes down a Plan: a flat
tuple of Calls over numbered Values. An implementation (``Kernels``) compiles the Plan with the weights into a
``Program``; a step is one ``Program.run(batch)``.

Shapes: a Value is ``[rows, width]`` float32, one row per token of the Batch. Weights are named, ``[out, in]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.kernels.draws import Draws
from headway.kernels.tensor import Float32, Tensor

Activation = Literal["silu", "gelu_tanh"]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Value:
    """Rows of activations inside a Plan."""

    index: int
    width: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding over the halves of a head (Su et al. 2021; the rotate-half form of Hugging Face checkpoints)."""

    inv_freq: tuple[float, ...]
    """head_width / 2 inverse frequencies, scaling already applied."""
    factor: float = 1.0
    """Multiplies cosine and sine (YaRN's attention factor)."""


class Ops(Protocol):
    """What a model file may call."""

    def embed(self, table: str, *, width: int, scale: float = 1.0) -> Value:
        """Rows of ``table`` [vocabulary, width] at the Batch's token ids, times ``scale``."""
        ...

    def rms_norm(
        self, x: Value, weight: str, *, eps: float, weight_offset: float = 0.0, head_width: int | None = None
    ) -> Value:
        """``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)``, over the row or each head of it."""
        ...

    def linear(self, x: Value, weight: str, *, width: int, bias: str | None = None) -> Value:
        """``x @ weight.T + bias``, weight [width, x.width]."""
        ...

    def rope(self, x: Value, rope: Rope, *, head_width: int) -> Value:
        """Rotate each head of each row by the row's position."""
        ...

    def attend(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Value:
        """Write k and v of every row into the layer's KV blocks, then causal attention over the paged context.

        Row at position p of a sequence sees positions p-window+1..p (0..p without a window).
        """
        ...

    def gate(self, gate: Value, up: Value, *, activation: Activation) -> Value:
        """``activation(gate) * up`` (SwiGLU, GeGLU)."""
        ...

    def add(self, a: Value, b: Value) -> Value:
        """``a + b``."""
        ...

    def head(self, x: Value, weight: str, *, width: int, softcap: float | None = None) -> Value:
        """Logits [len(batch.logit_rows), width] of the chosen rows: ``x[logit_rows] @ weight.T``."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded Op: its name, the Values and weights it reads, the Value it makes, and constants."""

    op: str
    inputs: tuple[Value, ...]
    weights: tuple[str, ...]
    output: Value
    constants: dict[str, object]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token costs in the KV cache."""

    layers: int
    kv_heads: int
    head_width: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A model, recorded once: a flat list of Calls over numbered Values; the last Call makes the logits."""

    calls: tuple[Call, ...]
    n_values: int
    kv: KVLayout
    vocabulary: int

    def weights(self) -> tuple[str, ...]:
        """Return the names of all weights that the Calls read, each once, in order of first use."""
        return tuple(dict.fromkeys(name for call in self.calls for name in call.weights))


@dataclass(frozen=True, slots=True)
class Batch:
    """What runs in one step: rows of any mixture of decodes and prefill chunks, grouped by sequence.

    Rows ``starts[i]:starts[i+1]`` belong to sequence i, in order of position, the last at ``lengths[i] - 1``.
    """

    token_ids: Int32
    """[rows]"""
    positions: Int32
    """[rows] position of each token in its sequence."""
    starts: Int32
    """[sequences + 1]"""
    lengths: Int32
    """[sequences] context length after this step (tokens whose K and V are then stored)."""
    tables: Int32
    """[sequences, most blocks] block numbers; the tail is padded with 0 and never read."""
    logit_rows: Int32
    """Rows whose logits are wanted, ascending."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do at most with these kernels' data types, on their threads."""

    read_bytes_per_s: float
    """From memory, not from a cache."""
    operations_per_s: float
    """Multiplications and additions of the kind that the weights' products take."""


class Program(Protocol):
    """A compiled Plan with its weights and its KV pool; one owner, one caller at a time."""

    def run(self, batch: Batch) -> Float32:
        """Run one step; return logits [len(logit_rows), vocabulary], valid until the next call."""
        ...

    def draw(self, logits: Float32, draws: Draws) -> Int32:
        """Return one token for each draw, from the logits of the last step, as they came, or from others."""
        ...

    def limits(self) -> Limits:
        """Return the machine's limits, measured now."""
        ...

    def set_profile(self, on: bool) -> None:
        """Begin to count the time that each Op takes, from zero, or stop."""
        ...

    def profile(self) -> dict[str, tuple[float, int]]:
        """Return seconds and calls by Op since counting began."""
        ...


class Kernels(Protocol):
    """An implementation of all Ops."""

    @property
    def name(self) -> str:
        """``reference``, ``cpu`` or ``cuda``."""
        ...

    @property
    def isa(self) -> str:
        """The instruction set in use, for reports."""
        ...

    @property
    def threads(self) -> int:
        """Compute threads."""
        ...

    def block_bytes(self, kv: KVLayout, block_tokens: int) -> int:
        """Return the memory that one KV block takes, over all layers."""
        ...

    def weight_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Return the memory that the weights take once loaded."""
        ...

    def refuses(self, plan: Plan, block_tokens: int) -> str:
        """Return why this model or block size does not run here, or an empty text."""
        ...

    def compile(self, plan: Plan, weight: Callable[[str], Tensor], *, n_blocks: int, block_tokens: int) -> Program:
        """Load the weights and allocate the KV pool of ``n_blocks`` blocks."""
        ...
