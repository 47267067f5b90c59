"""The engine as something that a benchmark can time: the runner and its draws, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from headway.bench.engine import Facts
from headway.bench.measure import rss_bytes
from headway.engine.work import Work
from headway.kernels.draws import Draws
from headway.llm import LLM

DECODE_STEPS = 8


class EngineWorkload:
    """Times steps on an idle engine's runner; the KV blocks hold whatever they hold, which costs the same to read."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._runner = llm.runner
        self._rng = np.random.default_rng(0)

    @property
    def decode_steps(self) -> int:
        """How many steps a call of ``decode_step_s`` runs."""
        return DECODE_STEPS

    def facts(self) -> Facts:
        """Return what does not change between runs."""
        started, cost = self._llm.started, self._runner.cost
        return Facts(
            model=self._llm.name,
            kernels=started.kernels,
            isa=started.isa,
            threads=started.threads,
            ready_s=started.seconds,
            rss_mb=rss_bytes() / 1e6,
            weight_read_bytes=cost.read_bytes,
            kv_token_bytes=cost.kv_token_bytes,
            flops_per_token=2.0 * cost.linear_parameters,
        )

    def _table(self, sequence: int, blocks: int) -> list[int]:
        """Return blocks for a sequence, taken in turn from the pool (sharing some when it is small)."""
        return [(sequence * blocks + i) % self._runner.n_blocks for i in range(blocks)]

    def decode_step_s(self, batch: int, context: int) -> float:
        """Return the seconds of one decode step, the median of a few in a row."""
        return float(np.median(self.decode_steps_s(batch, context)))

    def decode_steps_s(self, batch: int, context: int) -> list[float]:
        """Return the seconds of each of a few greedy decode steps in a row."""
        blocks = -(-(context + DECODE_STEPS) // self._runner.block_tokens)
        tables = [self._table(sequence, blocks) for sequence in range(batch)]
        tokens = self._rng.integers(0, self._runner.vocabulary, size=batch).astype(np.int32)
        greedy = Draws(
            rows=np.arange(batch, dtype=np.int32),
            temperature=np.zeros(batch, np.float32),
            top_k=np.zeros(batch, np.int32),
            top_p=np.ones(batch, np.float32),
            min_p=np.zeros(batch, np.float32),
            u=np.zeros(batch),
        )
        times = []
        for step in range(DECODE_STEPS):
            work = [
                Work(token_ids=(int(tokens[i]),), start=context - 1 + step, table=tables[i], logits=1)
                for i in range(batch)
            ]
            began = time.perf_counter()
            tokens = self._runner.draw(self._runner.run(work), greedy)
            times.append(time.perf_counter() - began)
        return times

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of one prompt's prefill, in chunks of the step budget."""
        ids = self._rng.integers(0, self._runner.vocabulary, size=tokens).tolist()
        table = self._table(0, -(-tokens // self._runner.block_tokens))
        chunk = self._llm.config.step_tokens
        began = time.perf_counter()
        for start in range(0, tokens, chunk):
            part = ids[start : start + chunk]
            last = start + len(part) == tokens
            self._runner.run([Work(token_ids=part, start=start, table=table, logits=1 if last else 0)])
        return time.perf_counter() - began

    def limits(self) -> tuple[float, float]:
        """Return bytes a second from memory and operations a second, measured now."""
        limits = self._runner.program.limits()
        return limits.read_bytes_per_s, limits.operations_per_s

    def profile(self, run: Callable[[], float], times: int) -> tuple[float, dict[str, tuple[float, int]]]:
        """Return the seconds of some calls of ``run``, and seconds and calls by Op in them; it has run before."""
        program = self._runner.program
        program.set_profile(True)
        began = time.perf_counter()
        for _ in range(times):
            run()
        seconds = time.perf_counter() - began
        found = program.profile()
        program.set_profile(False)
        return seconds, found
