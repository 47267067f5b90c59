"""Every Op in NumPy, float32: the definition that every other implementation is tested against.

Values are ``[rows, width]`` but lie in memory by column (``x.T`` is contiguous): OpenBLAS multiplies ``W @ x.T`` up to
1.6 times as fast as ``x @ W.T`` for the few rows of a decode step, and the parts of a fused product stay contiguous.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.kernels import paged
from headway.kernels.arrange import Group, checked_tensors, group_calls, load_weights, place_values
from headway.kernels.draws import Draws, draw
from headway.kernels.ops import Batch, Int32, KVLayout, Limits, Plan, Program, Rope
from headway.kernels.tensor import Float32, Tensor
from headway.kernels.workers import Workers

T = TypeVar("T")

_TRANSPOSED_LOGITS = 64  # up to this many rows of logits, making them by column and turning them is faster
_READ_FLOATS, _SQUARE = 64 << 20, 1024
_WORTH_SHARING = 1 << 17  # multiply-adds, or elements of K gathered, from which a second thread pays for its wake-up
_CHUNKS = 4  # parts of a product, the same for any number of threads: so are the results
_CHUNK_ROWS = 4096  # most rows of a weight in a part


def rms_norm(x: Float32, weight: Float32, out: Float32, *, eps: float, head_width: int) -> None:
    """``x / sqrt(mean(x^2) + eps) * weight`` over heads of ``head_width``."""
    heads, result = _by_head(x, head_width), _by_head(out, head_width)
    np.multiply(heads, heads, out=result)
    inverse = np.add.reduce(result, axis=1, keepdims=True)
    inverse /= np.float32(head_width)
    inverse += np.float32(eps)
    np.sqrt(inverse, out=inverse)
    np.divide(heads, inverse, out=result)
    result *= weight[:, None]


def linear(x: Float32, weight: Float32, bias: Float32 | None, out: Float32, workers: Workers) -> None:
    """``x @ weight.T + bias``."""
    inputs, result = x.T, out.T
    if weight.size * len(x) < _WORTH_SHARING:
        np.matmul(weight, inputs, out=result)
    else:

        def part(rows: slice, _: int) -> None:
            np.dot(weight[rows], inputs, out=result[rows])  # unlike matmul it always lets other threads run

        workers.share(part, chunks(len(weight)))
    if bias is not None:
        out += bias


@cache
def chunks(rows: int) -> tuple[slice, ...]:
    """Return the parts in which the rows of a weight are multiplied."""
    step = min(_CHUNK_ROWS, -(-rows // (16 * _CHUNKS)) * 16)
    return tuple(slice(start, min(start + step, rows)) for start in range(0, rows, step))


def rotate(x: Float32, cos: Float32, sin: Float32, out: Float32) -> None:
    """Rotate heads; cos is ``[half, rows]``, sin ``[2, half, rows]``, its first half negated."""
    half, rows = cos.shape
    halves, result = x.T.reshape(-1, 2, half, rows), out.T.reshape(-1, 2, half, rows)
    np.multiply(halves, cos, out=result)
    result += halves[:, ::-1] * sin


def silu(x: Float32, out: Float32) -> None:
    """``x / (1 + exp(-x))``; exp may overflow to infinity, which gives the right 0."""
    np.negative(x, out=out)
    np.exp(out, out=out)
    out += np.float32(1)
    np.divide(x, out, out=out)


def gelu_tanh(x: Float32, out: Float32) -> None:
    """``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))``."""
    np.multiply(x, x, out=out)
    out *= np.float32(0.044715)
    out += np.float32(1)
    out *= x
    out *= np.float32(math.sqrt(2 / math.pi))
    np.tanh(out, out=out)
    out += np.float32(1)
    out *= x
    out *= np.float32(0.5)


def rope_tables(rope: Rope, positions: Int32) -> tuple[Float32, Float32]:
    """Return cos ``[half, rows]`` and sin ``[2, half, rows]``, as ``rotate`` wants them."""
    angles = np.array(rope.inv_freq, np.float32)[:, None] * positions.astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    if rope.factor != 1.0:
        cos *= np.float32(rope.factor)
        sin *= np.float32(rope.factor)
    return cos, np.stack([-sin, sin])


def _by_head(x: Float32, head_width: int) -> Float32:
    """[rows, width] -> [heads, head_width, rows], a view."""
    return x.T.reshape(-1, head_width, len(x))


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers share in one step."""

    batch: Batch
    blocks: NDArray[np.intp]
    """[rows] block that each row's K and V go to."""
    offsets: NDArray[np.intp]
    """[rows] place in that block."""
    ropes: list[tuple[Float32, Float32]]
    """For each distinct Rope of the model."""
    pieces: list[list[paged.Piece]]
    """For each distinct kind of attention of the model."""


Run = Callable[..., None]
"""Run(step, *inputs, output)"""


