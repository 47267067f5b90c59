"""Bytes to a validated body; every mistake is named with its field, its value and what would be right."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Final, TypeVar

import msgspec

from headway.errors import InvalidRequest

Body = TypeVar("Body")

LARGE_BYTES: Final = 256 * 1024
"""Bodies above this are read in a thread (decoding 8 MB holds the interpreter for up to 35 ms, checking for more)."""

_PATH: Final = re.compile(r" - at `(?P<path>[^`]*)`\Z")
_REQUIRED: Final = re.compile(r"Object missing required field `(?P<field>[^`]+)`")
_STEP: Final = re.compile(r"\.?(?P<key>[^.\[\]]+)|\[(?P<index>\d+)\]|(?P<any>\[\.\.\.\])")
_EXPECTED: Final = re.compile(r"Expected `(?P<type>\w+)`(?: of length)? (?P<op>[<>]=?) (?P<bound>\S+)\Z")
_SHOWN: Final = 60
"""Characters of a bad value that a message repeats."""
_NOTHING: Final = object()
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def decode(raw: bytes, body: type[Body]) -> Body:
    """Return the body; raises InvalidRequest for JSON that is malformed, too deep, or of the wrong shape."""
    decoder = _decoders.get(body)
    if decoder is None:
        decoder = _decoders[body] = msgspec.json.Decoder(body)
    try:
        decoded: Body = decoder.decode(raw)
        return decoded
    except msgspec.ValidationError as error:
        raise _explain(raw, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(raw, str(error)) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


async def decode_off_loop(raw: bytes, body: type[Body]) -> Body:
    """Do the same in a thread when the body is large: other streams go on meanwhile."""
    return await asyncio.to_thread(decode, raw, body) if len(raw) > LARGE_BYTES else decode(raw, body)


def _explain(raw: bytes, text: str) -> InvalidRequest:
    """Name the field and the value that msgspec's message leaves out."""
    path = ""
    found = _PATH.search(text)
    if found:
        path, text = found["path"].removeprefix("$").removeprefix("."), text[: found.start()]
    missing = _REQUIRED.match(text)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        return InvalidRequest(f"{path!r} is required", param=path)
    if not path:
        return InvalidRequest(f"the body must be a JSON object: {text[0].lower()}{text[1:]}")
    shown = _shown(_value_at(raw, path))
    return InvalidRequest(
        f"{path}{shown} is not allowed: {text[0].lower()}{text[1:]}", param=path.removesuffix("[...]")
    )


def _shown(value: Any) -> str:
    if value is _NOTHING:
        return ""
    text = msgspec.json.encode(value).decode()
    return f"={text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"


def _value_at(raw: bytes, path: str) -> Any:
    """Return the value at msgspec's path; decoded again, since this happens for bad bodies only."""
    try:
        value: Any = msgspec.json.decode(raw)
        for step in _STEP.finditer(path):
            if step["any"]:
                break
            value = value[int(step["index"])] if step["index"] is not None else value[step["key"]]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return _NOTHING
    return value


class _NotFinite:
    """Stands for NaN or an infinity while the field that holds it is looked for."""

    def __init__(self, name: str) -> None:
        self.name = name


def _malformed(raw: bytes, text: str) -> InvalidRequest:
    if b"NaN" in raw or b"Infinity" in raw:
        named = _not_finite(raw)
        if named is not None:
            return named
    if not raw.strip():
        return InvalidRequest("the body is empty; a JSON object is expected")
    text = text.removeprefix("JSON is malformed: ")
    if not text[:2].isupper():  # not "JSON ..."
        text = text[0].lower() + text[1:]
    return InvalidRequest(f"the body is not valid JSON: {text}")


def _not_finite(raw: bytes) -> InvalidRequest | None:
    """Return an error that names the field holding NaN or Infinity (Python writes them, JSON has none)."""
    try:
        value = json.loads(raw, parse_constant=_NotFinite)
    except (ValueError, RecursionError):
        return None
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, _NotFinite):
            return InvalidRequest(
                f"{path or 'body'}={item.name} is not allowed: JSON has no such number", param=path or None
            )
        if isinstance(item, dict):
            pending.extend((f"{path}.{key}" if path else str(key), inner) for key, inner in item.items())
        elif isinstance(item, list):
            pending.extend((f"{path}[{i}]", inner) for i, inner in enumerate(item))
    return None
