"""Runs a step: packs the scheduler's work into a Batch and owns the compiled model and its KV pool."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headway.config import EngineConfig, environment, parse_bytes
from headway.engine.work import Work
from headway.errors import ConfigError
from headway.kernels import machine, pick_kernels
from headway.kernels.draws import Draws
from headway.kernels.ops import Batch, Int32, Kernels, Plan, Program
from headway.kernels.plan import record
from headway.kernels.tensor import Float32, Tensor
from headway.models import load
from headway.models.checkpoint import Checkpoint
from headway.models.checkpoint.rounded import Bits, rounded

_log = logging.getLogger("headway.engine")

_MIB = 2**20
_SHARE = 0.5  # of the memory left after the weights; the rest is for activations and neighbours


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step has to move and to compute, for reports and predictions."""

    read_bytes: int
    """Weights that a decode step reads, as the kernels hold them."""
    kv_token_bytes: int
    """K and V of one token, over all layers."""
    linear_parameters: int
    """Each takes a multiplication and an addition for every token of a prefill."""


class Runner:
    """A model ready to run; one caller at a time."""

    def __init__(
        self,
        program: Program,
        *,
        vocabulary: int,
        n_blocks: int,
        block_tokens: int,
        context: int,
        kernels: Kernels,
        cost: Cost,
    ) -> None:
        self.program = program
        self.vocabulary = vocabulary
        self.n_blocks = n_blocks
        self.block_tokens = block_tokens
        self.context = context
        self.kernels = kernels
        self.cost = cost

    def run(self, work: Sequence[Work]) -> Float32:
        """Return logits [sum of work.logits, vocabulary], rows in the order of work; valid until the next call."""
        return self.program.run(pack(work, self.block_tokens))

    def draw(self, logits: Float32, draws: Draws) -> Int32:
        """Return one token for each draw."""
        return self.program.draw(logits, draws)


