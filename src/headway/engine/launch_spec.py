"""What the engine process is told at its start; apart from ``launch`` so that the API process loads no NumPy for it."""

from __future__ import annotations

import msgspec

from headway.config import EngineConfig


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that the engine process needs to know before it starts."""

    model: str
    """Path of a checkpoint."""
    config: EngineConfig
    threads: int
    """Compute threads, decided by the parent."""