class ReferenceKernels:
    """NumPy on OpenBLAS; weights are dequantized to float32 at load."""

    name = "reference"
    isa = "numpy"

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def block_bytes(self, kv: KVLayout, block_tokens: int) -> int:
        """K and V in float32."""
        return 2 * 4 * kv.layers * kv.kv_heads * kv.head_width * block_tokens

    def weight_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Every weight in float32."""
        return sum(4 * math.prod(tensor.shape) for tensor in tensors)

    def refuses(self, plan: Plan, block_tokens: int) -> str:
        """Nothing is refused."""
        return ""

    def compile(self, plan: Plan, weight: Callable[[str], Tensor], *, n_blocks: int, block_tokens: int) -> Program:
        """Load the weights and allocate the KV pool, which the system backs with memory as it is touched."""
        return _Program(plan, weight, n_blocks, block_tokens, self.threads)


class _Program:
    """The Plan's Calls bound to weights, buffers and the KV pool."""

    def __init__(
        self, plan: Plan, weight: Callable[[str], Tensor], n_blocks: int, block_tokens: int, threads: int
    ) -> None:
        groups = group_calls(plan)
        self._weights = load_weights(groups, checked_tensors(plan, weight), threads)
        self._block_tokens = block_tokens
        shape = (plan.kv.layers, n_blocks, plan.kv.kv_heads, block_tokens, plan.kv.head_width)
        # Zeros, not uninitialised: masked keys are multiplied by 0, and 0 x NaN is NaN.
        self._k, self._v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._workers = Workers(threads)
        self._scratch = [paged.Scratch() for _ in range(threads)]
        self._logits = np.empty((0, plan.vocabulary), np.float32)
        self._ropes: list[Rope] = []
        self._kinds: list[tuple[paged.Shape, int | None]] = []
        self._places, self._widths = place_values(groups)
        self._nodes = [self._node(group) for group in groups]
        self._rows = -1
        self._bound: list[tuple[Run, tuple[Float32, ...]]] = []
        self._ops = [group.calls[0].op for group in groups]
        self._profile: dict[str, tuple[float, int]] | None = None

    def run(self, batch: Batch) -> Float32:
        """Replay the Plan."""
        if len(batch.token_ids) != self._rows:
            self._resize(len(batch.token_ids))
        step = self._step(batch)
        with self._workers.step():
            if self._profile is None:
                for run, arrays in self._bound:
                    run(step, *arrays)
            else:
                self._run_timed(step, self._profile)
        return self._logits[: len(batch.logit_rows)]

    def _run_timed(self, step: _Step, profile: dict[str, tuple[float, int]]) -> None:
        for op, (run, arrays) in zip(self._ops, self._bound, strict=True):
            began = time.perf_counter()
            run(step, *arrays)
            seconds, calls = profile.get(op, (0.0, 0))
            profile[op] = (seconds + time.perf_counter() - began, calls + 1)

    def set_profile(self, on: bool) -> None:
        """Keep time of every Op, or not."""
        self._profile = {} if on else None

    def profile(self) -> dict[str, tuple[float, int]]:
        """Return the times of the Ops that ran."""
        return dict(self._profile or {})

    def draw(self, logits: Float32, draws: Draws) -> Int32:
        """Draw row by row."""
        return draw(logits, draws)

    def limits(self) -> Limits:
        """Return the rates of sums over a large array and of square matrix products, on all workers."""
        memory = np.ones(_READ_FLOATS, np.float32)
        square = np.ones((_SQUARE, _SQUARE), np.float32)
        parts = np.array_split(memory, 16 * self._workers.threads)
        squares = [np.empty_like(square) for _ in range(2 * self._workers.threads)]

        def read(part: Float32, _: int) -> None:
            part.dot(part)

        def multiply(out: Float32, _: int) -> None:
            np.dot(square, square, out=out)

        began = time.perf_counter()
        self._workers.share(read, parts)
        read_s = time.perf_counter() - began
        began = time.perf_counter()
        self._workers.share(multiply, squares)
        product_s = time.perf_counter() - began
        return Limits(memory.nbytes / read_s, 2.0 * _SQUARE**3 * len(squares) / product_s)

    def _step(self, batch: Batch) -> _Step:
        rows_of = np.diff(batch.starts)
        sequences = np.repeat(np.arange(len(rows_of)), rows_of)
        blocks, offsets = np.divmod(batch.positions.astype(np.intp), self._block_tokens)
        return _Step(
            batch,
            batch.tables[sequences, blocks].astype(np.intp),
            offsets,
            [rope_tables(rope, batch.positions) for rope in self._ropes],
            [
                paged.cut(batch, shape, window, self._block_tokens, self._workers.threads)
                for shape, window in self._kinds
            ],
        )

    def _resize(self, rows: int) -> None:
        """Lay the Values out for a number of rows."""
        buffers = [np.empty(width * rows, np.float32) for width in self._widths]
        views = {
            index: buffers[at.buffer][at.column * rows : (at.column + at.width) * rows].reshape(at.width, rows).T
            for index, at in self._places.items()
        }
        self._bound = [(run, tuple(views[index] for index in indices)) for run, indices in self._nodes]
        self._rows = rows

    def _node(self, group: Group) -> tuple[Run, tuple[int, ...]]:
        """Return what runs the group, and the Values that it reads and writes."""
        call = group.calls[0]
        constants: dict[str, Any] = call.constants
        weight: Any = self._weights.get(group.weight(0))  # attend, rope, gate and add have none
        run: Run
        match call.op:
            case "embed":
                run = partial(_embed, weight, np.float32(constants["scale"]))
            case "rms_norm":
                offset = np.float32(constants["weight_offset"])
                run = partial(_rms_norm, weight + offset, constants["eps"], constants["head_width"])
            case "linear":
                run = partial(_linear, self._workers, weight, self._weights.get(group.weight(1)))
            case "rope":
                run = partial(_rope, _index(self._ropes, constants["rope"]))
            case "attend":
                run = self._attend(constants)
            case "gate":
                run = partial(_gate, self._workers, silu if constants["activation"] == "silu" else gelu_tanh)
            case "add":
                run = _add
            case "head":
                run = partial(self._head, weight, constants["softcap"])
            case op:
                raise AssertionError(f"no reference for {op}")
        return run, (*(value.index for value in call.inputs), group.output)

    def _attend(self, constants: dict[str, Any]) -> Run:
        kv_heads, head_width = constants["kv_heads"], constants["head_width"]
        shape = paged.Shape(
            kv_heads, constants["heads"] // kv_heads, head_width, constants["scale"], constants["softcap"]
        )
        kind = _index(self._kinds, (shape, constants["window"]))
        k_pool, v_pool = self._k[constants["layer"]], self._v[constants["layer"]]
        workers, scratch = self._workers, self._scratch

        def attend(step: _Step, q: Float32, k: Float32, v: Float32, out: Float32) -> None:
            k_pool[step.blocks, :, step.offsets] = k.T.reshape(kv_heads, head_width, -1).transpose(2, 0, 1)
            v_pool[step.blocks, :, step.offsets] = v.T.reshape(kv_heads, head_width, -1).transpose(2, 0, 1)
            by_row, result = np.ascontiguousarray(q), np.empty(q.shape, np.float32)

            def work(piece: paged.Piece, worker: int) -> None:
                paged.attend(by_row, k_pool, v_pool, result, piece, shape, scratch[worker])

            pieces = step.pieces[kind]
            if len(pieces) > 1 and sum(piece.blocks.size for piece in pieces) * k_pool[0].size >= _WORTH_SHARING:
                workers.share(work, pieces)
            else:
                for piece in pieces:
                    work(piece, 0)
            out[...] = result

        return attend

    def _head(self, weight: Float32, softcap: float | None, step: _Step, x: Float32, out: Float32) -> None:
        rows = step.batch.logit_rows
        if len(self._logits) < len(rows):
            self._logits = np.empty((len(rows), len(weight)), np.float32)
        logits = self._logits[: len(rows)]
        chosen = np.ascontiguousarray(x.T[:, rows])
        by_row = np.ascontiguousarray(chosen.T)

        def part(words: slice, _: int) -> None:
            if len(rows) < _TRANSPOSED_LOGITS:
                logits[:, words] = np.dot(weight[words], chosen).T
            else:
                np.matmul(by_row, weight[words].T, out=logits[:, words])
            if softcap is not None:
                logits[:, words] = np.tanh(logits[:, words] / np.float32(softcap)) * np.float32(softcap)

        if len(rows):
            self._workers.share(part, chunks(len(weight)))


