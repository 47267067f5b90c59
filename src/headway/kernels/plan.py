"""Writes down a model as a Plan: the model file runs once, on a Recorder, and never again."""

from __future__ import annotations

from collections.abc import Callable

from headway.kernels.ops import Activation, Call, KVLayout, Plan, Rope, Value


class Recorder:
    """Implements ``Ops`` by appending Calls; widths are checked here, so that an implementation need not."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._n_values = 0
        self._kv: KVLayout | None = None
        self._layers: list[int] = []

    def embed(self, table: str, *, width: int, scale: float = 1.0) -> Value:
        """Record an embedding look-up."""
        return self._append("embed", (), (table,), width, scale=scale)

    def rms_norm(
        self, x: Value, weight: str, *, eps: float, weight_offset: float = 0.0, head_width: int | None = None
    ) -> Value:
        """Record a norm over rows, or over heads."""
        width = x.width if head_width is None else head_width
        _check_multiple("rms_norm", x.width, width)
        return self._append(
            "rms_norm", (x,), (weight,), x.width, eps=eps, weight_offset=weight_offset, head_width=width
        )

    def linear(self, x: Value, weight: str, *, width: int, bias: str | None = None) -> Value:
        """Record a matrix product; the weights are (weight,) or (weight, bias)."""
        return self._append("linear", (x,), (weight,) if bias is None else (weight, bias), width)

    def rope(self, x: Value, rope: Rope, *, head_width: int) -> Value:
        """Record a rotation."""
        _check_multiple("rope", x.width, head_width)
        if 2 * len(rope.inv_freq) != head_width:
            raise ValueError(f"rope: {len(rope.inv_freq)} frequencies do not fit heads of width {head_width}")
        return self._append("rope", (x,), (), x.width, rope=rope, head_width=head_width)

    def attend(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Value:
        """Record attention of one layer; layers count up from 0 and share one KV shape."""
        for value, wanted in ((q, heads), (k, kv_heads), (v, kv_heads)):
            if value.width != wanted * head_width:
                raise ValueError(f"attend: width {value.width} is not {wanted} heads of {head_width}")
        _check_multiple("attend", heads, kv_heads)
        if layer != len(self._layers):
            raise ValueError(f"attend: layer {layer} recorded after {len(self._layers)} layers")
        self._layers.append(layer)
        kv = KVLayout(layers=layer + 1, kv_heads=kv_heads, head_width=head_width)
        if self._kv is not None and (self._kv.kv_heads, self._kv.head_width) != (kv_heads, head_width):
            raise ValueError(f"attend: layer {layer} has another KV shape than layer 0")
        self._kv = kv
        constants = {
            "layer": layer,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_width": head_width,
            "scale": scale,
            "window": window,
            "softcap": softcap,
        }
        return self._append("attend", (q, k, v), (), q.width, **constants)

    def gate(self, gate: Value, up: Value, *, activation: Activation) -> Value:
        """Record a gated activation."""
        _check_equal("gate", gate, up)
        return self._append("gate", (gate, up), (), gate.width, activation=activation)

    def add(self, a: Value, b: Value) -> Value:
        """Record a sum."""
        _check_equal("add", a, b)
        return self._append("add", (a, b), (), a.width)

    def head(self, x: Value, weight: str, *, width: int, softcap: float | None = None) -> Value:
        """Record the logits; nothing may follow."""
        return self._append("head", (x,), (weight,), width, softcap=softcap)

    def plan(self) -> Plan:
        """Return the Plan of what was recorded."""
        if not self._calls or self._calls[-1].op != "head" or sum(call.op == "head" for call in self._calls) != 1:
            raise ValueError("a model must end in its only head")
        if self._kv is None:
            raise ValueError("a model must attend at least once")
        return Plan(
            calls=tuple(self._calls), n_values=self._n_values, kv=self._kv, vocabulary=self._calls[-1].output.width
        )

    def _append(
        self, op: str, inputs: tuple[Value, ...], weights: tuple[str, ...], width: int, **constants: object
    ) -> Value:
        if width < 1:
            raise ValueError(f"{op}: width {width}")
        output = Value(self._n_values, width)
        self._n_values += 1
        self._calls.append(Call(op, inputs, weights, output, constants))
        return output


def record(model: Callable[[Recorder], Value]) -> Plan:
    """Return the Plan of a model, given as a function over Ops."""
    recorder = Recorder()
    model(recorder)
    return recorder.plan()


def weight_shapes(plan: Plan) -> dict[str, tuple[int | None, ...]]:
    """Return the shape that each weight must have; None where the Plan leaves it open (rows of an embedding table)."""
    shapes: dict[str, tuple[int | None, ...]] = {}
    for call in plan.calls:
        width = call.output.width
        match call.op:
            case "embed":
                shapes.setdefault(call.weights[0], (None, width))
            case "rms_norm":
                head_width = call.constants["head_width"]
                assert isinstance(head_width, int)
                shapes[call.weights[0]] = (head_width,)
            case "linear" | "head":
                shapes[call.weights[0]] = (width, call.inputs[0].width)
                for bias in call.weights[1:]:
                    shapes[bias] = (width,)
            case _:
                assert not call.weights, f"{call.op} reads weights of unknown shape"
    return shapes


def _check_multiple(op: str, whole: int, part: int) -> None:
    if part < 1 or whole % part:
        raise ValueError(f"{op}: {whole} is not a multiple of {part}")


def _check_equal(op: str, a: Value, b: Value) -> None:
    if a.width != b.width:
        raise ValueError(f"{op}: widths {a.width} and {b.width} differ")
