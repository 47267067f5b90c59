"""Logits to ids: what each sequence asks for becomes draws, which the kernels carry out (kernels/draws.py).

One uniform number per (seed, choice, position) decides: no state, so neither neighbours nor preemption nor a restart
can change a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from headway.engine.logits import FLOOR, History, adjust, adjusts, penalised
from headway.engine.messages import Logprobs
from headway.engine.sequence import Sequence
from headway.kernels.draws import GREEDY, Draws, Floats, draw, largest, sane

Draw = Callable[[Floats, Draws], NDArray[np.int32]]


def uniform(seed: int, index: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to a position of a choice's output."""
    digest = hashlib.blake2b(b"%d:%d:%d" % (seed, index, position), digest_size=8, person=b"headway.sample").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampler:
    """Draws one token per row; keeps the token counts of sequences with penalties until they are forgotten."""

    def __init__(self, vocabulary: int, draw: Draw = draw) -> None:
        self.vocabulary = vocabulary
        self._draw = draw
        self._histories: dict[Sequence, History] = {}

    def sample(self, logits: Floats, rows: Seq[int], sequences: Seq[Sequence]) -> list[int]:
        """Return the next token of each sequence; the i-th's logits are row ``rows[i]``, which stays as it is."""
        changed = [i for i, sequence in enumerate(sequences) if adjusts(sequence)]
        if not changed:
            return [int(token) for token in self._draw(logits, _draws(rows, sequences))]
        tokens = [0] * len(sequences)
        copies = np.stack([sane(logits[rows[i]]) for i in changed])
        for copy, i in zip(copies, changed, strict=True):
            sequence = sequences[i]
            adjust(copy, sequence, self._history(sequence) if penalised(sequence.group.submit.params) else None)
        kept = sorted(set(range(len(sequences))) - set(changed))
        for some, source, places in ((kept, logits, [rows[i] for i in kept]), (changed, copies, range(len(changed)))):
            if some:
                drawn = self._draw(source, _draws(places, [sequences[i] for i in some]))
                for i, token in zip(some, drawn, strict=True):
                    tokens[i] = int(token)
        return tokens

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._histories.pop(sequence, None)

    def _history(self, sequence: Sequence) -> History:
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = History(sequence, self.vocabulary)
        return history


def _draws(rows: Seq[int], sequences: Seq[Sequence]) -> Draws:
    params = [sequence.group.submit.params for sequence in sequences]
    us = [
        0.0 if asked.temperature < GREEDY else uniform(sequence.group.seed, sequence.index, sequence.n_output)
        for sequence, asked in zip(sequences, params, strict=True)
    ]
    return Draws(
        rows=np.array(rows, np.int32),
        temperature=np.array([asked.temperature for asked in params], np.float32),
        top_k=np.array([asked.top_k for asked in params], np.int32),
        top_p=np.array([asked.top_p for asked in params], np.float32),
        min_p=np.array([asked.min_p for asked in params], np.float32),
        u=np.array(us, np.float64),
    )


def logprobs(row: Floats, token: int, top: int) -> Logprobs:
    """Return the log-softmax of the model's own logits at ``token``, with the ``top`` best tokens (ties: lower id)."""
    row = sane(row)
    best = float(row.max())
    if best == -np.inf:
        return Logprobs(token_id=token, logprob=FLOOR)
    with np.errstate(under="ignore", over="ignore"):
        norm = best + float(np.log(np.exp(row - np.float32(best)).sum(dtype=np.float64)))
    chosen = float(row[token]) if 0 <= token < len(row) else -np.inf
    ids = largest(row, min(top, len(row))) if top > 0 else np.empty(0, dtype=np.int64)
    ids = ids[np.argsort(-row[ids], kind="stable")]
    pairs = tuple((int(i), max(float(row[i]) - norm, FLOOR)) for i in ids)
    return Logprobs(token_id=token, logprob=max(chosen - norm, FLOOR), top=pairs)
