"""How long a step will take: learned at the start, corrected by every step that runs.

A step's time is a sum of what it does: the products over its rows (a curve with knots, since few rows cost the reading
of the weights and many cost arithmetic), the head for the rows that need logits, and attention, by the context that
decodes read and the pairs that prompts make. The sum is multiplied by how fast the machine is right now, which moves
within a few steps (neighbours come and go); the coefficients move slowly.

Each step's error is shared out in proportion to what each term had said (a normalised least-mean-squares step in
relative coordinates), so what did not take part does not change, and no coefficient can become negative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows at which the curve of the products is kept; linear between them, and on beyond the last."""

_TERMS = len(KNOTS) + 4
_HEAD, _LOGITS, _CONTEXT, _PAIRS = range(len(KNOTS), _TERMS)
_PACE_RATE = 0.2
"""How much of an error (as a logarithm) the machine's pace takes over at once."""
_TERM_RATE = 0.04
_ERROR_RATE = 0.05
_DOUBLE = 2.05
"""Twice the rows take at most this much longer."""
_OUTLIER = 3.0
"""Steps that take longer by more than this factor are taken for this much: a page fault is no news of the model."""


class Shape(NamedTuple):
    """What a step does, as far as its time goes."""

    rows: int = 0
    """Tokens computed."""
    logits: int = 0
    """Rows that need logits."""
    context: int = 0
    """Tokens that decodes read back, over all of them."""
    pairs: int = 0
    """Products of a prompt's token with a token before it, over all prompts' chunks."""

    def with_decode(self, context: int) -> Shape:
        """Return the step with one more decode over so much context."""
        return Shape(self.rows + 1, self.logits + 1, self.context + context, self.pairs)

    def with_decodes(self, count: int, context: int) -> Shape:
        """Return the step with so many more decodes that read so much context together."""
        return Shape(self.rows + count, self.logits + count, self.context + context, self.pairs)

    def with_prefill(self, tokens: int, start: int, logits: int = 0) -> Shape:
        """Return the step with so many tokens more of a prompt, the first at position ``start``."""
        pairs = tokens * start + tokens * (tokens + 1) // 2
        return Shape(self.rows + tokens, self.logits + logits, self.context, self.pairs + pairs)


