"""One file per checkpoint format; ``open_checkpoint`` picks it by what the path holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from headway.errors import CheckpointError
from headway.kernels.tensor import Tensor
from headway.models.checkpoint.gguf import GGUFCheckpoint
from headway.models.checkpoint.gguf_read import MAGIC
from headway.models.checkpoint.huggingface import HuggingFaceCheckpoint
from headway.models.checkpoint.mapped import MappedFile
from headway.models.checkpoint.safetensors import INDEX, SINGLE
from headway.models.checkpoint.shapes import check_shapes
from headway.models.config import ModelConfig


class Checkpoint(Protocol):
    """An open, memory-mapped model: its shape, its weights by Hugging Face name, its tokenizer's data."""

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
        """GGUF key-value pairs as plain Python values and lists of them; empty for a Hugging Face directory."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors in the file(s)."""
        ...

    def names(self) -> tuple[str, ...]:
        """Return the Hugging Face names of all tensors."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return one weight, in Hugging Face's conventions whatever the format; CheckpointError if absent.

        GGUF's permuted q and k rows of llama are put back; Gemma's norm weights come without the 1.
        """
        ...

    def forget(self) -> None:
        """Give back the memory of what was read from the file(s); it is read again when it is wanted again."""
        ...

    def close(self) -> None:
        """Unmap; tensors that were handed out must not be used after."""
        ...


_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model by what the path holds: a GGUF file, a directory with one, or a Hugging Face directory.

    Every weight that the model needs is there, with the shape that its config says; anything else raises
    CheckpointError. No pickle is ever read.
    """
    checkpoint = _open(path)
    try:
        check_shapes(checkpoint)
    except CheckpointError:
        checkpoint.close()
        raise
    return checkpoint


def _open(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(f"there is no file or directory {str(path)!r}")
    if path.is_dir():
        return _open_directory(path)
    with MappedFile(path) as file:
        magic = bytes(file.data[:4])
    if magic == MAGIC:
        return GGUFCheckpoint(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{str(path)!r} holds weights only; open its directory, which has config.json too")
    raise CheckpointError(f"{str(path)!r} starts with {magic!r}, so it is no GGUF file; no other single file is read")


def _open_directory(path: Path) -> Checkpoint:
    files = sorted(path.glob("*.gguf"))
    has_weights = (path / SINGLE).exists() or (path / INDEX).exists()
    if (path / "config.json").exists() and has_weights:
        return HuggingFaceCheckpoint(path)
    if len(files) == 1:
        return GGUFCheckpoint(files[0])
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise CheckpointError(f"{str(path)!r} holds {len(files)} GGUF files ({names}); name one of them")
    if has_weights:
        raise CheckpointError(f"{str(path)!r} has weights but no config.json; download the whole model")
    pickles = [file.name for pattern in _PICKLES for file in sorted(path.glob(pattern))]
    if pickles:
        raise CheckpointError(
            f"{str(path)!r} has its weights in {pickles[0]!r}, and no pickle is ever read: convert the model to"
            " safetensors or GGUF"
        )
    raise CheckpointError(
        f"{str(path)!r} holds no model: neither a .gguf file nor config.json with {SINGLE} or {INDEX}"
    )
