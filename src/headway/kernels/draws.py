"""Logits to ids, in NumPy: the definition of what a draw is, for kernels to match.

Greedy is temperature 0 (or below ``GREEDY``): the largest logit, the lowest id among equals. Otherwise the row goes
through temperature, top_k, top_p (of what top_k left) and min_p (against the most probable token), and one uniform
number picks from the cumulative distribution, candidates in the order of their ids. Rows do not know of each other.

NaN logits count as impossible, +inf as the largest number; a row without any possible token gives id 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

GREEDY = 1e-6
"""Temperatures below this are greedy: they would tell logits 0.0001 apart with odds of e^100."""

_SPAN = 256
"""Rows are searched by spans of this length first."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Tokens to be drawn from rows of logits; all arrays have one entry for each."""

    rows: NDArray[np.int32]
    temperature: Floats
    top_k: NDArray[np.int32]
    """0 or less: all."""
    top_p: Floats
    min_p: Floats
    u: NDArray[np.float64]
    """From [0, 1)."""


def draw(logits: Floats, draws: Draws) -> NDArray[np.int32]:
    """Return one token for each draw; logits [rows, vocabulary] stay as they are."""
    return np.array([_draw(logits[row], draws, i) for i, row in enumerate(draws.rows)], np.int32)


def _draw(row: Floats, draws: Draws, i: int) -> int:
    if draws.temperature[i] < GREEDY:
        best = int(row.argmax())
        # argmax stops at a NaN, so this catches every row that has one.
        return best if np.isfinite(row[best]) else int(sane(row).argmax())
    return pick(
        sane(row),
        float(draws.u[i]),
        temperature=float(draws.temperature[i]),
        top_k=int(draws.top_k[i]),
        top_p=float(draws.top_p[i]),
        min_p=float(draws.min_p[i]),
    )


def pick(row: Floats, u: float, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> int:
    """Return the token at ``u`` of the truncated distribution's running sum, candidates in the order of their ids.

    ``row`` holds no NaN and no +inf.
    """
    best = row.max()
    if best == -np.inf:
        return 0
    ids: Ids | None = None
    if 0 < top_k < len(row):
        ids = largest(row, top_k)
        row = row[ids]
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((row - best) / np.float32(temperature))
    if top_p < 1.0:
        keep = _nucleus(weights, top_p)
        weights, ids = weights[keep], keep if ids is None else ids[keep]
    if min_p > 0.0:
        # Relative to the most probable token, whose weight is 1.
        keep = np.flatnonzero(weights >= min_p)
        weights, ids = weights[keep], keep if ids is None else ids[keep]
    place = _inverse(weights, u)
    return place if ids is None else int(ids[place])


def sane(row: Floats) -> Floats:
    """Return the row without NaN (impossible) and +inf (certain); itself when there are none."""
    if np.isfinite(row.max()):  # the maximum of a row with a NaN is NaN
        return row
    tame = np.where(np.isnan(row), np.float32(-np.inf), row)
    tame[tame == np.inf] = np.finfo(np.float32).max
    return tame


def largest(values: Floats, count: int) -> Ids:
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