class CostModel:
    """Predicts the seconds of a step."""

    def __init__(self, terms: Sequence[float] | None = None, pace: float = 1.0) -> None:
        """Start from known coefficients (``terms``, as in the attribute), or from a guess that the first steps mend."""
        self.terms = list(terms) if terms is not None else _guess(0.02)
        """Seconds: at the knots; of the head at all; of a row of logits; of a token of context; of a pair."""
        assert len(self.terms) == _TERMS
        self.pace = pace
        """How much slower than the coefficients say the machine is now."""
        self.error = 0.1
        """Running mean of the relative error."""
        self.steps = 0

    def step_s(self, shape: Shape) -> float:
        """Return the predicted seconds of a step."""
        if shape.rows <= 0:
            return 0.0
        return self.pace * self._raw(_parts(shape))

    def learn(self, shape: Shape, seconds: float) -> float:
        """Take a step's measured time in; return the relative error of what had been predicted."""
        if shape.rows <= 0 or seconds <= 0.0:
            return 0.0
        parts = _parts(shape)
        raw = self._raw(parts)
        predicted = self.pace * raw
        error = abs(predicted - seconds) / seconds
        taken = min(max(seconds, predicted / _OUTLIER), predicted * _OUTLIER)
        self.steps += 1
        self.error += _ERROR_RATE * (min(error, 1.0) - self.error)
        self._adapt(parts, taken / self.pace, _TERM_RATE)
        self.pace *= (taken / predicted) ** _PACE_RATE
        return error

    def room(self, shape: Shape, start: int, limit_s: float, most: int) -> int:
        """Return how many tokens of a prompt (at most ``most``, the first at ``start``) keep the step in the limit."""
        if most <= 0 or self.step_s(shape.with_prefill(1, start)) > limit_s:
            return 0
        if self.step_s(shape.with_prefill(most, start, 1)) <= limit_s:
            return most
        low, high = 1, most
        while high - low > 1:
            middle = (low + high) // 2
            if self.step_s(shape.with_prefill(middle, start, 1)) <= limit_s:
                low = middle
            else:
                high = middle
        return low

    def prefill_s(self, tokens: int, start: int = 0, *, chunk: int = 64) -> float:
        """Return the seconds of so many tokens of a prompt with nothing beside it, in chunks."""
        if tokens <= 0:
            return 0.0
        whole, rest = divmod(tokens, chunk)
        rows = whole * self._curve(chunk) + (self._curve(rest) if rest else 0.0)
        pairs = tokens * start + tokens * (tokens + 1) // 2
        return self.pace * (rows + self.terms[_HEAD] + self.terms[_LOGITS] + pairs * self.terms[_PAIRS])

    def fit(self, measured: Sequence[tuple[Shape, float]]) -> None:
        """Set the coefficients from a few measured steps: what they do not tell apart keeps the proportions it had."""
        ones = [seconds for shape, seconds in measured if shape.rows == 1 and shape.logits == 1]
        if ones:
            self.terms = _guess(sorted(ones)[len(ones) // 2])
        rows = [(_parts(shape), seconds) for shape, seconds in measured]
        for turn in range(40):
            for parts, seconds in rows:
                self._adapt(parts, seconds, 1.0 if turn < 25 else 0.3)
        self.pace = 1.0

    def _raw(self, parts: Sequence[tuple[int, float]]) -> float:
        terms = self.terms
        return sum(terms[place] * amount for place, amount in parts)

    def _curve(self, rows: int) -> float:
        return sum(self.terms[place] * amount for place, amount in _knots(rows))

    def _adapt(self, parts: Sequence[tuple[int, float]], seconds: float, rate: float) -> None:
        """Move the coefficients towards ``seconds``, each by the square of its share in what they said."""
        terms = self.terms
        said = [(place, terms[place] * amount) for place, amount in parts if amount > 0.0]
        total = sum(part for _, part in said)
        squares = sum(part * part for _, part in said)
        if total <= 0.0 or squares <= 0.0:
            return
        gain = rate * (seconds - total) / squares
        for place, part in said:
            terms[place] *= min(max(1.0 + gain * part, 0.5), 2.0)
        self._straighten(said[0][0], said[1][0] if len(said) > 1 and said[1][0] < len(KNOTS) else said[0][0])

    def _straighten(self, low: int, high: int) -> None:
        """Make the other knots agree with those just learned: more rows take longer, twice as many at most twice."""
        terms = self.terms
        for place in range(low + 1, len(KNOTS)):
            before = terms[place - 1]
            terms[place] = min(max(terms[place], before), _DOUBLE * before)
        for place in range(high - 1, -1, -1):
            after = terms[place + 1]
            terms[place] = min(max(terms[place], after / _DOUBLE), after)


def _guess(one_s: float) -> list[float]:
    """Return coefficients that are about right for a CPU on which a decode of one sequence takes ``one_s``."""
    knots = [one_s * (0.7 + 0.1 * rows) for rows in KNOTS]
    return [*knots, 0.1 * one_s, 0.02 * one_s, 1e-4 * one_s, 2e-5 * one_s]


def _knots(rows: int) -> tuple[tuple[int, float], ...]:
    """Return the two knots around a number of rows, each with its weight."""
    if rows <= 0:
        return ()
    if rows > KNOTS[-1]:
        return ((len(KNOTS) - 1, rows / KNOTS[-1]),)
    high = (rows - 1).bit_length()  # the knots are the powers of two
    upper = KNOTS[high]
    if rows == upper:
        return ((high, 1.0),)
    lower = KNOTS[high - 1]
    share = (rows - lower) / (upper - lower)
    return ((high - 1, 1.0 - share), (high, share))


def _parts(shape: Shape) -> list[tuple[int, float]]:
    parts: list[tuple[int, float]] = list(_knots(shape.rows))
    if shape.logits:
        parts += ((_HEAD, 1.0), (_LOGITS, float(shape.logits)))
    parts += ((_CONTEXT, float(shape.context)), (_PAIRS, float(shape.pairs)))
    return parts


class Probe(NamedTuple):
    """A step to measure: decodes over an equal context each, or a chunk of one prompt."""

    decodes: int = 0
    context: int = 16
    prefill: int = 0
    start: int = 0
    logits: bool = True

    @property
    def shape(self) -> Shape:
        """What it does."""
        if self.prefill:
            return Shape().with_prefill(self.prefill, self.start)
        return Shape(self.decodes, self.decodes if self.logits else 0, self.decodes * self.context, 0)


PROBES = (
    Probe(decodes=1),
    Probe(decodes=1, logits=False),
    Probe(decodes=8),
    Probe(decodes=2),
    Probe(prefill=32),
    Probe(decodes=4, context=512),
    Probe(prefill=16, start=496),
    Probe(decodes=16),
    Probe(prefill=64),
    Probe(decodes=4),
)
"""The most telling first: a slow model has time for a few only."""


def calibrate(measure: Callable[[Probe], float], limit_s: float, longest: int) -> CostModel:
    """Return a model of the steps that fit into ``limit_s``; ``measure`` runs a Probe and returns its seconds.

    Probes beyond ``longest`` tokens of context are left out. The very first step, which warms up, is not counted.
    """
    spent = measure(PROBES[0])
    measured: list[tuple[Shape, float]] = []
    cost = CostModel()
    for probe in PROBES:
        if max(probe.context, probe.prefill + probe.start) > longest:
            continue
        if measured and spent + cost.step_s(probe.shape) > limit_s:
            continue
        seconds = measure(probe)
        spent += seconds
        while seconds < 0.004 and spent < limit_s / 4:  # short ones are noisy: the quickest of a few
            again = measure(probe)
            spent += again
            if again >= seconds:
                break
            seconds = again
        measured.append((probe.shape, seconds))
        cost.fit(measured)
    return cost
