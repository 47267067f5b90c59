"""A GGUF file as a Checkpoint: memory-mapped tensors under Hugging Face names, in Hugging Face's conventions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import CheckpointError
from headway.kernels.tensor import Affine, Float32
from headway.models.checkpoint.config_gguf import from_gguf
from headway.models.checkpoint.dense import dense_float32
from headway.models.checkpoint.gguf_names import ROPE_FACTORS, hugging_face_name, norm_shift, permuted_heads, unpermute
from headway.models.checkpoint.gguf_read import TensorInfo, read_container
from headway.models.checkpoint.gguf_types import BlockType, decode_all, dequantize
from headway.models.checkpoint.mapped import MappedFile
from headway.models.config import ModelConfig


class GGUFTensor:
    """A weight of a GGUF file: raw blocks in the map, converted when asked for."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        block: BlockType,
        raw: NDArray[np.uint8],
        *,
        heads: int = 0,
        shift: float = 0.0,
    ) -> None:
        self.name = name
        self.shape = shape
        self.kind = block.kind
        self.nbytes = raw.nbytes
        self._block = block
        self._raw = raw
        self._heads = heads
        self._shift = shift

    def _rows(self) -> NDArray[np.uint8]:
        """Return the raw bytes [rows, bytes per row], rows in Hugging Face's order."""
        rows = self._raw.reshape(math.prod(self.shape[:-1]), -1)
        if not self._heads:
            return rows
        if len(self.shape) == 1:  # a bias: each element is a row
            rows = rows.reshape(self.shape[0], -1)
        if len(rows) % (2 * self._heads):  # only a tensor that no model reads: the others' shapes were checked
            raise CheckpointError(
                f"tensor {self.name!r} has {len(rows)} rows, which do not divide into {self._heads} heads"
            )
        return rows[unpermute(len(rows), self._heads)]

    def float32(self) -> Float32:
        """Return the values, dequantized, in a new array (C order)."""
        if self._block.decode is None:
            values = dense_float32(self._rows(), self.kind)
        else:
            blocks = self._rows().reshape(-1, self._block.nbytes)
            values = np.empty((len(blocks), self._block.elements), np.float32)
            dequantize(blocks, self._block, values)
        if self._shift:
            values -= np.float32(self._shift)
        return values.reshape(self.shape)

    def affine(self) -> Affine | None:
        """Return the canonical quantized form, or None for a dense kind (and for a norm, which must be shifted)."""
        if self._block.decode is None or self._shift:
            return None
        rows = self._rows()
        return decode_all(rows.reshape(-1, self._block.nbytes), self._block, len(rows))

    def blocks(self) -> NDArray[np.uint8] | None:
        """Return the raw rows of a quantized matrix, which are a view of the file unless heads are permuted."""
        return None if self._block.decode is None or self._shift else self._rows()


class GGUFCheckpoint:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            container = read_container(self._file)
            self.metadata: Mapping[str, Any] = container.metadata
            found = {info.name: info for info in container.tensors}
            factors = found.pop(ROPE_FACTORS, None)
            self.config: ModelConfig = from_gguf(
                container.metadata,
                tied="output.weight" not in found,
                attention_bias="blk.0.attn_q.bias" in found,
                output_bias="blk.0.attn_output.bias" in found,
                mlp_bias="blk.0.ffn_gate.bias" in found,
                freq_factors=() if factors is None else self._freq_factors(factors),
            )
            self._infos = self._rename(found)
        except CheckpointError as error:
            self._file.close()
            if str(path) in error.message:
                raise
            raise CheckpointError(f"{str(path)!r}: {error.message}") from error
        self.weight_bytes = sum(info.nbytes for info in self._infos.values())

    def _rename(self, found: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        for name, info in found.items():
            new = hugging_face_name(name, self.config.architecture)
            if new in infos:
                raise CheckpointError(f"tensors {infos[new].name!r} and {name!r} are the same weight, {new!r}")
            infos[new] = info
        return infos

    def _raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        return self._file.view(info.start, info.start + info.nbytes)

    def _freq_factors(self, info: TensorInfo) -> tuple[float, ...]:
        if len(info.shape) != 1 or info.shape[0] > 1 << 16 or info.block.decode is not None:
            raise CheckpointError(
                f"tensor {info.name!r} ({info.block.kind}, shape {info.shape}) must be a short vector"
            )
        return tuple(dense_float32(self._raw(info), info.block.kind).tolist())

    def names(self) -> tuple[str, ...]:
        """Return the Hugging Face names of all tensors."""
        return tuple(self._infos)

    def tensor(self, name: str) -> GGUFTensor:
        """Return one weight; CheckpointError if the file has none of that name."""
        info = self._infos.get(name)
        if info is None:
            raise CheckpointError(f"{str(self.path)!r} has no tensor {name!r}; it has {len(self._infos)} others")
        config = self.config
        return GGUFTensor(
            name,
            info.shape,
            info.block,
            self._raw(info),
            heads=permuted_heads(info.name, config.architecture, heads=config.heads, kv_heads=config.kv_heads),
            shift=norm_shift(info.name, config.architecture),
        )

    def forget(self) -> None:
        """Give back the memory of what was read."""
        self._file.forget()

    def close(self) -> None:
        """Unmap; tensors that were handed out must not be used after."""
        self._file.close()
