"""The GGUF container, versions 2 and 3: metadata and tensor table of an untrusted file.

Every count and length is checked against the bytes that remain before anything is allocated, so that a file of n bytes
costs time and memory in proportion to n. Text is UTF-8; strings that are not keep their bytes as surrogate escapes
(``text.encode("utf-8", "surrogateescape")`` gives them back); keys and tensor names must be valid.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from headway.errors import CheckpointError
from headway.models.checkpoint.fields import short
from headway.models.checkpoint.gguf_types import TYPES, UNREAD, BlockType
from headway.models.checkpoint.mapped import MappedFile

MAGIC = b"GGUF"

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9

_MOST_TENSORS = 1 << 14
_MOST_KEYS = 1 << 16
_MOST_STRINGS = 1 << 21
"""Strings of one array; the largest vocabularies have 2**18 tokens and 2**19 merges."""
_MOST_NUMBERS = 1 << 22
"""Numbers of one array; the longest have one per token."""
_MOST_DIMS = 4
_TENSOR_ROWS = {n_dims: struct.Struct(f"<{n_dims}QIQ") for n_dims in range(1, _MOST_DIMS + 1)}
"""What follows the dimension count: dimensions, type, offset."""
_NAME_BYTES = 1 << 10

_LEAST_KEY_BYTES = 8 + 1 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A row of the tensor table; ``shape`` is (out, in), the reverse of ggml's dimensions."""

    name: str
    shape: tuple[int, ...]
    block: BlockType
    start: int
    """Byte in the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Container:
    """What the header of a file says."""

    metadata: dict[str, Any]
    """Strings, numbers, flags, and lists of them."""
    tensors: tuple[TensorInfo, ...]


def read_container(file: MappedFile) -> Container:
    """Return metadata and tensor table; raises CheckpointError naming the file and the value that is wrong."""
    cursor = _Cursor(file)
    if cursor.take(4, "magic") != MAGIC:
        raise cursor.error("it does not start with 'GGUF'")
    version = cursor.u32("version")
    if version not in (2, 3):
        raise cursor.error(f"version {version} is not read (2 and 3 are); convert the model again, little-endian")
    n_tensors, n_keys = cursor.u64("tensor count"), cursor.u64("key count")
    cursor.check_count(n_keys, _LEAST_KEY_BYTES, _MOST_KEYS, "metadata keys")
    cursor.check_count(n_tensors, _LEAST_TENSOR_BYTES, _MOST_TENSORS, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.name("metadata key")
        if key in metadata:
            raise cursor.error(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(key)
    if metadata.get("split.count", 1) != 1:
        pieces = short(metadata["split.count"])
        raise cursor.error(f"it is one of {pieces} pieces (split.count); join them with llama-gguf-split --merge")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {short(alignment)}; it must be a power of two")
    raw = [_tensor(cursor) for _ in range(n_tensors)]
    seen: set[str] = set()
    for name, *_ in raw:
        if name in seen:
            raise cursor.error(f"tensor {name!r} appears twice")
        seen.add(name)
    return Container(metadata, _place(cursor, raw, alignment))


_RawTensor = tuple[str, tuple[int, ...], BlockType, int, int]


def _tensor(cursor: _Cursor) -> _RawTensor:
    """Return name, shape, type, offset and size of the next row of the tensor table."""
    name = cursor.name("tensor name")
    n_dims = cursor.u32("a dimension count")
    if not 1 <= n_dims <= _MOST_DIMS:
        raise cursor.error(f"tensor {name!r} has {n_dims} dimensions; 1 to {_MOST_DIMS} are possible")
    row = _TENSOR_ROWS[n_dims]
    *dims, number, offset = row.unpack(cursor.take(row.size, "the tensor table"))
    shape = tuple(reversed(dims))
    block = TYPES.get(number)
    if block is None:
        known = f"{UNREAD[number]}, which is not read" if number in UNREAD else "unknown"
        readable = ", ".join(each.kind for each in TYPES.values())
        raise cursor.error(f"tensor {name!r} has type {number} ({known}); use a file with {readable}")
    elements = math.prod(shape)
    if not 0 < elements < 1 << 62:
        raise cursor.error(f"tensor {name!r} has shape {shape}: {elements} elements are impossible")
    if shape[-1] % block.elements:
        raise cursor.error(
            f"tensor {name!r} has rows of {shape[-1]}, which is no multiple of {block.kind}'s block of {block.elements}"
        )
    return name, shape, block, offset, elements // block.elements * block.nbytes


def _place(cursor: _Cursor, raw: list[_RawTensor], alignment: int) -> tuple[TensorInfo, ...]:
    """Return the table with places in the file, after checks of bounds, alignment and overlap."""
    data_start = -(-cursor.position // alignment) * alignment
    for name, shape, block, offset, nbytes in raw:
        if offset % alignment:
            raise cursor.error(f"tensor {name!r} is at offset {offset}, which is not aligned to {alignment}")
        if data_start + offset + nbytes > cursor.size:
            raise cursor.error(
                f"tensor {name!r} ({block.kind}, shape {shape}) ends at byte {data_start + offset + nbytes} of"
                f" {cursor.size}; the file is cut off or damaged, download it again"
            )
    ordered = sorted(raw, key=lambda row: row[3])
    for (name, _, _, offset, nbytes), (after, _, _, place, _) in pairwise(ordered):
        if offset + nbytes > place:
            raise cursor.error(f"tensors {name!r} and {after!r} overlap at offset {place}")
    return tuple(
        TensorInfo(name, shape, block, data_start + offset, nbytes) for name, shape, block, offset, nbytes in raw
    )


class _Cursor:
    """Reads values one after the other; refuses to step outside the file."""

    def __init__(self, file: MappedFile) -> None:
        self.position = 0
        self.size = file.size
        self._path = file.path
        self._data = file.data

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{str(self._path)!r} is not a GGUF file that can be read: {reason}")

    def check_count(self, count: int, least_bytes: int, most: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold."""
        if count > (self.size - self.position) // least_bytes:
            left = self.size - self.position
            raise self.error(f"it claims {count} {what}, but only {left} bytes follow; download it again")
        if count > most:
            raise self.error(f"it claims {count} {what}; more than {most} are not read")

    def take(self, nbytes: int, what: str) -> bytes:
        stop = self.position + nbytes
        if stop > self.size:
            raise self.error(
                f"it ends at byte {self.size} inside {what} ({nbytes} bytes at {self.position}); download it again"
            )
        taken = self._data[self.position : stop]
        self.position = stop
        return taken

    def scalar(self, kind: struct.Struct, what: str) -> Any:
        return kind.unpack(self.take(kind.size, what))[0]

    def u32(self, what: str) -> int:
        return int(self.scalar(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.scalar(_U64, what))

    def name(self, what: str) -> str:
        length = self.u64(f"length of a {what}")
        if not 1 <= length <= _NAME_BYTES:
            raise self.error(f"a {what} is {length} bytes long; 1 to {_NAME_BYTES} are possible")
        raw = self.take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"a {what} is not UTF-8: {raw[:40]!r}") from None

    def value(self, key: str) -> Any:
        """Return the value of a metadata key."""
        number = self.u32(f"value type of {key!r}")
        if number in _SCALARS:
            return self.scalar(_SCALARS[number], f"the value of {key!r}")
        if number == _STRING:
            return self.take(self.u64(f"length of {key!r}"), f"the value of {key!r}").decode("utf-8", "surrogateescape")
        if number == _ARRAY:
            return self._array(key)
        raise self.error(f"metadata key {key!r} has unknown value type {number}")

    def _array(self, key: str) -> Any:
        number, count = self.u32(f"element type of {key!r}"), self.u64(f"length of {key!r}")
        if number == _STRING:
            return self._strings(count, key)
        if number == _ARRAY:
            raise self.error(f"metadata key {key!r} is an array of arrays, which no model needs")
        if number not in _SCALARS:
            raise self.error(f"metadata key {key!r} is an array of unknown value type {number}")
        kind = _SCALARS[number]
        self.check_count(count, kind.size, _MOST_NUMBERS, f"values for {key!r}")
        raw = self.take(count * kind.size, f"the values of {key!r}")
        if number == 7:
            return [byte != 0 for byte in raw]
        return np.frombuffer(raw, np.dtype(kind.format)).tolist()

    def _strings(self, count: int, key: str) -> list[str]:
        """Return a string array: the hot loop of opening a file, a quarter of a million turns for a big vocabulary."""
        self.check_count(count, 8, _MOST_STRINGS, f"strings for {key!r}")
        data, size, position = self._data, self.size, self.position
        unpack = _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > size:
                    break
                append(str(data[start:position], "utf-8", "surrogateescape"))
        except struct.error:
            pass
        if len(strings) != count:
            raise self.error(f"string {len(strings)} of {count} of {key!r} runs past the end of the file")
        self.position = position
        return strings
