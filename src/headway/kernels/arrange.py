"""Arranges a Plan for replay: Calls join and fuse, Values share buffers, weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from headway.errors import CheckpointError
from headway.kernels.ops import Call, Plan, Value
from headway.kernels.plan import weight_shapes
from headway.kernels.tensor import Float32, Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """A Call, or adjacent linears over one Value (q, k, v; gate, up) that run as one product."""

    calls: tuple[Call, ...]
    output: int
    """Index of the Value that holds all outputs side by side: the Call's own, or one past the Plan's."""
    before: tuple[Call, ...] = ()
    """Fused: what makes the first inputs, and for nobody else (a norm, a gate, the ropes of q and k)."""
    after: Call | None = None
    """Fused: the sum that alone reads the output; ``output`` is then that of the sum."""

    def weight(self, which: int) -> str:
        """Return the name under which the joined weights (0) or biases (1) are loaded; "" when there is none."""
        return "+".join(name for call in self.calls for name in call.weights[which : which + 1])

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Return the Values that it reads: those of what is fused before it in place of what that makes, then the
        other summand."""
        made = {call.output: call.inputs for call in self.before}
        read = tuple(deeper for value in self.calls[0].inputs for deeper in made.get(value, (value,)))
        if self.after is None:
            return read
        return (*read, *(value for value in self.after.inputs if value != self.calls[0].output))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a Value lies: columns of a buffer that other Values use at other times."""

    buffer: int
    column: int
    width: int


def group_calls(plan: Plan) -> list[Group]:
    """Return the Calls in order, adjacent linears over the same Value joined."""
    runs: list[list[Call]] = []
    for call in plan.calls:
        last = runs[-1][0] if runs else None
        if (
            last is not None
            and last.op == call.op == "linear"
            and last.inputs == call.inputs
            and len(last.weights) == len(call.weights)
        ):
            runs[-1].append(call)
        else:
            runs.append([call])
    groups = []
    extra = plan.n_values
    for run in runs:
        if len(run) == 1:
            groups.append(Group(tuple(run), run[0].output.index))
        else:
            groups.append(Group(tuple(run), extra))
            extra += 1
    return groups


def fuse(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with rows prepared where they are used: norms and gates in the product that alone reads them,
    ropes in attention, and a sum in the product that makes its last summand."""
    whole = {call.output.index: group.output for group in groups for call in group.calls}
    made = {group.output: place for place, group in enumerate(groups)}
    readers: dict[int, set[int]] = {}
    for place, group in enumerate(groups):
        for call in group.calls:
            for value in call.inputs:
                readers.setdefault(whole[value.index], set()).add(place)
    fused: dict[int, Group] = dict(enumerate(groups))

    def maker(value: Value) -> int:
        return made[whole[value.index]]

    def alone(value: Value) -> bool:
        return len(readers[whole[value.index]]) == 1

    for place, group in enumerate(groups):
        call = group.calls[0]
        if len(set(call.inputs)) < len(call.inputs):
            continue
        before = [groups[maker(value)].calls[0] for value in call.inputs if alone(value)]
        match call.op:
            case "linear" | "head":
                taken = [one for one in before if (one.op == "gate" and call.op == "linear") or _norm_of_row(one)]
            case "attend":
                taken = [one for one in before if one.op == "rope"]
            case "add":
                # The later of the two products: the other summand is there by then.
                last = max(call.inputs, key=maker)
                product = fused.get(maker(last))
                whole_product = product is not None and len(product.calls) == 1 and product.calls[0].op == "linear"
                if product is not None and whole_product and alone(last):
                    fused[maker(last)] = replace(product, after=call, output=group.output)
                    del fused[place]
                continue
            case _:
                continue
        for one in taken:
            del fused[maker(one.output)]
        fused[place] = replace(group, before=tuple(taken))
    return [fused[place] for place in sorted(fused)]


def _norm_of_row(call: Call) -> bool:
    return call.op == "rms_norm" and call.constants["head_width"] == call.output.width


def place_values(groups: Sequence[Group]) -> tuple[dict[int, Place], list[int]]:
    """Return each Value's Place and the buffers' widths; a buffer is free again after its Value's last reader."""
    whole = {call.output.index: group.output for group in groups for call in group.calls}
    whole |= {group.after.output.index: group.output for group in groups if group.after is not None}
    last_use = {whole[value.index]: i for i, group in enumerate(groups) for value in group.inputs}
    places: dict[int, Place] = {}
    widths: list[int] = []
    free: list[int] = []
    for i, group in enumerate(groups):
        width = sum(call.output.width for call in group.calls)
        if free:
            buffer = free.pop()
            widths[buffer] = max(widths[buffer], width)
        else:
            buffer = len(widths)
            widths.append(width)
        places[group.output] = Place(buffer, 0, width)
        column = 0
        for call in group.calls:
            places[call.output.index] = Place(buffer, column, call.output.width)
            column += call.output.width
        if group.after is not None:
            places[group.calls[0].output.index] = places[group.output]
        read = {whole[value.index] for value in group.inputs}
        # Freed after the output has its place: no Op writes over what it reads.
        free += [places[value].buffer for value in read if last_use[value] == i]
    return places, widths


def load_weights(
    groups: Iterable[Group],
    tensors: Mapping[str, Tensor],
    threads: int,
) -> dict[str, Float32]:
    """Return all weights in float32, joined ones under ``Group.weight``."""
    names = dict.fromkeys(
        tuple(call.weights[which] for call in group.calls)
        for group in groups
        for which in range(len(group.calls[0].weights))
    )

    def load(joined: tuple[str, ...]) -> Float32:
        if len(joined) == 1:
            return tensors[joined[0]].float32()
        parts = [tensors[name] for name in joined]
        whole = np.empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), np.float32)
        row = 0
        for part in parts:
            whole[row : row + part.shape[0]] = part.float32()
            row += part.shape[0]
        return whole

    # The largest first: the embedding table alone is a third of a small model.
    ordered = sorted(names, key=lambda joined: -sum(tensors[name].nbytes for name in joined))
    with ThreadPoolExecutor(threads, "load") as workers:
        return {"+".join(joined): array for joined, array in zip(ordered, workers.map(load, ordered), strict=True)}


def checked_tensors(plan: Plan, weight: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return every weight that the Plan reads, by name; raises CheckpointError on a wrong shape."""
    return {name: _checked(weight(name), shape) for name, shape in weight_shapes(plan).items()}


def _checked(tensor: Tensor, shape: tuple[int | None, ...]) -> Tensor:
    matches = len(tensor.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not matches:
        wanted = " x ".join("any" if size is None else str(size) for size in shape)
        found = " x ".join(map(str, tensor.shape))
        raise CheckpointError(f"weight {tensor.name!r} is {found}, but the config asks for {wanted}")
    return tensor
