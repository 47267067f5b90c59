"""From a model's path to a running engine: open, pick kernels, load, and say what was chosen."""

from __future__ import annotations

from pathlib import Path

from headway.config import parse_bytes
from headway.engine.engine import Engine
from headway.engine.launch_spec import EngineSpec
from headway.engine.messages import Started
from headway.engine.runner import load_runner
from headway.kernels import pick_kernels
from headway.kernels.machine import set_threads
from headway.models.checkpoint import open_checkpoint
from headway.telemetry.clock import Clock, MonotonicClock


def launch(spec: EngineSpec, clock: Clock | None = None) -> tuple[Engine, Started]:
    """Open the checkpoint, load the weights and return an idle engine with the figures of its start."""
    clock = clock or MonotonicClock()
    began = clock.now()
    config = spec.config
    threads = spec.threads
    set_threads(threads)
    kernels = pick_kernels(config.kernels, threads)
    checkpoint = open_checkpoint(Path(spec.model))
    shape = checkpoint.config
    context = min(shape.context, config.context_tokens or shape.context)
    runner = load_runner(
        checkpoint,
        kernels=kernels,
        threads=threads,
        kv_bytes=parse_bytes(config.kv_memory) if config.kv_memory else None,
        block_tokens=config.block_tokens,
        max_running=config.max_running,
        context_tokens=context,
    )
    engine = Engine(
        runner,
        config,
        eos=frozenset(shape.eos),
        context_tokens=context,
        clock=clock,
        model_salt=f"{spec.model}",
    )
    started = Started(
        kernels=kernels.name,
        isa=kernels.isa,
        threads=threads,
        n_blocks=runner.n_blocks,
        block_tokens=runner.block_tokens,
        context_tokens=context,
        vocabulary=runner.vocabulary,
        weight_bytes=checkpoint.weight_bytes,
        kv_bytes=runner.kv_bytes,
        seconds=clock.now() - began,
    )
    return engine, started
