"""Reads traces of real traffic: when requests came, how long they were, and which beginnings they shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from headway.errors import InvalidRequest

BLOCK_TOKENS: Final = 512
"""Tokens of a prompt that one entry of ``hash_ids`` stands for."""
MOST_TOKENS: Final = 10_000_000
"""Longer than any context: what exceeds it is a slip, and would fill the memory."""

MOST_MS: Final = 1e15
"""Thirty thousand years, and a number that seconds can still be made of."""


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a trace; ``at_s`` counts from the trace's first request."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """One id per block of the prompt; prompts that begin with equal ids begin with equal text."""


def read_trace(path: Path, *, speed: float = 1.0) -> list[TraceRow]:
    """Read a trace in the Mooncake format (one JSON object a line), by time, ``speed`` times as fast as it was.

    InvalidRequest names file, line and field of what is wrong.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidRequest(f"cannot read {str(path)!r}: {error.strerror}") from error
    rows = [_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise InvalidRequest(f"{path}: no requests in it")
    rows.sort(key=lambda row: row.at_s)
    first = rows[0].at_s
    return [msgspec.structs.replace(row, at_s=(row.at_s - first) / speed) for row in rows]


def _row(line: bytes, where: str) -> TraceRow:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: expected a JSON object with timestamp, input_length and output_length")
    milliseconds = value.get("timestamp")
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float) or not 0 <= milliseconds < MOST_MS:
        raise _wrong(where, value, "timestamp", "milliseconds, 0 or more")
    input_tokens = _length(value, "input_length", where)
    return TraceRow(
        at_s=float(milliseconds) / 1e3,
        input_tokens=input_tokens,
        output_tokens=_length(value, "output_length", where),
        hash_ids=_hash_ids(value, input_tokens, where),
    )


def _length(value: dict[str, Any], field: str, where: str) -> int:
    tokens = value.get(field)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= MOST_TOKENS:
        raise _wrong(where, value, field, f"tokens, an integer from 1 to {MOST_TOKENS}")
    return tokens


def _hash_ids(value: dict[str, Any], input_tokens: int, where: str) -> tuple[int, ...]:
    ids = value.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise _wrong(where, value, "hash_ids", "a list of integers")
    # More ids than blocks means blocks of another size, whose replay would share other prefixes than the trace did.
    most = -(-input_tokens // BLOCK_TOKENS)
    if len(ids) > most:
        raise InvalidRequest(
            f"{where}: hash_ids: {len(ids)} ids, but {input_tokens} tokens are {most} blocks of {BLOCK_TOKENS}"
        )
    return tuple(ids)


def _wrong(where: str, value: dict[str, Any], field: str, expected: str) -> InvalidRequest:
    if field not in value:
        return InvalidRequest(f"{where}: {field}: missing; expected {expected}")
    shown = repr(value[field])
    return InvalidRequest(f"{where}: {field}: {shown[:60]}{'...' if len(shown) > 60 else ''}; expected {expected}")
