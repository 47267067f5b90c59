"""One file per architecture, found by its name; each has ``forward(ops, config)``, which records the whole model."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol, cast

from headway.errors import CheckpointError
from headway.kernels.ops import Ops, Value
from headway.models.config import ModelConfig


class Architecture(Protocol):
    """The contract of a model file."""

    def forward(self, ops: Ops, config: ModelConfig) -> Value:
        """Record the model from the token ids to the logits, which are returned."""
        ...


_OTHERS = frozenset({"aliases", "config", "layers", "pull", "sources"})  # files here that are no architecture


def architectures() -> tuple[str, ...]:
    """Return the names of the model files."""
    found = pkgutil.iter_modules(__path__)
    return tuple(sorted(m.name for m in found if not m.ispkg and m.name not in _OTHERS and not m.name.startswith("_")))


def load(architecture: str) -> Architecture:
    """Return the model file of that name; raises CheckpointError that lists those that exist."""
    if architecture not in architectures():
        known = ", ".join(architectures())
        raise CheckpointError(f"no model file for architecture {architecture!r}; available: {known}")
    return cast(Architecture, importlib.import_module(f"{__name__}.{architecture}"))
