"""One file per checkpoint format; ``open_checkpoint`` picks it by what the path holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from headway.kernels.tensor import Tensor
from headway.models.config import ModelConfig


class Checkpoint(Protocol):
    """An open, memory-mapped model: its shape, its weights by Hugging Face name, and what its tokenizer is made from."""

    @property
    def path(self) -> Path:
        """The directory or file."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """GGUF key-value pairs (string arrays as lists); empty for a Hugging Face directory."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in the file(s)."""
        ...

    def names(self) -> tuple[str, ...]:
        """Return the Hugging Face names of all tensors."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return one weight, in Hugging Face's conventions whatever the format; KeyError-like CheckpointError if absent.

        GGUF's permuted q and k rows of llama are put back; Gemma norm weights are those of Hugging Face (without the 1).
        """
        ...

    def close(self) -> None:
        """Unmap; tensors that were handed out must not be used after."""
        ...