def pack(work: Sequence[Work], block_tokens: int) -> Batch:
    """Lay the work out as a Batch, in its order."""
    token_ids: list[int] = []
    positions: list[int] = []
    starts, lengths = [0], list[int]()
    logit_rows: list[int] = []
    for ids, start, table, logits in work:
        count = len(ids)
        length = start + count
        assert count > 0, "work without tokens"
        assert 0 <= logits <= count, f"{logits} logits of {count} tokens"
        assert len(table) * block_tokens >= length, f"{len(table)} blocks for {length} tokens"
        token_ids += ids
        positions += range(start, length)
        row = len(token_ids)
        starts.append(row)
        lengths.append(length)
        logit_rows += range(row - logits, row)
    # Tables may be longer than this step needs: only what it reads is copied.
    needed = [-(-length // block_tokens) for length in lengths]
    tables = np.zeros((len(work), max(needed, default=0)), np.int32)
    for i, (item, count) in enumerate(zip(work, needed, strict=True)):
        tables[i, :count] = item.table[:count]
    return Batch(
        np.array(token_ids, np.int32),
        np.array(positions, np.int32),
        np.array(starts, np.int32),
        np.array(lengths, np.int32),
        tables,
        np.array(logit_rows, np.int32),
    )


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What the KV pool's size is decided from; bytes unless named otherwise."""

    available: machine.Finding
    weights: int
    block: int
    block_tokens: int
    context: int
    """Longest sequence in tokens."""
    max_running: int

    def blocks(self, kv_bytes: int | None = None) -> int:
        """Return the number of blocks, of ``kv_bytes`` or of a share of what is left; ConfigError when too small."""
        left = self.available.value - self.weights
        full = -(-self.context // self.block_tokens)  # blocks of a sequence as long as the context
        if kv_bytes is not None:
            if kv_bytes > left:
                raise ConfigError(
                    f"engine.kv_memory of {_mib(kv_bytes)} does not fit: {self._budget()}; lower engine.kv_memory"
                )
            if kv_bytes < self.block:
                raise ConfigError(
                    f"engine.kv_memory of {_mib(kv_bytes)} holds no block of {self.block_tokens} tokens"
                    f" ({_mib(self.block)}); raise engine.kv_memory"
                )
            return kv_bytes // self.block
        n_blocks = min(int(left * _SHARE) // self.block, self.max_running * full)
        if n_blocks < full:
            raise ConfigError(
                f"not enough memory for one sequence of {self.context:,} tokens, which takes"
                f" {_mib(full * self.block)} of KV cache: {self._budget()}, half of it for the cache;"
                " lower engine.context_tokens, or set engine.kv_memory"
            )
        return n_blocks

    def _budget(self) -> str:
        left = self.available.value - self.weights
        return (
            f"{_mib(self.available.value)} are available ({self.available.reason}), the weights take"
            f" {_mib(self.weights)}, {_mib(max(0, left))} are left"
        )


def load_runner(checkpoint: Checkpoint, settings: EngineConfig | None = None, *, n_blocks: int | None = None) -> Runner:
    """Record the model, size the KV pool and load the weights; ``n_blocks`` overrides the size (tests).

    Raises ConfigError when memory is short or the context setting is too long, CheckpointError when a weight is wrong.
    """
    settings = settings or EngineConfig()
    config = checkpoint.config
    model = load(config.architecture)
    plan = record(lambda ops: model.forward(ops, config))
    kernels = pick_kernels(settings.kernels, settings.threads, environment().isa, settings.kv_dtype, settings.prefill)
    refused = kernels.refuses(plan, settings.block_tokens)
    if refused and settings.kernels == "auto":
        _log.warning("%s; running on the reference kernels, which are slow", refused)
        kernels = pick_kernels("reference", settings.threads, kv_dtype=settings.kv_dtype)
    elif refused:
        raise ConfigError(refused)
    tensor = _weights(checkpoint, plan, settings.weights)
    context = settings.context_tokens or config.context
    if context > config.context:
        raise ConfigError(
            f"engine.context_tokens of {context:,} is above the model's context of {config.context:,} tokens"
        )
    if n_blocks is None:
        size = PoolSize(
            available=machine.available_memory(),
            weights=kernels.weight_bytes(tensor(name) for name in plan.weights()),
            block=kernels.block_bytes(plan.kv, settings.block_tokens),
            block_tokens=settings.block_tokens,
            context=context,
            max_running=settings.max_running,
        )
        n_blocks = size.blocks(None if settings.kv_memory is None else parse_bytes(settings.kv_memory))
    read = dict.fromkeys(name for call in plan.calls if call.op in ("linear", "head") for name in call.weights)
    linear = (name for call in plan.calls if call.op == "linear" for name in call.weights)
    cost = Cost(
        read_bytes=kernels.weight_bytes(tensor(name) for name in read),
        kv_token_bytes=kernels.block_bytes(plan.kv, settings.block_tokens) // settings.block_tokens,
        linear_parameters=sum(math.prod(tensor(name).shape) for name in linear),
    )
    program = kernels.compile(plan, tensor, n_blocks=n_blocks, block_tokens=settings.block_tokens)
    checkpoint.forget()  # the kernels have the weights in their own layout
    return Runner(
        program,
        vocabulary=plan.vocabulary,
        n_blocks=n_blocks,
        block_tokens=settings.block_tokens,
        context=context,
        kernels=kernels,
        cost=cost,
    )


def _weights(checkpoint: Checkpoint, plan: Plan, kind: Literal["file", "int8", "int4"]) -> Callable[[str], Tensor]:
    """Return what reads a weight as it is to be run."""
    if kind == "file":
        return checkpoint.tensor
    outer = {call.weights[0] for call in plan.calls if call.op in ("embed", "head")}
    inner = {call.weights[0] for call in plan.calls if call.op == "linear"}
    bits: Bits = 4 if kind == "int4" else 8

    def tensor(name: str) -> Tensor:
        found = checkpoint.tensor(name)
        if name in outer:
            return rounded(found, 8)
        return rounded(found, bits) if name in inner else found

    return tensor


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB" if size * 20 >= _MIB else f"{size:,} bytes"
