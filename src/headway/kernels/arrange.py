"""Arranges a Plan for replay: products that read the same Value join, Values share buffers, weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from headway.errors import CheckpointError
from headway.kernels.ops import Call, Plan
from headway.kernels.plan import weight_shapes
from headway.kernels.tensor import Float32, Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """A Call, or adjacent linears over one Value (q, k, v; gate, up) that run as one product."""

    calls: tuple[Call, ...]
    output: int
    """Index of the Value that holds all outputs side by side: the Call's own, or one past the Plan's."""

    def weight(self, which: int) -> str:
        """Return the name under which the joined weights (0) or biases (1) are loaded; "" when there is none."""
        return "+".join(name for call in self.calls for name in call.weights[which : which + 1])


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


def place_values(groups: Sequence[Group]) -> tuple[dict[int, Place], list[int]]:
    """Return each Value's Place and the buffers' widths; a buffer is free again after its Value's last reader."""
    whole = {call.output.index: group.output for group in groups for call in group.calls}
    last_use = {
        whole[value.index]: i for i, group in enumerate(groups) for call in group.calls for value in call.inputs
    }
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
        read = {whole[value.index] for call in group.calls for value in call.inputs}
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
