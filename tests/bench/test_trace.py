"""Traces are read as they are, or refused by file, line and field; prompts share what the trace shares."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.bench.ask import Target
from headway.bench.client import Connections
from headway.bench.prompts import Prompts, words_per_token
from headway.bench.trace import BLOCK_TOKENS, TraceRow, read_trace
from headway.errors import InvalidRequest
from tests.bench.fake_server import Script, serving

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_rows_come_by_time_from_zero_as_fast_as_asked(tmp_path: Path) -> None:
    path = written(
        tmp_path, GOOD | {"timestamp": 3000}, GOOD | {"timestamp": 1000, "hash_ids": []}, GOOD | {"extra": 1}
    )
    rows = read_trace(path, speed=2.0)
    assert [row.at_s for row in rows] == [0.0, 0.5, 1.5]
    assert rows[0] == TraceRow(at_s=0.0, input_tokens=600, output_tokens=5, hash_ids=(1, 2))
    late = read_trace(written(tmp_path, GOOD | {"timestamp": 90_000.5}))
    assert late[0].at_s == 0.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timestamp": None}, "timestamp: None; expected milliseconds"),
        ({"timestamp": -1}, "timestamp: -1"),
        ({"timestamp": True}, "timestamp: True"),
        ({"timestamp": "0"}, "timestamp: '0'"),
        ({"input_length": 0}, "input_length: 0"),
        ({"input_length": 1.5}, "input_length: 1.5"),
        ({"output_length": 10**9}, "output_length: 1000000000"),
        ({"hash_ids": 3}, "hash_ids: 3"),
        ({"hash_ids": [1, "2"]}, "hash_ids: [1, '2']"),
        ({"hash_ids": [1, 2, 3]}, "hash_ids: 3 ids, but 600 tokens are 2 blocks"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = written(tmp_path, GOOD, GOOD | change)
    with pytest.raises(InvalidRequest) as caught:
        read_trace(path)
    assert f"{path}:2: {words}" in caught.value.message


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    path = written(tmp_path, {name: value for name, value in GOOD.items() if name != field})
    with pytest.raises(InvalidRequest, match=f"trace.jsonl:1: {field}: missing"):
        read_trace(path)


@pytest.mark.parametrize("text", [b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"timestamp": NaN}'])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n" + text)
    with pytest.raises(InvalidRequest, match=r"t\.jsonl:2: "):
        read_trace(path)


def test_no_file_and_no_rows_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="absent"):
        read_trace(tmp_path / "absent")
    with pytest.raises(InvalidRequest, match="no requests"):
        read_trace(written(tmp_path))


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())
ROWS = st.fixed_dictionaries({}, optional=dict.fromkeys(GOOD, VALUES)).map(lambda row: json.dumps(row).encode())


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(ROWS | st.binary(max_size=30), max_size=3))
def test_any_bytes_are_read_or_refused(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / f"fuzz-{os.getpid()}.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        rows = read_trace(path)
    except InvalidRequest as error:
        assert str(path) in error.message  # noqa: PT017 - either may happen
    else:
        assert all(row.at_s >= 0 and row.input_tokens >= 1 and row.output_tokens >= 1 for row in rows)


def shared_words(one: str, other: str) -> int:
    pairs = zip(one.split(), other.split(), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_prompts_share_the_blocks_that_ids_share_and_nothing_else() -> None:
    prompts = Prompts(seed=3)
    base = prompts.from_blocks(1500, [1, 2, 3], "a")
    assert len(base.split()) == 1500
    again = prompts.from_blocks(1200, [1, 2, 9], "b")
    assert BLOCK_TOKENS * 2 <= shared_words(base, again) < BLOCK_TOKENS * 2 + 8
    assert shared_words(base, prompts.from_blocks(1500, [4, 2, 3], "c")) < 8
    longer = prompts.from_blocks(1536, [1, 2, 3], "d")
    assert shared_words(base, longer) == 1500
    rest = [prompts.from_blocks(900, [1], key) for key in "ef"]
    assert BLOCK_TOKENS <= shared_words(*rest) < BLOCK_TOKENS + 8


def test_prompts_repeat_by_seed() -> None:
    assert Prompts(1).prompt(50, 7) == Prompts(1).prompt(50, 7) != Prompts(2).prompt(50, 7)
    one, two = Prompts(1).prompt(50, 7, shared_tokens=20), Prompts(1).prompt(50, 8, shared_tokens=20)
    assert len(one.split()) == 50
    assert 20 <= shared_words(one, two) < 28


@pytest.mark.parametrize(("tokens_per_word", "ratio"), [(2.0, 0.5), (None, 1.0), (1.0, 1.0), (0.0, 1.0)])
def test_lengths_follow_the_servers_tokenizer_where_it_has_one(tokens_per_word: float | None, ratio: float) -> None:
    async def run() -> float:
        async with serving(Script()) as server:
            server.tokens_per_word = tokens_per_word
            target = Target(url=server.url, model="m")
            connections = Connections(target.origin())
            found = await words_per_token(connections, target)
            connections.close()
            return found

    assert asyncio.run(run()) == pytest.approx(ratio)
    assert len(Prompts(0, ratio).text(100, "k").split()) == 100 * ratio
