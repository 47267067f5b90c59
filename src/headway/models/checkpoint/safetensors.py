"""The safetensors container: the tensor table of an untrusted file, single or sharded, over a memory map.

A file is a 64-bit header length, a JSON header and the data. As in the official reader the ranges must cover the data
without gap or overlap. Raw bytes stay in the map until a tensor is converted.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.errors import CheckpointError
from headway.models.checkpoint.fields import short
from headway.models.checkpoint.mapped import MappedFile

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "F32": ("f32", np.dtype("<f4")),
    "F16": ("f16", np.dtype("<f2")),
    "BF16": ("bf16", np.dtype("<u2")),
    "I8": ("i8", np.dtype("<i1")),
    "U8": ("u8", np.dtype("<u1")),
    "I32": ("i32", np.dtype("<i4")),
    "I64": ("i64", np.dtype("<i8")),
}
"""Kind and NumPy type by safetensors' name; bfloat16 comes as its 16 bits."""

_MOST_JSON_BYTES = 1 << 24
_MOST_JSON_VALUES = 1 << 20
_MOST_TENSORS = 1 << 16
_MOST_DIMS = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of one file."""

    file: MappedFile
    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int

    def raw(self) -> NDArray[np.uint8]:
        """Return the tensor's bytes in the map."""
        return self.file.view(self.start, self.stop)

    def array(self) -> NDArray[Any]:
        """Return the stored values, a read-only view of the map (bfloat16 as uint16)."""
        return self.raw().view(self.dtype).reshape(self.shape)


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """Return a JSON object of an untrusted file; repeated keys and NaN are refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{short(key)} appears twice")
            found[key] = value
        return found

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON number")

    # Counted before parsing: a value takes two bytes of text, but a hundred of memory.
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > _MOST_JSON_VALUES:
        raise CheckpointError(f"{what} holds more than {_MOST_JSON_VALUES} values, which no model needs")
    try:
        found = json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=constant)
    except RecursionError:
        raise CheckpointError(f"{what} is not valid: it is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} must be a JSON object, not {type(found).__name__}")
    return found


def read_table(file: MappedFile) -> dict[str, Entry]:
    """Return the tensors of one file by name; raises CheckpointError naming the file and the value."""

    def bad(reason: str) -> CheckpointError:
        return CheckpointError(f"{str(file.path)!r} is not a safetensors file that can be read: {reason}")

    if file.size < 8:
        raise bad(f"it has {file.size} bytes; the header's length alone takes 8")
    length = int.from_bytes(file.data[:8], "little")
    if length > _MOST_JSON_BYTES or length > file.size - 8:
        raise bad(f"it claims a header of {length} bytes, but has {file.size - 8}; download it again")
    header = parse_json(file.data[8 : 8 + length], f"the header of {str(file.path)!r}")
    header.pop("__metadata__", None)
    if len(header) > _MOST_TENSORS:
        raise bad(f"it claims {len(header)} tensors; more than {_MOST_TENSORS} are not read")
    data_start = 8 + length
    table: dict[str, Entry] = {}
    for name, row in header.items():
        table[name] = _entry(file, data_start, name, row, bad)
    place, last = data_start, "the header"
    for name, entry in sorted(table.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < place:
            raise bad(f"tensors {short(last)} and {short(name)} overlap")
        if entry.start > place:
            raise bad(f"{entry.start - place} bytes before tensor {short(name)} belong to no tensor")
        place, last = entry.stop, name
    if place != file.size:
        raise bad(f"{file.size - place} bytes at its end belong to no tensor")
    return table


def _entry(file: MappedFile, data_start: int, name: str, row: Any, bad: Any) -> Entry:
    """Return one row of the header, checked."""
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise bad(f"tensor {short(name)} must have dtype, shape and data_offsets, and nothing else")
    known = DTYPES.get(row["dtype"]) if isinstance(row["dtype"], str) else None
    if known is None:
        raise bad(f"tensor {short(name)} has dtype {short(row['dtype'])}; read are {', '.join(DTYPES)}")
    shape, offsets = row["shape"], row["data_offsets"]
    if not _naturals(shape) or len(shape) > _MOST_DIMS:
        raise bad(f"tensor {short(name)} has shape {short(shape)}; it must be a list of whole numbers")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad(f"tensor {short(name)} has data_offsets {short(offsets)}; they must be [begin, end]")
    kind, dtype = known
    start, stop = data_start + offsets[0], data_start + offsets[1]
    if stop > file.size:
        raise bad(
            f"tensor {short(name)} ends at byte {stop} of {file.size}; it is cut off or damaged, download it again"
        )
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise bad(
            f"tensor {short(name)} of shape {tuple(shape)} and dtype {row['dtype']} takes"
            f" {math.prod(shape) * dtype.itemsize} bytes, but data_offsets give {stop - start}"
        )
    return Entry(file, kind, dtype, tuple(shape), start, stop)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 63 for each in value)


def local_file(directory: Path, name: str) -> Path:
    """Return the path of a plain file of the directory, for a name that an untrusted file may have given."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"{str(directory)!r} names the file {name[:200]!r}; only plain names of files beside it are opened"
        )
    return inside(directory, directory / name)


def inside(directory: Path, path: Path) -> Path:
    """Return a path under the directory, unless it is a link out of it.

    Links may point inside the directory; in a hub cache (``models--x--y/snapshots/REVISION``) also to the model's own
    ``blobs``. Anything else is refused without being opened.
    """
    try:
        root, target = directory.resolve(), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} is missing or unreadable; download the whole model") from error
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(each) for each in roots):
        raise CheckpointError(
            f"{str(path)!r} is a link out of its directory, to {str(target)!r}; put the file itself there"
        )
    return path


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Return a JSON file of the directory."""
    path = local_file(directory, name)
    try:
        nbytes = path.stat().st_size
        if nbytes > _MOST_JSON_BYTES:
            raise CheckpointError(f"{str(path)!r} is larger than {_MOST_JSON_BYTES} bytes, which no model needs")
        with path.open("rb") as file:
            raw = file.read(nbytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error.strerror}") from error
    return parse_json(raw, repr(str(path)))


def open_directory(directory: Path) -> tuple[dict[str, Entry], list[MappedFile]]:
    """Return all tensors of a model directory, single file or sharded, and the maps to close."""
    files: list[MappedFile] = []
    try:
        if not (directory / INDEX).exists():
            files.append(MappedFile(local_file(directory, SINGLE)))
            return read_table(files[0]), files
        return _sharded(directory, files), files
    except CheckpointError:
        for file in files:
            file.close()
        raise


def _sharded(directory: Path, files: list[MappedFile]) -> dict[str, Entry]:
    weight_map = read_json(directory, INDEX).get("weight_map")
    index = str(directory / INDEX)
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index!r} has no weight_map from tensor names to file names; download it again")
    paths = {shard: local_file(directory, shard) for shard in dict.fromkeys(weight_map.values())}
    tables = {}
    for shard, path in paths.items():
        files.append(MappedFile(path))
        tables[shard] = read_table(files[-1])
    table: dict[str, Entry] = {}
    for name, shard in weight_map.items():
        if name not in tables[shard]:
            raise CheckpointError(
                f"{index!r} says that {short(name)} is in {shard!r}, but it is not; download both again"
            )
        table[name] = tables[shard][name]
    return table
