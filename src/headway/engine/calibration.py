"""Measures a few steps when the engine starts, and keeps what was learned of this machine, model and kernels."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
from pathlib import Path

import msgspec

from headway.engine.cost import PROBES, CostModel, Probe, calibrate
from headway.engine.runner import Runner
from headway.engine.work import Work
from headway.kernels.machine import cpu_model
from headway.telemetry.clock import Clock

LIMIT_S = 0.4
"""What the measurements may take; slow models are measured less, and learn the rest as they run."""
_FORMAT = 1
_MOST_KEPT = 64
"""Files, the newest: models come and go."""
_log = logging.getLogger("headway.engine")


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    terms: list[float]
    about: str = ""


class Calibration:
    """The cost model of one machine, model and choice of kernels, in a file of the cache."""

    def __init__(self, runner: Runner, clock: Clock, model: Path, folder: Path, *, threads: int, kind: str) -> None:
        self._runner = runner
        self._clock = clock
        state = model.stat()
        about = (
            f"{cpu_model()} {platform.machine()} {threads} threads, {runner.kernels.name} {runner.kernels.isa} {kind},"
            f" {model.name} {state.st_size} bytes {runner.cost.read_bytes} read"
        )
        digest = hashlib.blake2b(f"{_FORMAT} {about} {model} {state.st_mtime_ns}".encode(), digest_size=12).hexdigest()
        self._about = about
        self._path = folder / f"{digest}.json"

    def model(self) -> tuple[CostModel, bool]:
        """Return the model and whether it was kept from an earlier start; it is measured otherwise."""
        kept = self._load()
        if kept is None:
            cost = calibrate(self._measure, LIMIT_S, self._runner.context)
            self.keep(cost)
            return cost, False
        cost = CostModel(kept.terms)
        self._measure(PROBES[0])
        cost.pace = min(4.0, max(0.25, self._measure(PROBES[0]) / cost.step_s(PROBES[0].shape)))
        return cost, True

    def keep(self, cost: CostModel) -> None:
        """Write what is known; a cache that cannot be written is no reason to fail."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            half = self._path.with_suffix(f".{os.getpid()}")
            half.write_bytes(msgspec.json.encode(_Kept(terms=cost.terms, about=self._about)))
            half.replace(self._path)
            files = sorted(self._path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
            for old in files[_MOST_KEPT:]:
                old.unlink(missing_ok=True)

    def _load(self) -> _Kept | None:
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Kept)
            CostModel(kept.terms)
        except (OSError, msgspec.MsgspecError, AssertionError):
            return None
        return kept if all(0.0 <= term < 1e6 for term in kept.terms) else None

    def _measure(self, probe: Probe) -> float:
        """Run a step over whatever the blocks hold, which costs the same to read."""
        runner = self._runner
        size = runner.block_tokens

        def table(first: int, tokens: int) -> list[int]:
            return [(first + i) % runner.n_blocks for i in range(-(-tokens // size))]

        if probe.prefill:
            ids = [i % runner.vocabulary for i in range(probe.prefill)]
            work = [Work(ids, probe.start, table(0, probe.start + probe.prefill), 0)]
        else:
            each = -(-probe.context // size)
            work = [
                Work((i % runner.vocabulary,), probe.context - 1, table(i * each, probe.context), int(probe.logits))
                for i in range(probe.decodes)
            ]
        began = self._clock.now()
        runner.run(work)
        return self._clock.now() - began
