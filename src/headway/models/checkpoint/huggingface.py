"""A Hugging Face directory as a Checkpoint: config.json and safetensors weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.errors import CheckpointError
from headway.kernels.tensor import Affine, Float32
from headway.models.checkpoint.config_hf import from_huggingface
from headway.models.checkpoint.dense import DTYPES, dense_float32
from headway.models.checkpoint.fields import short
from headway.models.checkpoint.safetensors import Entry, open_directory, read_json
from headway.models.config import ModelConfig

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"

# Gemma 3's multimodal files keep the text model one level deeper; older ones the other way round.
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}

_COMPARE_BYTES = 1 << 24


class SafetensorsTensor:
    """A dense weight of a safetensors file: a view of the map, converted when asked for."""

    def __init__(self, name: str, entry: Entry) -> None:
        self.name = name
        self.shape = entry.shape
        self.kind = entry.kind
        self.nbytes = entry.stop - entry.start
        self.entry = entry

    def float32(self) -> Float32:
        """Return the values in a new array (C order); CheckpointError for integers, which are no weights."""
        if self.kind not in DTYPES:
            raise CheckpointError(
                f"tensor {self.name!r} holds {self.kind} values, a quantized layout that is not read yet;"
                " use the unquantized model or a GGUF file"
            )
        return dense_float32(self.entry.raw(), self.kind).reshape(self.shape)

    def affine(self) -> Affine | None:
        """Return None: every kind is dense."""
        return None

    def blocks(self) -> None:
        """Return None: every kind is dense."""
        return


class HuggingFaceCheckpoint:
    """An open Hugging Face directory."""

    metadata: Mapping[str, Any] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        generation = read_json(path, "generation_config.json") if (path / "generation_config.json").exists() else None
        config = _with_path(path, read_json(path, "config.json"), generation)
        table, self._files = open_directory(path)
        try:
            self._entries = _rename(path, table)
            self.config = self._tie(config)
        except CheckpointError:
            self.close()
            raise
        self.weight_bytes = sum(entry.stop - entry.start for entry in table.values())

    def _tie(self, config: ModelConfig) -> ModelConfig:
        """Return the config as transformers ties: the table serves as head unless the file has a head that differs.

        A head alone serves as the table too. With ``tie_word_embeddings`` false nothing is tied; both must be there.
        """
        table, head = self._entries.get(_EMBEDDING), self._entries.get(_HEAD)
        if not config.tied:
            return config
        if table is None and head is not None:
            self._entries[_EMBEDDING] = head
            return config
        if table is None or head is None or _equal(table, head):
            return config
        return msgspec.structs.replace(config, tied=False)

    def names(self) -> tuple[str, ...]:
        """Return the Hugging Face names of all tensors."""
        return tuple(self._entries)

    def tensor(self, name: str) -> SafetensorsTensor:
        """Return one weight; CheckpointError if the directory has none of that name."""
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{str(self.path)!r} has no tensor {name!r}; it has {len(self._entries)} others")
        return SafetensorsTensor(name, entry)

    def forget(self) -> None:
        """Give back the memory of what was read."""
        for file in self._files:
            file.forget()

    def close(self) -> None:
        """Unmap; tensors that were handed out must not be used after."""
        for file in self._files:
            file.close()


def _with_path(path: Path, config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> ModelConfig:
    try:
        return from_huggingface(config, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{str(path)!r}: {error.message}") from error


def _rename(path: Path, table: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the table under the names of a text-only model."""
    entries: dict[str, Entry] = {}
    for name, entry in table.items():
        prefix = next((each for each in _PREFIXES if name.startswith(each)), None)
        new = name if prefix is None else _PREFIXES[prefix] + name.removeprefix(prefix)
        if new in entries:
            raise CheckpointError(f"{str(path)!r} holds two tensors that mean {new!r}, one of them {short(name)}")
        entries[new] = entry
    return entries


def _equal(left: Entry, right: Entry) -> bool:
    """Return whether two tensors have the same values, a piece at a time."""
    if left.shape != right.shape or left.kind != right.kind:
        return False
    a, b = left.raw(), right.raw()
    return all(
        np.array_equal(a[start : start + _COMPARE_BYTES], b[start : start + _COMPARE_BYTES])
        for start in range(0, len(a), _COMPARE_BYTES)
    )
