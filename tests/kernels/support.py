"""A one-Op Plan, compiled and run; and dense attention in float64 to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.engine.runner import pack
from headway.engine.work import Work
from headway.kernels.ops import Batch, Kernels, Ops, Program, Value
from headway.kernels.plan import Recorder, record
from headway.kernels.tensor import Affine, Float32, Tensor

Float64 = NDArray[np.float64]


class ArrayTensor:
    """A weight in memory."""

    kind = "f32"

    def __init__(self, name: str, array: Float32) -> None:
        self.name = name
        self.array = array
        self.shape = array.shape
        self.nbytes = array.nbytes

    def float32(self) -> Float32:
        return self.array.copy()

    def affine(self) -> Affine | None:
        return None

    def blocks(self) -> None:
        return None


class AffineTensor:
    """A quantized weight in memory."""

    def __init__(self, name: str, weight: Affine, kind: str = "affine") -> None:
        self.name = name
        self.kind = kind
        self.weight = weight
        self.shape = weight.codes.shape
        self.nbytes = weight.codes.nbytes

    def float32(self) -> Float32:
        return self.weight.float32()

    def affine(self) -> Affine | None:
        return self.weight

    def blocks(self) -> None:
        return None


def tensor_of(name: str, weight: Float32 | Affine | Tensor) -> Tensor:
    match weight:
        case np.ndarray():
            return ArrayTensor(name, weight)
        case Affine():
            return AffineTensor(name, weight)
        case _:
            return weight


def compile_model(
    kernels: Kernels,
    model: Callable[[Ops], Value],
    weights: Mapping[str, Float32 | Affine | Tensor],
    *,
    n_blocks: int = 8,
    block_tokens: int = 4,
) -> Program:
    def whole(recorder: Recorder) -> Value:
        return model(recorder)

    return kernels.compile(
        record(whole), lambda name: tensor_of(name, weights[name]), n_blocks=n_blocks, block_tokens=block_tokens
    )


def run_op(
    kernels: Kernels,
    op: Callable[[Ops, Value], Value],
    x: Float32,
    weights: Mapping[str, Float32 | Affine | Tensor] | None = None,
    *,
    apart: bool = False,
) -> Float32:
    """Return ``op`` of rows ``x`` at positions 0, 1, ...: rows are embedded, the result comes out by a head of ones.

    A model must attend: heads and blocks of 16 are what every implementation takes. With ``apart`` each row is a
    sequence of its own, at position 0.
    """
    rows, width = x.shape

    def model(ops: Ops) -> Value:
        value = ops.embed("x", width=width)
        tiny = ops.linear(value, "zero", width=16)
        value = op(ops, value)
        nothing = ops.attend(tiny, tiny, tiny, layer=0, heads=1, kv_heads=1, head_width=16, scale=1.0)
        value = ops.add(value, ops.linear(nothing, "nothing", width=value.width))
        return ops.head(value, "identity", width=value.width)

    out_width = op(Recorder(), Value(0, width)).width
    arrays = {
        "x": x,
        "zero": np.zeros((16, width), np.float32),
        "nothing": np.zeros((out_width, 16), np.float32),
        "identity": np.eye(out_width, dtype=np.float32),
        **(weights or {}),
    }
    blocks = rows if apart else -(-rows // 16)
    program = compile_model(kernels, model, arrays, n_blocks=blocks, block_tokens=16)
    sequences = [(1, 0, [i]) for i in range(rows)] if apart else [(rows, 0, list(range(blocks)))]
    return program.run(batch_of(sequences, 16)).copy()


def batch_of(sequences: Sequence[tuple[int, int, list[int]]], block_tokens: int) -> Batch:
    """Return a batch of (rows, first position, table) whose token ids count up, all logits wanted."""
    work = []
    token = 0
    for rows, start, table in sequences:
        work.append(Work(range(token, token + rows), start, table, rows))
        token += rows
    return pack(work, block_tokens)


def dense_attention(
    q: Float32,
    k: Float32,
    v: Float32,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float64:
    """Causal attention of one whole sequence, row by row and head by head."""
    tokens = len(q)
    width = q.shape[1] // heads
    queries = q.astype(np.float64).reshape(tokens, heads, width)
    keys = k.astype(np.float64).reshape(tokens, kv_heads, width)
    values = v.astype(np.float64).reshape(tokens, kv_heads, width)
    out = np.zeros((tokens, heads, width))
    for row in range(tokens):
        first = 0 if window is None else max(0, row - window + 1)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = keys[first : row + 1, kv] @ queries[row, head] * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ values[first : row + 1, kv]
    return out.reshape(tokens, heads * width)
