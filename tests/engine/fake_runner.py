"""A deterministic Runner without a model: the next token depends on every token that it reads back through the table.

Wrong tables, stale or wrongly shared blocks and wrong positions therefore give wrong tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.engine.work import Work

_ROWS = 509


class FakeRunner:
    def __init__(self, *, vocabulary: int = 61, block_tokens: int = 4, n_blocks: int = 64) -> None:
        self.vocabulary = vocabulary
        self.block_tokens = block_tokens
        self.n_blocks = n_blocks
        self.blocks: list[list[int | None]] = [[None] * block_tokens for _ in range(n_blocks)]
        # All rows are distinct in their maxima, so that equal tokens mean an equal context.
        self.rows: list[NDArray[np.float32]] = list(
            np.random.default_rng(7).normal(0.0, 2.0, (_ROWS, vocabulary)).astype(np.float32)
        )
        self.steps: list[list[Work]] = []
        self.before_run: Callable[[Sequence[Work]], None] = lambda work: None

    def logits_of(self, context: Sequence[int | None]) -> NDArray[np.float32]:
        """What the "model" says after a context."""
        digest = hashlib.blake2b(repr(list(context)).encode(), digest_size=8).digest()
        return self.rows[int.from_bytes(digest, "little") % _ROWS]

    def run(self, work: Sequence[Work]) -> NDArray[np.float32]:
        work = [Work(tuple(w.token_ids), w.start, tuple(w.table), w.logits) for w in work]
        self.steps.append(work)
        self.before_run(work)
        written: set[tuple[int, int]] = set()
        for w in work:
            assert w.token_ids
            assert w.logits in (0, 1, len(w.token_ids))
            assert len(set(w.table)) == len(w.table)
            for position, token in enumerate(w.token_ids, w.start):
                place = (w.table[position // self.block_tokens], position % self.block_tokens)
                assert place not in written, "two sequences write to one block"
                written.add(place)
                self.blocks[place[0]][place[1]] = token
        rows: list[NDArray[np.float32]] = []
        for w in work:
            end = w.start + len(w.token_ids)
            context = [self.blocks[w.table[p // self.block_tokens]][p % self.block_tokens] for p in range(end)]
            rows.extend(self.logits_of(context[: length + 1]) for length in range(end - w.logits, end))
        return np.array(rows, dtype=np.float32).reshape(len(rows), self.vocabulary)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens that follow a prompt, worked out without blocks."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits_of(tokens).argmax()))
        return tokens[len(prompt) :]
