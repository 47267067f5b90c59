"""GGUF files that lie: one clear error each, quickly and in little memory (case gguf-hostile)."""

from __future__ import annotations

import random
import resource
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from headway.errors import CheckpointError
from headway.models.checkpoint import open_checkpoint
from tests.models.checkpoint import build

KEY = build.key("general.architecture", build.STRING, "llama")
ONE = build.info("token_embd.weight", (32, 1), 0, 0)

HOSTILE = {
    "n_tensors": (build.gguf([KEY], [], n_tensors=2**60), r"claims 1152921504606846976 tensors, but only \d+ bytes"),
    "n_keys": (build.gguf([], [], n_keys=2**60), "claims 1152921504606846976 metadata keys"),
    "many tensors in a big file": (
        build.gguf([KEY], [], bytes(4_000_000), n_tensors=100_000),
        "claims 100000 tensors; more than 16384 are not read",
    ),
    "key length": (
        build.gguf([struct.pack("<Q", 2**63)], [], bytes(64), n_keys=1),
        "metadata key is 9223372036854775808 bytes long",
    ),
    "string length": (
        build.gguf([build.string("general.name") + struct.pack("<IQ", 8, 2**63)], [], bytes(64)),
        "inside the value of 'general.name' \\(9223372036854775808 bytes",
    ),
    "string length in an array": (
        build.gguf([build.string("t") + struct.pack("<IIQQ", 9, 8, 1, 2**63)], [], bytes(64)),
        "string 0 of 1 of 't' runs past the end",
    ),
    "array count": (
        build.gguf([build.string("t") + struct.pack("<IIQ", 9, 4, 2**40)], [], bytes(64)),
        "claims 1099511627776 values for 't'",
    ),
    "string array count": (
        build.gguf([build.string("t") + struct.pack("<IIQ", 9, 8, 2**61)], [], bytes(64)),
        "claims 2305843009213693952 strings for 't'",
    ),
    "array of arrays": (
        build.gguf([build.string("t") + struct.pack("<IIQ", 9, 9, 1)], [], bytes(64)),
        "'t' is an array of arrays",
    ),
    "value type": (
        build.gguf([build.string("t") + struct.pack("<I", 13)], [], bytes(64)),
        "'t' has unknown value type 13",
    ),
    "element type": (
        build.gguf([build.string("t") + struct.pack("<IIQ", 9, 99, 1)], [], bytes(64)),
        "'t' is an array of unknown value type 99",
    ),
    "key twice": (build.gguf([KEY, KEY], []), "metadata key 'general.architecture' appears twice"),
    "key no UTF-8": (build.gguf([build.key(b"\xff", 4, 1)], []), "metadata key is not UTF-8"),
    "alignment 0": (build.gguf([KEY, build.key("general.alignment", 4, 0)], [ONE]), "general.alignment is 0"),
    "alignment 3": (build.gguf([KEY, build.key("general.alignment", 4, 3)], [ONE]), "general.alignment is 3"),
    "alignment 96": (build.gguf([KEY, build.key("general.alignment", 4, 96)], [ONE]), "general.alignment is 96"),
    "alignment text": (build.gguf([KEY, build.key("general.alignment", 8, "32")], [ONE]), "general.alignment is '32'"),
    "no dimensions": (build.gguf([KEY], [build.info("t", (), 0, 0)]), "'t' has 0 dimensions"),
    "five dimensions": (build.gguf([KEY], [build.info("t", (1,) * 5, 0, 0)]), "'t' has 5 dimensions"),
    "many dimensions": (
        build.gguf([KEY], [build.string("t") + struct.pack("<I", 2**31)], bytes(64)),
        "2147483648 dimensions",
    ),
    "dimension 0": (build.gguf([KEY], [build.info("t", (32, 0), 0, 0)]), "0 elements are impossible"),
    "dims overflow": (build.gguf([KEY], [build.info("t", (2**32, 2**32), 0, 0)]), "elements are impossible"),
    "dims overflow to small": (build.gguf([KEY], [build.info("t", (2**63, 2), 0, 0)]), "elements are impossible"),
    "type 99": (
        build.gguf([KEY], [build.info("t", (32,), 99, 0)]),
        r"'t' has type 99 \(unknown\); use a file with f32",
    ),
    "type Q2_K": (build.gguf([KEY], [build.info("t", (256,), 10, 0)]), r"type 10 \(Q2_K, which is not read\)"),
    "rows of part blocks": (
        build.gguf([KEY], [build.info("t", (33, 2), 2, 0)], bytes(64)),
        "rows of 33, which is no multiple of q4_0's block of 32",
    ),
    "rows of part K blocks": (build.gguf([KEY], [build.info("t", (128, 2), 12, 0)], bytes(200)), "q4_k's block of 256"),
    "offset outside": (
        build.gguf([KEY], [build.info("t", (32,), 0, 2**62)], bytes(128)),
        r"'t' \(f32, shape \(32,\)\) ends at",
    ),
    "offset wraps": (build.gguf([KEY], [build.info("t", (32,), 0, 2**64 - 32)], bytes(128)), "ends at byte"),
    "offset not aligned": (
        build.gguf([KEY], [build.info("t", (1,), 0, 4)], bytes(128)),
        "offset 4, which is not aligned",
    ),
    "data cut off": (build.gguf([KEY], [build.info("t", (32,), 0, 0)], bytes(127)), "the file is cut off"),
    "overlap": (
        build.gguf([KEY], [build.info("t", (32,), 0, 0), build.info("u", (32,), 0, 64)], bytes(192)),
        "tensors 't' and 'u' overlap",
    ),
    "same place": (
        build.gguf([KEY], [build.info("t", (32,), 0, 0), build.info("u", (32,), 0, 0)], bytes(128)),
        "tensors 't' and 'u' overlap",
    ),
    "tensor twice": (
        build.gguf([KEY], [build.info("t", (8,), 0, 0), build.info("t", (8,), 0, 32)], bytes(64)),
        "tensor 't' appears twice",
    ),
    "tensor twice after many": (
        build.gguf(
            [KEY], [build.info(str(min(each, 16_000)), (8,), 0, 32 * each) for each in range(16_002)], bytes(2**21)
        ),
        "tensor '16000' appears twice",
    ),
    "magic": (b"GGML" + bytes(60), "starts with b'GGML'"),
    "version 1": (build.gguf([KEY], [], version=1), "version 1 is not read"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(40), "version 50331648 is not read"),
    "piece of a split file": (build.gguf([KEY, build.key("split.count", 2, 3)], []), "one of 3 pieces"),
    "empty": (b"", "is empty"),
    "architecture missing": (build.gguf([], []), "general.architecture '' is not supported; supported are gemma3"),
    "architecture": (
        build.gguf([build.key("general.architecture", 8, "mamba")], []),
        "general.architecture 'mamba' is not supported; supported are gemma3, llama, qwen2, qwen3",
    ),
    "architecture a number": (build.gguf([build.key("general.architecture", 4, 7)], []), "general.architecture is 7"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_gguf_hostile(name: str, tmp_path: Path) -> None:
    raw, message = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    caught = build.refused_cheaply(path, message, most_bytes=50e6)
    assert str(path) in caught.message


def test_gguf_hostile_truncated_at_each_byte(tmp_path: Path) -> None:
    raw = build.tiny_gguf(keys=[build.key("tokenizer.ggml.tokens", 9, (8, ["a", "bc"]))])
    path = tmp_path / "model.gguf"
    header = raw.index(b"output.weight") + 100
    for size in [*range(header), len(raw) - 1]:
        build.rewrite(path, raw[:size])
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            open_checkpoint(path)


def test_a_huge_array_of_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(build.gguf([build.string("t") + struct.pack("<IIQ", 9, 8, 2**26)], [], n_keys=1))
    with path.open("r+b") as file:
        file.truncate(2**33)  # sparse: 8 GiB that take no disk
    build.refused_cheaply(path, "67108864 strings for 't'; more than 2097152 are not read", most_bytes=1e6)


def test_a_fifo_or_a_device_is_no_model() -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(Path("/dev/zero"))


def _mutant(raw: bytes, spots: list[tuple[int, int]], rng: random.Random) -> bytes:
    """Return the file with random bytes changed, cut off, or a field of the header set to an extreme value."""
    out = bytearray(raw)
    choice = rng.random()
    if choice < 0.3:
        for _ in range(rng.randint(1, 8)):
            out[rng.randrange(len(out) if rng.random() < 0.1 else 1600)] = rng.randrange(256)
    elif choice < 0.45:
        del out[rng.randrange(len(out)) :]
    elif choice < 0.9:
        for _ in range(rng.randint(1, 2)):
            at, size = rng.choice(spots)
            extreme = [0, 1, 2, 3, 7, 8, 9, 13, 31, 33, 99, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
            extreme += [2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, rng.randrange(2**64), rng.randrange(64)]
            out[at : at + size] = (rng.choice(extreme) % 2 ** (8 * size)).to_bytes(size, "little")
    else:
        at = rng.randrange(1600)
        piece = bytes(out[at : at + rng.randint(1, 64)])
        out[rng.randrange(1600) : rng.randrange(1600)] = piece
    return bytes(out)


def _spots(raw: bytes) -> list[tuple[int, int]]:
    """Return place and width of counts, lengths, types and offsets: everything in the header that is no text."""
    spots = [(4, 4), (8, 8), (16, 8)]
    position = 24
    n_tensors, n_keys = struct.unpack_from("<QQ", raw, 8)
    for _ in range(n_keys):
        spots.append((position, 8))
        position += 8 + struct.unpack_from("<Q", raw, position)[0]
        kind = struct.unpack_from("<I", raw, position)[0]
        spots.append((position, 4))
        position += 4
        if kind == build.STRING:
            spots.append((position, 8))
            position += 8 + struct.unpack_from("<Q", raw, position)[0]
        elif kind == build.ARRAY:
            inner, count = struct.unpack_from("<IQ", raw, position)
            spots += [(position, 4), (position + 4, 8)]
            position += 12
            for _ in range(count):
                spots.append((position, 8 if inner == build.STRING else 4))
                position += 8 + struct.unpack_from("<Q", raw, position)[0] if inner == build.STRING else 4
        else:
            spots.append((position, 4))
            position += 4
    for _ in range(n_tensors):
        spots.append((position, 8))
        position += 8 + struct.unpack_from("<Q", raw, position)[0]
        n_dims = struct.unpack_from("<I", raw, position)[0]
        spots += [(position, 4), *((position + 4 + 8 * dim, 8) for dim in range(n_dims))]
        position += 4 + 8 * n_dims
        spots += [(position, 4), (position + 4, 8)]
        position += 12
    return spots


def test_mutants_of_a_file_open_or_are_refused_and_never_crash(tmp_path: Path) -> None:
    keys = [
        build.key("tokenizer.ggml.tokens", 9, (8, ["a", "bc", "<|im_end|>"])),
        build.key("tokenizer.ggml.token_type", 9, (5, [1, 1, 3])),
        build.key("tokenizer.ggml.eos_token_id", 4, 2),
        build.key("tokenizer.chat_template", 8, "{{ x }}"),
    ]
    raw = build.tiny_gguf(keys=keys)
    spots = _spots(raw)
    rng = random.Random(7)
    path = tmp_path / "model.gguf"
    opened = refused = longest = 0
    slowest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(4000):
        build.rewrite(path, _mutant(raw, spots, rng))
        started = time.process_time()
        try:
            checkpoint = open_checkpoint(path)
            for name in checkpoint.names():
                tensor = checkpoint.tensor(name)
                values = tensor.float32()
                assert values.shape == tensor.shape
                assert values.dtype == np.float32
                tensor.affine()
            checkpoint.close()
            opened += 1
        except CheckpointError as error:
            refused += 1
            longest = max(longest, len(error.message))
        slowest = max(slowest, time.process_time() - started)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert opened > 50
    assert refused > 2000
    assert slowest < 1
    assert longest < 2000
    assert grown_kib < 50_000
