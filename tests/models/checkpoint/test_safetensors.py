from __future__ import annotations

import json
import random
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.errors import CheckpointError
from headway.models.checkpoint import open_checkpoint
from headway.models.checkpoint.mapped import MappedFile
from headway.models.checkpoint.safetensors import local_file, parse_json, read_table
from tests.models.checkpoint import build


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_floats_equal_those_of_the_safetensors_library(dtype: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    values = {"a": torch.randn(5, 7), "b": torch.randn(3), "c": torch.randn(())}
    stored = {name: each.to(getattr(torch, dtype)) for name, each in values.items()}
    save_file(stored, tmp_path / "model.safetensors")
    from headway.models.checkpoint.huggingface import SafetensorsTensor

    with MappedFile(tmp_path / "model.safetensors") as file:
        table = read_table(file)
        assert set(table) == set(values)
        for name, each in stored.items():
            tensor = SafetensorsTensor(name, table[name])
            assert tensor.shape == tuple(each.shape)
            assert tensor.kind == {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[dtype]
            assert tensor.affine() is None
            np.testing.assert_array_equal(tensor.float32(), each.to(torch.float32).numpy())
        del tensor


def test_integers_are_read_as_they_are_and_are_no_weights(tmp_path: Path) -> None:
    numpy_file = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    stored = {name: rng.integers(0, 100, (4, 3)).astype(name) for name in ("int8", "uint8", "int32", "int64")}
    numpy_file.save_file(stored, tmp_path / "model.safetensors")
    from headway.models.checkpoint.huggingface import SafetensorsTensor

    table = read_table(MappedFile(tmp_path / "model.safetensors"))
    for name, each in stored.items():
        np.testing.assert_array_equal(table[name].array(), each)
        assert table[name].array().dtype == each.dtype
    with pytest.raises(CheckpointError, match="'int8' holds i8 values"):
        SafetensorsTensor("int8", table["int8"]).float32()


def shards(folder: Path, **files: str) -> Path:
    """Write a model in two shards; ``files`` rename the shards in the index only."""
    arrays = build.weights(build.tiny())
    names = list(arrays)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in parts.items():
        (folder / file).write_bytes(build.safetensors_bytes(build.as_f32({name: arrays[name] for name in part})))
    weight_map = {name: files.get(file[:7].replace("-", "_"), file) for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(build.hf_config(build.tiny())))
    return folder


def test_shards_are_one_model(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(shards(tmp_path))
    for name, array in build.weights(build.tiny()).items():
        np.testing.assert_array_equal(checkpoint.tensor(name).float32(), array)
    checkpoint.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "a/b.safetensors", "a\\b", "a\0b", ""])
def test_safetensors_hostile_index_names_a_file_elsewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards(tmp_path, model_2=name)
    opened: list[Path] = []
    real = Path.open

    def spy(self: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(self)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", spy)
    with pytest.raises(CheckpointError, match="only plain names of files beside it"):
        open_checkpoint(folder)
    assert opened
    assert all(path.parent == folder for path in opened)


def test_safetensors_hostile_link_out_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(build.safetensors_bytes({}))
    folder = tmp_path / "model"
    folder.mkdir()
    shards(folder)
    (folder / "model-2.safetensors").unlink()
    (folder / "model-2.safetensors").symlink_to("../secret.safetensors")
    with pytest.raises(CheckpointError, match="link out of its directory"):
        open_checkpoint(folder)


def test_links_of_a_hub_cache_into_its_own_blobs_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    source = build.hf_directory(tmp_path / "source")
    for number, name in enumerate(("config.json", "model.safetensors")):
        (source / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    assert open_checkpoint(snapshot).config.layers == 1
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../../models--other")
    (tmp_path / "models--other").write_bytes((blobs / "1").read_bytes())
    with pytest.raises(CheckpointError, match="link out of its directory"):
        open_checkpoint(snapshot)


def test_links_within_the_directory_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("real.json")
    assert local_file(tmp_path, "link.json").read_text() == "{}"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match="missing or unreadable"):
        local_file(tmp_path, "loop")


def test_an_index_that_does_not_fit_its_shards(tmp_path: Path) -> None:
    folder = shards(tmp_path, model_2="model-1.safetensors")
    with pytest.raises(CheckpointError, match=r"is in 'model-1.safetensors', but it is not"):
        open_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(CheckpointError, match="has no weight_map"):
        open_checkpoint(folder)
    shards(tmp_path, model_2="model-3.safetensors")
    with pytest.raises(CheckpointError, match=r"model-3.safetensors' is missing"):
        open_checkpoint(folder)


def row(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def one(data: bytes = bytes(8), **rows: Any) -> bytes:
    return build.with_header(json.dumps(rows).encode(), data)


HOSTILE = {
    "header length": (struct.pack("<Q", 2**62) + bytes(64), "claims a header of 4611686018427387904 bytes, but has 64"),
    "no header": (b"\x10\0\0", "it has 3 bytes"),
    "empty": (b"", "is empty"),
    "no JSON": (build.with_header(b"{a"), "is not valid JSON"),
    "no UTF-8": (build.with_header(b'{"\xff": 1}'), "is not valid JSON"),
    "no object": (build.with_header(b"[]"), "must be a JSON object, not list"),
    "deep": (build.with_header(b'{"a":' + b"[" * 100_000), "nested too deeply"),
    "digits": (build.with_header(b'{"a":' + b"9" * 10_000 + b"}"), "is not valid JSON"),
    "NaN": (build.with_header(b'{"a": NaN}'), "NaN is no JSON number"),
    "many values": (build.with_header(b'{"a": [' + b"1," * 2**20 + b"1]}"), "holds more than 1048576 values"),
    "many tensors": (
        build.with_header(json.dumps({str(each): 1 for each in range(2**16 + 1)}).encode()),
        "claims 65537 tensors; more than 65536 are not read",
    ),
    "name twice after many": (
        build.with_header(b"{" + b"".join(b'"%d":1,' % each for each in range(60_000)) + b'"59999":1}'),
        "'59999' appears twice",
    ),
    "name twice": (
        build.with_header(b'{"a": 1, "a": 2}'),
        "'a' appears twice",
    ),
    "dtype unknown": (one(t=row("F99")), "'t' has dtype 'F99'; read are F32, F16, BF16"),
    "dtype no text": (one(t=row(["F32"])), "'t' has dtype"),
    "overlap": (one(bytes(12), t=row(), u=row(offsets=(4, 12))), "tensors 't' and 'u' overlap"),
    "same range": (one(t=row(), u=row()), "tensors 't' and 'u' overlap"),
    "gap": (one(bytes(16), t=row(offsets=(8, 16))), "8 bytes before tensor 't' belong to no tensor"),
    "rest": (one(bytes(9), t=row()), "1 bytes at its end belong to no tensor"),
    "outside": (one(t=row(shape=(3,), offsets=(0, 12))), "'t' ends at byte"),
    "far outside": (one(t=row(offsets=(2**62, 2**62 + 8))), "'t' ends at byte"),
    "backwards": (one(t=row(offsets=(8, 0))), "'t' has data_offsets"),
    "negative offset": (one(t=row(offsets=(-8, 0))), "'t' has data_offsets"),
    "three offsets": (one(t=row(offsets=(0, 8, 8))), "'t' has data_offsets"),
    "float offsets": (one(t=row(offsets=(0.0, 8.0))), "'t' has data_offsets"),
    "shape too large": (one(t=row(shape=(3,))), r"shape \(3,\) and dtype F32 takes 12 bytes, but data_offsets give 8"),
    "shape overflow": (one(t=row(shape=(2**62, 2**62))), "takes"),
    "negative shape": (one(t=row(shape=(-1, -2))), "'t' has shape"),
    "true as shape": (one(t=row(shape=(True, 2))), "'t' has shape"),
    "many dimensions": (one(t=row(shape=(1,) * 9)), "'t' has shape"),
    "no row": (one(t=7), "'t' must have dtype, shape and data_offsets"),
    "part of a row": (one(t={"dtype": "F32"}), "'t' must have dtype, shape and data_offsets"),
    "more than a row": (one(t=row(more=1)), "'t' must have dtype, shape and data_offsets"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_safetensors_hostile(name: str, tmp_path: Path) -> None:
    raw, message = HOSTILE[name]
    folder = build.hf_directory(tmp_path)
    (folder / "model.safetensors").write_bytes(raw)
    caught = build.refused_cheaply(folder, message, most_bytes=20e6)
    assert str(folder) in caught.message
    assert len(caught.message) < 1000


def test_a_large_json_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    folder = build.hf_directory(tmp_path)
    with (folder / "config.json").open("r+b") as file:
        file.truncate(2**33)
    build.refused_cheaply(folder, "is larger than 16777216 bytes", most_bytes=100e6)


def test_parse_json_names_what_it_reads() -> None:
    with pytest.raises(CheckpointError, match="the thing is not valid JSON"):
        parse_json(b"{", "the thing")


def test_mutants_of_a_file_open_or_are_refused_and_never_crash(tmp_path: Path) -> None:
    folder = build.hf_directory(tmp_path)
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    rng = random.Random(11)
    extremes = [
        b"-1",
        b"0",
        b"1e9",
        b"9223372036854775808",
        b"null",
        b"true",
        b'"x"',
        b"[]",
        b"{}",
        b"NaN",
        b"1" * 5000,
    ]
    numbers = [index for index in range(8, 8 + length) if raw[index : index + 1].isdigit()]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opened, refused, longest, slowest = 0, 0, 0, 0.0
    for _ in range(2000):
        mutant = bytearray(raw)
        choice = rng.random()
        if choice < 0.35:
            for _ in range(rng.randint(1, 4)):
                mutant[rng.randrange(8 + length)] = rng.randrange(256)
        elif choice < 0.5:
            del mutant[rng.randrange(len(mutant)) :]
        elif choice < 0.6:
            mutant[:8] = struct.pack(
                "<Q", rng.choice([0, 1, length - 1, length + 1, 2**31, 2**63, rng.randrange(2**64)])
            )
        else:
            at = rng.choice(numbers)
            stop = at
            while raw[stop : stop + 1].isdigit():
                stop += 1
            mutant[at:stop] = rng.choice(extremes)
            mutant[:8] = struct.pack("<Q", length + len(mutant) - len(raw))
        build.rewrite(path, bytes(mutant))
        started = time.process_time()
        try:
            checkpoint = open_checkpoint(folder)
            for name in checkpoint.names():
                assert checkpoint.tensor(name).float32().shape == checkpoint.tensor(name).shape
            checkpoint.close()
            opened += 1
        except CheckpointError as error:
            refused += 1
            longest = max(longest, len(error.message))
        slowest = max(slowest, time.process_time() - started)
    assert refused > 1400
    assert slowest < 1
    assert longest < 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    build.rewrite(path, raw)
    open_checkpoint(folder).close()
    assert opened + refused == 2000
