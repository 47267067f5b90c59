"""From a model's path to a running engine: open, pick kernels, load, and say what was chosen."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headway.config import environment
from headway.engine.calibration import Calibration
from headway.engine.engine import Engine
from headway.engine.launch_spec import EngineSpec
from headway.engine.messages import Started
from headway.engine.runner import Runner, load_runner
from headway.models.checkpoint import open_checkpoint
from headway.telemetry.clock import Clock, MonotonicClock


def launch(spec: EngineSpec, clock: Clock | None = None) -> tuple[Engine, Runner, Started]:
    """Open the checkpoint, load the weights and return an idle engine, its runner, and the figures of its start."""
    clock = clock or MonotonicClock()
    began = clock.now()
    config = msgspec.structs.replace(spec.config, threads=spec.threads)
    checkpoint = open_checkpoint(Path(spec.model))
    runner = load_runner(checkpoint, config)
    measured = clock.now()
    cost, kept = Calibration(
        runner,
        clock,
        Path(spec.model),
        environment().cache / "cost",
        threads=spec.threads,
        kind=f"{config.kv_dtype} {config.weights} {config.prefill}",
    ).model()
    calibrated_s = clock.now() - measured
    engine = Engine(
        runner,
        config,
        eos=frozenset(checkpoint.config.eos),
        context_tokens=runner.context,
        clock=clock,
        model_salt=spec.model,
        cost=cost,
    )
    started = Started(
        kernels=runner.kernels.name,
        isa=runner.kernels.isa,
        threads=spec.threads,
        n_blocks=runner.n_blocks,
        block_tokens=runner.block_tokens,
        context_tokens=runner.context,
        vocabulary=runner.vocabulary,
        weight_bytes=checkpoint.weight_bytes,
        kv_bytes=runner.n_blocks * runner.block_tokens * runner.cost.kv_token_bytes,
        seconds=clock.now() - began,
        calibrated_s=calibrated_s,
        calibration_kept=kept,
    )
    return engine, runner, started
