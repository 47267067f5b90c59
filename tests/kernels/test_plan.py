from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.kernels.arrange import Group, fuse, group_calls, place_values
from headway.kernels.ops import KVLayout, Ops, Rope, Value
from headway.kernels.plan import Recorder, record, weight_shapes


def small(ops: Ops) -> Value:
    x = ops.embed("table", width=8)
    for layer in range(2):
        h = ops.rms_norm(x, f"norm{layer}", eps=1e-5)
        q, k, v = (ops.linear(h, f"{name}{layer}", width=8) for name in "qkv")
        a = ops.attend(q, k, v, layer=layer, heads=2, kv_heads=2, head_width=4, scale=1.0)
        x = ops.add(x, ops.linear(a, f"o{layer}", width=8, bias=f"o{layer}.bias"))
    return ops.head(x, "table", width=50)


def test_a_plan_lists_calls_weights_and_shapes() -> None:
    plan = record(small)
    assert [call.op for call in plan.calls[:7]] == [
        "embed",
        "rms_norm",
        "linear",
        "linear",
        "linear",
        "attend",
        "linear",
    ]
    assert plan.kv == KVLayout(layers=2, kv_heads=2, head_width=4)
    assert plan.vocabulary == 50
    assert plan.weights()[:3] == ("table", "norm0", "q0")
    shapes = weight_shapes(plan)
    assert shapes["table"] == (50, 8)
    assert shapes["o1.bias"] == (8,)
    assert set(shapes) == set(plan.weights())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda ops, x: ops.add(x, ops.linear(x, "w", width=4)), "widths 8 and 4 differ"),
        (lambda ops, x: ops.gate(x, ops.linear(x, "w", width=4), activation="silu"), "widths 8 and 4 differ"),
        (lambda ops, x: ops.rope(x, Rope((1.0,)), head_width=4), "1 frequencies do not fit heads of width 4"),
        (lambda ops, x: ops.rms_norm(x, "w", eps=0, head_width=3), "8 is not a multiple of 3"),
        (
            lambda ops, x: ops.attend(x, x, x, layer=0, heads=2, kv_heads=1, head_width=4, scale=1),
            "width 8 is not 1 heads of 4",
        ),
        (
            lambda ops, x: ops.attend(x, x, x, layer=1, heads=2, kv_heads=2, head_width=4, scale=1),
            "layer 1 recorded after 0 layers",
        ),
        (lambda ops, x: ops.linear(x, "w", width=0), "width 0"),
    ],
)
def test_widths_are_checked_when_recorded(wrong: Callable[[Ops, Value], Value], message: str) -> None:
    recorder = Recorder()
    x = recorder.embed("table", width=8)
    with pytest.raises(ValueError, match=message):
        wrong(recorder, x)


def test_a_model_must_attend_and_end_in_its_head() -> None:
    with pytest.raises(ValueError, match="must attend"):
        record(lambda ops: ops.head(ops.embed("t", width=8), "t", width=5))
    with pytest.raises(ValueError, match="end in its only head"):
        record(lambda ops: ops.embed("t", width=8))


def test_adjacent_linears_over_one_value_are_joined_and_no_buffer_is_read_after_it_is_overwritten() -> None:
    plan = record(small)
    groups = group_calls(plan)
    assert [group.weight(0) for group in groups if group.calls[0].op == "linear"] == [
        "q0+k0+v0",
        "o0",
        "q1+k1+v1",
        "o1",
    ]
    places, widths = place_values(groups)
    assert len(widths) < len(groups)
    holds: dict[int, set[int]] = {}  # what each buffer holds now
    for group in groups:
        into = places[group.output].buffer
        for call in group.calls:
            for value in call.inputs:
                at = places[value.index]
                assert at.column + at.width <= widths[at.buffer]
                assert value.index in holds[at.buffer]
                assert at.buffer != into
        holds[into] = {call.output.index for call in group.calls}


def layer(ops: Ops) -> Value:
    """A transformer's layer: what fusing is for."""
    rope = Rope((1.0, 0.5))
    x = ops.embed("table", width=8)
    h = ops.rms_norm(x, "norm", eps=1e-5)
    q, k, v = (ops.linear(h, name, width=8) for name in "qkv")
    q = ops.rms_norm(q, "q_norm", eps=1e-5, head_width=4)
    q, k = ops.rope(q, rope, head_width=4), ops.rope(k, rope, head_width=4)
    a = ops.attend(q, k, v, layer=0, heads=2, kv_heads=2, head_width=4, scale=1.0)
    x = ops.add(x, ops.linear(a, "o", width=8))
    h = ops.rms_norm(x, "norm", eps=1e-5)
    gate, up = ops.linear(h, "gate", width=16), ops.linear(h, "up", width=16)
    x = ops.add(ops.linear(ops.gate(gate, up, activation="silu"), "down", width=8), x)
    return ops.head(ops.rms_norm(x, "norm", eps=1e-5), "table", width=50)


def shape_of(group: Group) -> str:
    before = "".join(f"{call.op}>" for call in group.before)
    return before + "+".join(call.op for call in group.calls) + (">add" if group.after else "")


def test_norms_gates_ropes_and_sums_fuse_with_the_op_that_alone_uses_them() -> None:
    assert [shape_of(group) for group in fuse(group_calls(record(layer)))] == [
        "embed",
        "rms_norm>linear+linear+linear",
        "rms_norm",
        "rope>rope>attend",
        "linear>add",
        "rms_norm>linear+linear",
        "gate>linear>add",
        "rms_norm>head",
    ]


def test_what_two_ops_use_is_not_fused_with_either() -> None:
    def twice(ops: Ops) -> Value:
        x = ops.embed("table", width=8)
        h = ops.rms_norm(x, "norm", eps=1e-5)
        a = ops.attend(h, h, h, layer=0, heads=2, kv_heads=2, head_width=4, scale=1.0)
        y = ops.linear(a, "w", width=8)
        x = ops.add(ops.add(x, y), ops.add(y, ops.linear(h, "w", width=8)))
        return ops.head(ops.add(x, x), "table", width=50)

    groups = fuse(group_calls(record(twice)))
    assert [shape_of(group) for group in groups] == [
        "embed", "rms_norm", "attend", "linear", "add", "linear>add", "add", "add", "head",
    ]  # fmt: skip


@pytest.mark.parametrize("model", [small, layer])
def test_a_fused_group_never_writes_over_what_it_or_a_later_one_reads(model: Callable[[Ops], Value]) -> None:
    groups = fuse(group_calls(record(model)))
    places, widths = place_values(groups)
    holds: dict[int, set[int]] = {}
    for group in groups:
        for value in group.inputs:
            assert value.index in holds[places[value.index].buffer]
        own = places[group.output]
        assert own.buffer not in {places[value.index].buffer for value in group.inputs}
        made = {call.output.index for call in group.calls} | {group.output}
        holds[own.buffer] = made if group.after is None else {group.after.output.index}
        assert own.width <= widths[own.buffer]
