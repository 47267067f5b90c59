"""The one shape that every gateway step has, and how they are put around a backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from headway.types import Chunk, Request

Next = Callable[[Request], AsyncGenerator[Chunk, None]]


class Stage(Protocol):
    """A step around the next one.

    It refuses by raising before its first Chunk, rewrites by passing on a new Request, observes by wrapping the Chunks.
    It reads ``then(request)`` inside ``contextlib.aclosing``, so that closing the outermost generator closes the
    backend's at once.
    """

    name: str
    """One of ``telemetry.budget.ORDER``."""

    def __call__(self, request: Request, then: Next) -> AsyncGenerator[Chunk, None]:
        """Yield the answer's Chunks."""
        ...


def compose(stages: Sequence[Stage], end: Next) -> Next:
    """Return the pipeline whose outermost step is the first of ``stages`` and whose innermost is ``end``."""
    pipeline = end
    for stage in reversed(stages):
        pipeline = _around(stage, pipeline)
    return pipeline


def _around(stage: Stage, then: Next) -> Next:
    return lambda request: stage(request, then)
