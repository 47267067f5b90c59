"""The native kernels: weights repacked once, the Plan replayed by one native call a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import headway.kernels.cpu._native as _native
from headway.errors import ConfigError
from headway.kernels.arrange import Group, checked_tensors, fuse, group_calls, place_values
from headway.kernels.cpu.weights import Weights, packed_bytes
from headway.kernels.draws import Draws
from headway.kernels.ops import Batch, Call, Int32, KVLayout, Limits, Plan, Program, Rope
from headway.kernels.tensor import Float32, Tensor

_log = logging.getLogger("headway.kernels")

BLOCK_TOKENS = (16, 32, 64, 128)
WIDEST_HEAD = 256


def available() -> tuple[str, ...]:
    """Return the instruction sets that run here, the best first."""
    return tuple(_native.available())


class NativeKernels:
    """C++ on the best instruction set here, or on a named one; K and V in bfloat16 or in int8 with scales."""

    name = "cpu"

    def __init__(
        self,
        threads: int,
        isa: str = "",
        kv_dtype: Literal["bf16", "int8"] = "bf16",
        prefill: Literal["exact", "fast"] = "exact",
    ) -> None:
        known = available()
        if isa and isa not in known:
            raise ConfigError(f"HEADWAY_ISA is {isa!r}; this machine runs {', '.join(known)}")
        self.isa = isa or known[0]
        self.threads = threads
        self.prefill = prefill
        self.kv_bits = 8 if kv_dtype == "int8" else 16

    def block_bytes(self, kv: KVLayout, block_tokens: int) -> int:
        """K and V, and for int8 a float scale of each per token and head."""
        scales = 2 * 4 if self.kv_bits == 8 else 0
        return kv.layers * kv.kv_heads * block_tokens * (2 * kv.head_width * self.kv_bits // 8 + scales)

    def weight_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Quantized weights have codes of 4 or 8 bits; dense ones keep their size."""
        return sum(packed_bytes(tensor) for tensor in tensors)

    def refuses(self, plan: Plan, block_tokens: int) -> str:
        """Heads that no vector fits, and blocks that no span of attention is made of."""
        width = plan.kv.head_width
        if width % 16 or width > WIDEST_HEAD:
            return (
                f"the native kernels run heads of a multiple of 16 up to {WIDEST_HEAD}, this model has {width};"
                " use --kernels reference"
            )
        if block_tokens not in BLOCK_TOKENS:
            known = ", ".join(map(str, BLOCK_TOKENS))
            return f"engine.block_tokens is {block_tokens}; the native kernels take {known}"
        return ""

    def compile(self, plan: Plan, weight: Callable[[str], Tensor], *, n_blocks: int, block_tokens: int) -> Program:
        """Repack the weights and allocate the KV pool, which the system backs with memory as it is touched."""
        refused = self.refuses(plan, block_tokens)
        if refused:
            raise ConfigError(refused)
        return _Program(plan, weight, n_blocks, block_tokens, self)


