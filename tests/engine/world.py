"""An engine whose steps take as long as a formula says, on a fake clock, with the forecast that admits to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

from headway.config import EngineConfig
from headway.engine.cost import CostModel, Probe, Shape, calibrate
from headway.engine.engine import Engine
from headway.engine.forecast import Forecast, Verdict
from headway.engine.messages import Emitted, Refused, Submit
from headway.engine.scheduler import Item
from headway.engine.work import Work
from headway.kernels.draws import Draws, Floats
from headway.telemetry.clock import FakeClock
from headway.types import Params


def truth(shape: Shape) -> float:
    """Seconds of a step: reading of weights, arithmetic, and attention."""
    products = max(0.006, 0.0012 * shape.rows)
    return 0.001 + products + 0.0004 * shape.logits + 1e-6 * shape.context + 4e-7 * shape.pairs


class TimedRunner:
    """Runs nothing; the clock goes on by what the step takes."""

    vocabulary = 2
    block_tokens = 8

    def __init__(self, clock: FakeClock, n_blocks: int, noise: float, seed: int) -> None:
        self.n_blocks = n_blocks
        self._clock = clock
        self._noise = noise
        self._rng = random.Random(seed)
        self.slow = 1.0

    def run(self, work: Sequence[Work]) -> NDArray[np.float32]:
        shape = Shape()
        for part in work:
            tokens = len(part.token_ids)
            if tokens == 1:
                shape = Shape(shape.rows + 1, shape.logits + part.logits, shape.context + part.start + 1, shape.pairs)
            else:
                shape = shape.with_prefill(tokens, part.start, part.logits)
        self._clock.advance(truth(shape) * self.slow * self._rng.lognormvariate(0.0, self._noise))
        return np.zeros((sum(part.logits for part in work), 2), np.float32)

    @property
    def draw(self) -> Callable[[Floats, Draws], NDArray[np.int32]]:
        return lambda logits, draws: np.ones(len(draws.rows), np.int32)


@dataclass
class Fate:
    """What became of a request."""

    submit: Submit
    verdict: Verdict
    refused_at: float | None = None
    first_at: float | None = None
    ended_at: float | None = None
    gaps: list[float] = field(default_factory=list)
    last_at: float = 0.0
    refusal: str = ""

    @property
    def late(self) -> bool:
        assert self.submit.ttft_by is not None
        return self.first_at is None or self.first_at > self.submit.ttft_by


class World:
    def __init__(
        self,
        *,
        n_blocks: int = 1024,
        max_running: int = 16,
        noise: float = 0.05,
        seed: int = 0,
        calibrated: bool = True,
        aging_s: float = 5.0,
    ) -> None:
        self.clock = FakeClock()
        self.runner = TimedRunner(self.clock, n_blocks, noise, seed)
        config = EngineConfig(max_running=max_running, step_tokens=256, prefix_cache=False, aging_s=aging_s)
        cost = CostModel(_calibrated()) if calibrated else CostModel()
        self.engine = Engine(self.runner, config, eos=frozenset({0}), context_tokens=8192, clock=self.clock, cost=cost)
        self.forecast = Forecast(
            max_running=max_running, step_tokens=config.step_tokens, longest_step_s=config.longest_step_s
        )
        self.fates: dict[str, Fate] = {}
        self.steps: list[tuple[float, list[Item]]] = []
        self._names = count()
        self.hear()

    def hear(self) -> None:
        outlook = self.engine.take_status().outlook
        assert outlook is not None
        self.forecast.heard(outlook)

    def request(
        self,
        prompt: int,
        output: int,
        *,
        ttft_s: float | None = None,
        itl_s: float | None = None,
        itl_asked: bool = False,
        priority: int = 0,
        tenant: str = "",
        start_by: float | None = None,
    ) -> Submit:
        return Submit(
            id=str(next(self._names)),
            token_ids=(1,) * prompt,
            params=Params(max_tokens=output, temperature=0.0, ignore_eos=True),
            ttft_by=None if ttft_s is None else self.clock.now() + ttft_s,
            itl_s=itl_s,
            itl_asked=itl_asked,
            priority=priority,
            tenant=tenant,
            start_by=start_by,
        )

    def arrive(self, submit: Submit, *, force: bool = False) -> Fate:
        """Admit as the server does: what would be late, or would make others late, is refused."""
        now = self.clock.now()
        verdict = self.forecast.verdict(submit, now)
        fate = self.fates[submit.id] = Fate(submit, verdict)
        if verdict.late_by_s > 0.0 and submit.ttft_by is not None and not force:
            fate.refused_at = now
            return fate
        self.forecast.submitted(submit, now, verdict)
        self.engine.submit(submit)
        return fate

    def step(self) -> None:
        for message in self.engine.step():
            now = self.clock.now()
            if isinstance(message, Refused):
                self.fates[message.id].refusal = message.code
                self.forecast.ended(message.id, whole=False)
                continue
            assert isinstance(message, Emitted)
            fate = self.fates[message.id]
            if fate.first_at is None:
                fate.first_at = now
            else:
                fate.gaps.append(now - fate.last_at)
            fate.last_at = now
            self.forecast.answered(message.id, len(message.token_ids), now)
            if message.finish is not None:
                fate.ended_at = now
                self.forecast.ended(message.id, whole=True)
        if self.engine.steps % 3 == 0:
            self.hear()

    def run_until(self, instant: float) -> None:
        while self.clock.now() < instant and self.engine.has_work:
            self.step()
        if self.clock.now() < instant:
            self.clock.advance(instant - self.clock.now())

    def run(self) -> None:
        for _ in range(200_000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")


@cache
def _calibrated() -> tuple[float, ...]:
    return tuple(calibrate(_measure, 10.0, 4096).terms)


def _measure(probe: Probe) -> float:
    return truth(probe.shape)
