"""The engine as something that a benchmark can time: the runner and the sampler's argmax, without HTTP."""

from __future__ import annotations

import time

import numpy as np

from headway.bench.engine import Facts
from headway.bench.measure import rss_bytes
from headway.engine.work import Work
from headway.llm import LLM

DECODE_STEPS = 8
READ_BYTES = 256 << 20


class EngineWorkload:
    """Times steps on an idle engine's runner; the KV blocks hold whatever they hold, which costs the same to read."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._runner = llm.runner
        self._rng = np.random.default_rng(0)
        self._memory = np.ones(READ_BYTES // 4, dtype=np.float32)
        self._vector = np.ones(4096, dtype=np.float32)
        self._square = np.ones((1024, 1024), dtype=np.float32)

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
        blocks = -(-(context + DECODE_STEPS) // self._runner.block_tokens)
        tables = [self._table(sequence, blocks) for sequence in range(batch)]
        tokens = self._rng.integers(0, self._runner.vocabulary, size=batch)
        times = []
        for step in range(DECODE_STEPS):
            work = [
                Work(token_ids=(int(tokens[i]),), start=context - 1 + step, table=tables[i], logits=1)
                for i in range(batch)
            ]
            began = time.perf_counter()
            logits = self._runner.run(work)
            tokens = logits.argmax(axis=1)
            times.append(time.perf_counter() - began)
        return float(np.median(times))

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

    def read_bytes_per_s(self) -> float:
        """Return the rate at which a matrix-vector product streams through memory."""
        matrix = self._memory.reshape(-1, self._vector.size)
        began = time.perf_counter()
        matrix @ self._vector
        return self._memory.nbytes / (time.perf_counter() - began)

    def peak_flops(self) -> float:
        """Return the rate of a square matrix product."""
        began = time.perf_counter()
        self._square @ self._square
        return 2.0 * self._square.shape[0] ** 3 / (time.perf_counter() - began)
