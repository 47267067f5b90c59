"""Attention over a paged KV pool in NumPy: which keys each row sees, then scores, softmax and sum.

A layer's K and V are ``[n_blocks, kv_heads, block_tokens, head_width]`` each: a block is one contiguous copy. Rows are
cut into Pieces once per step and window; every layer then runs the same Pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.kernels.ops import Batch, Int32
from headway.kernels.tensor import Float32

_PIECE_ROWS = 128  # rows of a prefill chunk that run together: bounds the work above the diagonal
_SCORES = 1 << 22  # most scores of a piece: 16 MiB
_GATHERED = 1 << 20  # most elements of K gathered for a group of decodes: 4 MiB, about a core's caches
_FEW = 32  # query rows per KV head up to which scores are made block by block


@dataclass(frozen=True, slots=True)
class Shape:
    """The heads of a layer."""

    kv_heads: int
    group: int
    """Query heads that share a KV head."""
    head_width: int
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Sequences with equally many rows, or part of one: S sequences, R rows each, B blocks (padded) each."""

    rows: NDArray[np.intp]
    """[S, R] rows of the batch."""
    blocks: NDArray[np.intp]
    """[S, B] blocks to gather."""
    mask: Float32
    """[S, B, R, block_tokens] 0 where a row sees the key, else minus infinity."""