def _embed(table: Float32, scale: np.float32, step: _Step, out: Float32) -> None:
    out[...] = table[step.batch.token_ids]
    if scale != 1:
        out *= scale


def _rms_norm(weight: Float32, eps: float, head_width: int, _: _Step, x: Float32, out: Float32) -> None:
    rms_norm(x, weight, out, eps=eps, head_width=head_width)


def _linear(workers: Workers, weight: Float32, bias: Float32 | None, _: _Step, x: Float32, out: Float32) -> None:
    linear(x, weight, bias, out, workers)


def _rope(index: int, step: _Step, x: Float32, out: Float32) -> None:
    rotate(x, *step.ropes[index], out)


def _gate(
    workers: Workers,
    activation: Callable[[Float32, Float32], None],
    _: _Step,
    gate: Float32,
    up: Float32,
    out: Float32,
) -> None:
    def part(columns: slice, _: int) -> None:
        with np.errstate(over="ignore"):
            activation(gate[:, columns], out[:, columns])
        out[:, columns] *= up[:, columns]

    if gate.size < _WORTH_SHARING:
        part(slice(None), 0)
    else:
        workers.share(part, chunks(gate.shape[1]))


def _add(_: _Step, a: Float32, b: Float32, out: Float32) -> None:
    np.add(a, b, out=out)


def _index(known: list[T], item: T) -> int:
    if item not in known:
        known.append(item)
    return known.index(item)
