"""A deterministic Runner without a model: the next token depends on every token that it reads back through the table.

Wrong tables, stale or wrongly shared blocks and wrong positions therefore give wrong tokens. ``Bench`` is an engine on
it, and checks after each step what must always hold.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.config import EngineConfig
from headway.engine.cost import CostModel
from headway.engine.engine import Engine
from headway.engine.messages import Abort, Emitted, FromEngine, Refused, Submit, decode_from_engine, encode
from headway.engine.sampler import Sampler
from headway.engine.sequence import Group
from headway.engine.work import Work
from headway.kernels.draws import draw
from headway.telemetry.clock import FakeClock
from headway.types import EngineTiming, Params

EOS = 0
_ROWS = 509


def quick() -> CostModel:
    """A machine so fast that time never limits a step."""
    return CostModel([1e-9 * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)] + [1e-12] * 4)


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
        self.draw = draw

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


def submit(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    temperature: float = 0.0,
    priority: int = 0,
    tenant: str = "",
    deadline: float | None = None,
    **params: object,
) -> Submit:
    return Submit(
        id=request_id,
        token_ids=tuple(prompt),
        params=Params(max_tokens=max_tokens, temperature=temperature, **params),  # type: ignore[arg-type]
        priority=priority,
        tenant=tenant,
        deadline=deadline,
    )


class Bench:
    """An engine on the fake runner, and what came out of it."""

    def __init__(
        self,
        *,
        n_blocks: int = 64,
        step_tokens: int = 16,
        max_running: int = 8,
        max_waiting: int = 1000,
        prefix_cache: bool = True,
        context_tokens: int = 200,
        model_salt: str = "",
    ) -> None:
        self.runner = FakeRunner(n_blocks=n_blocks)
        self.clock = FakeClock()
        config = EngineConfig(
            step_tokens=step_tokens, max_running=max_running, max_waiting=max_waiting, prefix_cache=prefix_cache
        )
        self.engine = Engine(
            self.runner,
            config,
            eos=frozenset({EOS}),
            context_tokens=context_tokens,
            clock=self.clock,
            model_salt=model_salt,
            cost=quick(),
        )
        self.said: list[FromEngine] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: Counter[tuple[str, int]] = Counter()
        self.last: dict[tuple[str, int], Emitted] = {}
        self.refused: dict[str, Refused] = {}
        self.first_at: dict[str, int] = {}
        """The step of each request's first token."""

    def step(self) -> list[FromEngine]:
        said = self.engine.step()
        self.clock.advance(0.01)
        assert not self.engine.scheduler.check_integrity()
        assert decode_from_engine(encode(said)) == said
        for message in said:
            if isinstance(message, Refused):
                assert message.id not in self.refused
                self.refused[message.id] = message
                continue
            assert isinstance(message, Emitted)
            key = (message.id, message.index)
            assert not self.ends[key], "something was said after the end"
            self.tokens.setdefault(key, []).extend(message.token_ids)
            self.first_at.setdefault(message.id, self.engine.steps)
            self.last[key] = message
            if message.finish is not None:
                self.ends[key] += 1
        self.said += said
        return said

    def run(self, *, cancel_at: Mapping[int, Sequence[str]] | None = None) -> None:
        for _ in range(5000):
            for step, ids in list((cancel_at or {}).items()):
                if step <= self.engine.steps:
                    for request_id in ids:
                        self.engine.abort(Abort(id=request_id))
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def run_for(self, seconds: float) -> None:
        until = self.clock.now() + seconds
        while self.engine.has_work and self.clock.now() < until:
            self.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def answer(self, request: Submit) -> list[int]:
        """The request's tokens, run to the end together with whatever else is queued."""
        self.engine.submit(request)
        self.run()
        return self.tokens[request.id, 0]

    def expected(self, request: Submit, index: int = 0) -> list[int]:
        """What a choice must be, worked out alone: no blocks, no batch."""
        group = Group(
            request,
            number=0,
            received=0.0,
            seed=request.params.seed or 0,
            max_tokens=request.params.max_tokens or 0,
            eos=frozenset({EOS}),
            salt=("", ""),
        )
        sequence, sampler = group.choices[index], Sampler(self.runner.vocabulary)
        while True:
            logits = self.runner.logits_of(sequence.tokens)
            if sequence.append(sampler.sample(logits[None], [0], [sequence])[0]):
                return sequence.tokens[sequence.output_start :]

    def timing(self, request_id: str, index: int = 0) -> EngineTiming:
        timing = self.last[request_id, index].timing
        assert timing is not None
        return timing

    def held(self) -> int:
        return self.engine.pool.counts().held
