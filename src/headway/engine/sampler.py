"""Logits to ids.

Greedy is temperature 0 (or below ``_GREEDY``): the largest logit, the lowest id among equals. Otherwise the row goes
through temperature, top_k, top_p (of what top_k left) and min_p (against the most probable token), and one uniform
number per (seed, choice, position) picks from the cumulative distribution: no state, so neither neighbours nor
preemption nor a restart can change it. Each row is computed alone, for the same reason.

NaN logits count as impossible, +inf as the largest number; a row without any possible token gives id 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from headway.engine.logits import FLOOR, Floats, History, Ids, adjust, adjusts, penalised, sane
from headway.engine.messages import Logprobs
from headway.engine.sequence import Sequence
from headway.types import Params

_GREEDY = 1e-6
"""Temperatures below this are greedy: they would tell logits 0.0001 apart with odds of e^100."""

_SPAN = 256
"""Rows are searched by spans of this length first."""


def uniform(seed: int, index: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to a position of a choice's output."""
    digest = hashlib.blake2b(b"%d:%d:%d" % (seed, index, position), digest_size=8, person=b"headway.sample").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    """Draws one token per row; keeps the token counts of sequences with penalties until they are forgotten."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._histories: dict[Sequence, History] = {}

    def sample(self, logits: Floats, rows: Seq[int], sequences: Seq[Sequence]) -> list[int]:
        """Return the next token of each sequence; the i-th's logits are row ``rows[i]``, which stays as it is."""
        return [self._draw(logits[row], sequence) for row, sequence in zip(rows, sequences, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._histories.pop(sequence, None)

    def _draw(self, row: Floats, sequence: Sequence) -> int:
        params = sequence.group.submit.params
        if adjusts(sequence):
            row = sane(row).copy()
            adjust(row, sequence, self._history(sequence) if penalised(params) else None)
        if params.temperature < _GREEDY:
            best = int(row.argmax())
            # argmax stops at a NaN, so this catches every row that has one.
            return best if np.isfinite(row[best]) else int(sane(row).argmax())
        return pick(sane(row), params, uniform(sequence.group.seed, sequence.index, sequence.n_output))

    def _history(self, sequence: Sequence) -> History:
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = History(sequence, self.vocabulary)
        return history


def pick(row: Floats, params: Params, u: float) -> int:
    """Return the token at ``u`` of the truncated distribution's running sum, candidates in the order of their ids.

    ``row`` holds no NaN and no +inf.
    """
    best = row.max()
    if best == -np.inf:
        return 0
    ids: Ids | None = None
    if 0 < params.top_k < len(row):
        ids = _largest(row, params.top_k)
        row = row[ids]
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((row - best) / np.float32(params.temperature))
    if params.top_p < 1.0:
        keep = _nucleus(weights, params.top_p)
        weights, ids = weights[keep], keep if ids is None else ids[keep]
    if params.min_p > 0.0:
        # Relative to the most probable token, whose weight is 1.
        keep = np.flatnonzero(weights >= params.min_p)
        weights, ids = weights[keep], keep if ids is None else ids[keep]
    place = _inverse(weights, u)
    return place if ids is None else int(ids[place])


def logprobs(row: Floats, token: int, top: int) -> Logprobs:
    """Return the log-softmax of the model's own logits at ``token``, with the ``top`` best tokens (ties: lower id)."""
    row = sane(row)
    best = float(row.max())
    if best == -np.inf:
        return Logprobs(token_id=token, logprob=FLOOR)
    with np.errstate(under="ignore", over="ignore"):
        norm = best + float(np.log(np.exp(row - np.float32(best)).sum(dtype=np.float64)))
    chosen = float(row[token]) if 0 <= token < len(row) else -np.inf
    ids = _largest(row, min(top, len(row))) if top > 0 else np.empty(0, dtype=np.int64)
    ids = ids[np.argsort(-row[ids], kind="stable")]
    pairs = tuple((int(i), max(float(row[i]) - norm, FLOOR)) for i in ids)
    return Logprobs(token_id=token, logprob=max(chosen - norm, FLOOR), top=pairs)


def _largest(values: Floats, count: int) -> Ids:
    """Return the ids of the ``count`` largest values, ascending; among equal ones the lower ids."""
    ids: Ids | None = None
    spans = len(values) // _SPAN
    if spans > count:
        # The count-th largest of the spans' maxima is a lower bound of the count-th largest value: few pass it.
        maxima = values[: spans * _SPAN].reshape(spans, _SPAN).max(axis=1)
        ids = np.flatnonzero(values >= np.partition(maxima, spans - count)[spans - count])
        values = values[ids]
    if len(values) > count:
        keep = _cut(values, np.partition(values, len(values) - count)[len(values) - count], count)
        ids = keep if ids is None else ids[keep]
    return np.arange(len(values)) if ids is None else ids


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Return the ids, ascending, of the fewest largest weights that hold ``top_p`` of the sum; at least one."""
    total = float(weights.sum(dtype=np.float64))
    # Weights up to the threshold hold at most (1 - top_p) of the sum all together, so what is sought lies above it.
    threshold = np.float32((1.0 - top_p) * total / len(weights))
    above = weights[weights > np.nextafter(threshold, np.float32(0.0))]
    above = np.sort(above)[::-1]  # values only: far cheaper than sorting ids
    count = int(np.searchsorted(np.cumsum(above, dtype=np.float64), top_p * total, side="left")) + 1
    count = min(count, len(above))
    return _cut(weights, above[count - 1], count)


def _cut(values: Floats, least: np.float32, count: int) -> Ids:
    """Return the ids of the ``count`` largest values, given the smallest of them; among equal ones the lower ids."""
    ids = np.flatnonzero(values >= least)
    if len(ids) == count:
        return ids
    ties = ids[values[ids] == least]
    return np.setdiff1d(ids, ties[count - len(ids) :], assume_unique=True)


def _inverse(weights: Floats, u: float) -> int:
    """Return the place where the running sum (float64) passes ``u`` of the total; never a place of weight 0."""
    if len(weights) <= 4 * _SPAN:
        return _passes(np.cumsum(weights, dtype=np.float64), u)[0]
    # Two levels: sums of spans first, then inside of one, so that no running sum over all is needed.
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _SPAN), dtype=np.float64)
    span, rest = _passes(np.cumsum(sums), u)
    first = span * _SPAN
    return first + _passes(np.cumsum(weights[first : first + _SPAN], dtype=np.float64), rest / sums[span])[0]


def _passes(running: NDArray[np.float64], u: float) -> tuple[int, float]:
    """Return the first place whose running sum exceeds ``u`` of the last one, and how far beyond the place before."""
    # Rounding must carry the target neither below the first weight nor past the last.
    target = min(max(u * running[-1], 0.0), float(np.nextafter(running[-1], 0.0)))
    place = int(np.searchsorted(running, target, side="right"))
    return place, target - (float(running[place - 1]) if place else 0.0)