class Scratch:
    """Buffers that a worker reuses from call to call, by name."""

    def __init__(self) -> None:
        self._flat: dict[str, Float32] = {}

    def array(self, name: str, shape: tuple[int, ...]) -> Float32:
        """Return an uninitialised array, valid until the name is asked for again."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.size < size:
            flat = self._flat[name] = np.empty(size, np.float32)
        return flat[:size].reshape(shape)


def cut(batch: Batch, shape: Shape, window: int | None, block_tokens: int, workers: int) -> list[Piece]:
    """Return the Pieces that cover all rows of the batch once."""
    spans = _spans(batch, shape, window, block_tokens)
    block_elements = shape.kv_heads * block_tokens * shape.head_width
    pieces = []
    group: list[_Span] = []
    share = -(-len(spans) // workers)
    for span in sorted(spans):
        if group:
            blocks = max(span.n_blocks, group[-1].n_blocks)
            full = len(group) >= share or (len(group) + 1) * blocks * block_elements > _GATHERED
            # Padding to the longest may waste a quarter at most.
            if full or span.n_rows != group[0].n_rows or 4 * blocks > 5 * group[0].n_blocks + 4:
                pieces.append(_piece(group, batch, window, block_tokens))
                group = []
        group.append(span)
    if group:
        pieces.append(_piece(group, batch, window, block_tokens))
    return pieces


def attend(q: Float32, k: Float32, v: Float32, out: Float32, piece: Piece, shape: Shape, scratch: Scratch) -> None:
    """Fill ``out`` for the piece's rows; q and out are ``[rows, heads * head_width]``, k and v the layer's pool."""
    if piece.rows.shape[1] * shape.group <= _FEW:
        _attend_few(q, k, v, out, piece, shape, scratch)
    else:
        _attend_many(q, k, v, out, piece, shape, scratch)


def _attend_few(q: Float32, k: Float32, v: Float32, out: Float32, piece: Piece, shape: Shape, scratch: Scratch) -> None:
    """Decodes and short chunks: many small products, one per block and KV head, and no copy but the gather."""
    kv_heads, group, width = shape.kv_heads, shape.group, shape.head_width
    sequences, rows = piece.rows.shape
    n_blocks, block_tokens = piece.blocks.shape[1], k.shape[2]
    gathered = scratch.array("gathered", (sequences, n_blocks, kv_heads, block_tokens, width))
    scores = scratch.array("scores", (sequences, n_blocks, kv_heads, group * rows, block_tokens))
    sums = scratch.array("sums", (sequences, n_blocks, kv_heads, group * rows, width))

    queries = q[piece.rows].reshape(sequences, rows, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(sequences, 1, kv_heads, group * rows, width) * np.float32(shape.scale)
    np.take(k, piece.blocks, axis=0, out=gathered, mode="clip")
    np.matmul(queries, gathered.swapaxes(-1, -2), out=scores)
    by_row = scores.reshape(sequences, n_blocks, kv_heads, group, rows, block_tokens)
    _cap(by_row, shape.softcap)
    by_row += piece.mask[:, :, None, None]
    scores -= scores.max((1, 4), keepdims=True)
    np.exp(scores, out=scores)
    np.take(v, piece.blocks, axis=0, out=gathered, mode="clip")
    result = np.matmul(scores, gathered, out=sums).sum(1)
    result /= scores.sum((1, 4))[..., None]
    out[piece.rows] = (
        result.reshape(sequences, kv_heads, group, rows, width)
        .transpose(0, 3, 1, 2, 4)
        .reshape(sequences, rows, kv_heads * group * width)
    )


def _attend_many(
    q: Float32, k: Float32, v: Float32, out: Float32, piece: Piece, shape: Shape, scratch: Scratch
) -> None:
    """Long chunks: one large product per KV head over the keys laid end to end."""
    kv_heads, group, width = shape.kv_heads, shape.group, shape.head_width
    rows = piece.rows.shape[1]
    n_blocks, block_tokens = piece.blocks.shape[1], k.shape[2]
    tokens = n_blocks * block_tokens
    joined = scratch.array("gathered", (kv_heads, tokens, width))
    scores = scratch.array("scores", (kv_heads, group * rows, tokens))
    result = scratch.array("sums", (kv_heads, group * rows, width))
    mask = piece.mask.transpose(0, 2, 1, 3).reshape(len(piece.rows), rows, tokens)
    for i, at in enumerate(piece.rows):
        queries = q[at].reshape(rows, kv_heads, group, width).transpose(1, 2, 0, 3)
        queries = queries.reshape(kv_heads, group * rows, width) * np.float32(shape.scale)
        joined.reshape(kv_heads, n_blocks, block_tokens, width)[...] = k[piece.blocks[i]].swapaxes(0, 1)
        np.matmul(queries, joined.swapaxes(-1, -2), out=scores)
        by_row = scores.reshape(kv_heads, group, rows, tokens)
        _cap(by_row, shape.softcap)
        by_row += mask[i]
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        joined.reshape(kv_heads, n_blocks, block_tokens, width)[...] = v[piece.blocks[i]].swapaxes(0, 1)
        np.matmul(scores, joined, out=result)
        result /= scores.sum(-1, keepdims=True)
        out[at] = result.reshape(kv_heads, group, rows, width).transpose(2, 0, 1, 3).reshape(rows, -1)


def _cap(scores: Float32, softcap: float | None) -> None:
    """``softcap * tanh(scores / softcap)``, in place (Gemma 2)."""
    if softcap is not None:
        scores /= np.float32(softcap)
        np.tanh(scores, out=scores)
        scores *= np.float32(softcap)


@dataclass(frozen=True, slots=True, order=True)
class _Span:
    """Consecutive rows of one sequence and the blocks that they see; sorts like with like."""

    n_rows: int
    n_blocks: int
    sequence: int
    first_row: int
    first_block: int


def _spans(batch: Batch, shape: Shape, window: int | None, block_tokens: int) -> list[_Span]:
    spans = []
    heads = shape.kv_heads * shape.group
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    for sequence, length in enumerate(lengths):
        start, stop = starts[sequence], starts[sequence + 1]
        most = max(1, min(_PIECE_ROWS, _SCORES // (heads * length)))
        for row in range(start, stop, most):
            n_rows = min(most, stop - row)
            position = length - (stop - row)
            first = 0 if window is None else max(0, position - window + 1) // block_tokens
            last = (position + n_rows - 1) // block_tokens
            spans.append(_Span(n_rows, last - first + 1, sequence, row, first))
    return spans


def _piece(spans: list[_Span], batch: Batch, window: int | None, block_tokens: int) -> Piece:
    n_rows, n_blocks = spans[0].n_rows, max(span.n_blocks for span in spans)
    rows = np.array([span.first_row for span in spans], np.intp)[:, None] + np.arange(n_rows)
    blocks = np.zeros((len(spans), n_blocks), np.intp)
    for i, span in enumerate(spans):
        blocks[i, : span.n_blocks] = batch.tables[span.sequence, span.first_block : span.first_block + span.n_blocks]
    first_keys = np.array([span.first_block * block_tokens for span in spans], np.int32)
    keys = first_keys[:, None, None] + np.arange(n_blocks * block_tokens, dtype=np.int32)
    positions: Int32 = batch.positions[rows][:, :, None]
    seen = keys <= positions
    if window is not None:
        seen &= keys > positions - window
    mask = np.where(seen, np.float32(0), np.float32(-np.inf)).reshape(len(spans), n_rows, n_blocks, block_tokens)
    return Piece(rows, blocks, np.ascontiguousarray(mask.swapaxes(1, 2)))