class _Program:
    """A compiled Plan."""

    def __init__(
        self,
        plan: Plan,
        weight: Callable[[str], Tensor],
        n_blocks: int,
        block_tokens: int,
        kernels: NativeKernels,
    ) -> None:
        kv = plan.kv
        self.native = _native.Program(
            kernels.isa,
            kernels.threads,
            kv.layers,
            n_blocks,
            block_tokens,
            kv.kv_heads,
            kv.head_width,
            kernels.kv_bits,
        )
        if kernels.prefill == "fast" and not self.native.set_fast(True):
            _log.warning("engine.prefill is 'fast', which needs AMX; on %s prefill is exact", kernels.isa)
        self._weights = Weights(self.native, checked_tensors(plan, weight))
        self._ropes: dict[Rope, int] = {}
        groups = fuse(group_calls(plan))
        places, widths = place_values(groups)
        self._places = {index: (place.buffer, place.column) for index, place in places.items()}
        self.native.set_buffers(widths)
        self._weights.load(
            [tuple(call.weights[0] for call in group.calls) for group in groups if group.calls[0].op == "linear"],
            [call.weights[0] for call in plan.calls if call.op in ("embed", "head")],
        )
        for group in groups:
            if group.calls[0].op == "linear":
                self._linears(group)
            else:
                self._node(group)
        self._logits = np.empty((0, plan.vocabulary), np.float32)

    def run(self, batch: Batch) -> Float32:
        """Run a step in one native call; the GIL is released for all of it."""
        wanted = len(batch.logit_rows)
        if len(self._logits) < wanted:
            self._logits = np.empty((wanted, self._logits.shape[1]), np.float32)
        self.native.run(
            batch.token_ids, batch.positions, batch.starts, batch.lengths, batch.tables, batch.logit_rows, self._logits
        )
        return self._logits[:wanted]

    def draw(self, logits: Float32, draws: Draws) -> Int32:
        """Draw on the thread pool; the head has left the largest logit of each span of its rows."""
        tokens = np.empty(len(draws.rows), np.int32)
        self.native.draw(logits, draws.rows, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.u, tokens)
        return tokens

    def limits(self) -> Limits:
        """Return the rates of bare loops over memory and over registers."""
        return Limits(self.native.read_rate(), self.native.product_rate())

    def set_profile(self, on: bool) -> None:
        """Let the library keep time."""
        self.native.set_profile(on)

    def profile(self) -> dict[str, tuple[float, int]]:
        """Return the library's times of the Ops that ran."""
        return {op: (seconds, calls) for op, (seconds, calls) in self.native.profile().items() if calls}

    def _linears(self, group: Group) -> None:
        """One product where the weights could be joined, else one each, into the same buffer."""
        joined = self._weights.joined(tuple(call.weights[0] for call in group.calls))
        parts = (
            [(group.calls, self._places[group.output], joined)]
            if joined is not None
            else [
                ((call,), self._places[call.output.index], self._weights.alone(call.weights[0])) for call in group.calls
            ]
        )
        for some, place, weight in parts:
            biases = [call.weights[1] for call in some if len(call.weights) > 1]
            self.native.add_node(
                _native.Op.linear,
                [self._places[value.index] for value in group.inputs],
                place,
                sum(call.output.width for call in some),
                weight=weight,
                bias=self._weights.vector(biases) if biases else -1,
                adds=group.after is not None,
                **self._before(group),
            )

    def _before(self, group: Group) -> dict[str, Any]:
        """What a product does to its rows first."""
        if not group.before:
            return {}
        call = group.before[0]
        if call.op == "gate":
            return {"before": _native.Before.gate, "flag": _activation(call)}
        return {"before": _native.Before.norm, "norm": self._norm(call), "eps": call.constants["eps"]}

    def _norm(self, call: Call) -> int:
        constants: dict[str, Any] = call.constants
        return self._weights.vector([call.weights[0]], offset=constants["weight_offset"])

    def _node(self, group: Group) -> None:
        call = group.calls[0]
        constants: dict[str, Any] = call.constants
        width = call.output.width
        more: dict[str, Any] = {}
        match call.op:
            case "embed":
                more = {"weight": self._weights.alone(call.weights[0]), "value": constants["scale"]}
            case "rms_norm":
                heads = width // constants["head_width"]
                width = constants["head_width"]
                more = {"norm": self._norm(call), "heads": heads, "eps": constants["eps"]}
            case "rope":
                heads = width // constants["head_width"]
                width = constants["head_width"]
                more = {"ropes": (self._rope(constants["rope"]), -1), "heads": heads}
            case "attend":
                shape = [constants["heads"], constants["kv_heads"], constants["head_width"], constants["window"] or 0]
                more = {"layer": constants["layer"], "shape": shape, "scale": constants["scale"]}
                more["cap"] = constants["softcap"] or 0.0
                ropes: dict[Any, Any] = {rope.output: rope.constants["rope"] for rope in group.before}
                q, k = (ropes.get(value) for value in call.inputs[:2])
                more["ropes"] = tuple(-1 if rope is None else self._rope(rope) for rope in (q, k))
            case "gate":
                more = {"flag": _activation(call)}
            case "head":
                more = {"weight": self._weights.alone(call.weights[0]), "value": constants["softcap"] or 0.0}
                more |= self._before(group)
        inputs = [self._places[value.index] for value in group.inputs]
        place = self._places.get(group.output, (0, 0))
        self.native.add_node(_native.Op[call.op], inputs, place, width, **more)

    def _rope(self, rope: Rope) -> int:
        if rope not in self._ropes:
            frequencies: NDArray[np.float32] = np.array(rope.inv_freq, np.float32)
            self._ropes[rope] = self.native.add_rope(frequencies, rope.factor)
        return self._ropes[rope]


def _activation(call: Call) -> int:
    return int(call.constants["activation"] == "gelu_tanh")
