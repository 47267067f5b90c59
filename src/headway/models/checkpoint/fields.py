"""Typed reads of an untrusted mapping: config.json, GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.errors import CheckpointError

_BIG = 1 << 24
"""No width, vocabulary or context of a model that fits a machine is larger."""


class Fields:
    """Typed reads of an untrusted mapping; errors name the key and the value."""

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.raw = raw
        self.source = source
        self.prefix = prefix

    def error(self, key: str, reason: str) -> CheckpointError:
        """Return an error that shows the key and its value."""
        value = short(self.raw.get(self.prefix + key))
        return CheckpointError(f"{self.source}: {self.prefix}{key} is {value}; {reason}")

    def get(self, key: str) -> Any:
        """Return the value, None where it is absent or null."""
        return self.raw.get(self.prefix + key)

    def _found(self, key: str, default: Any, what: str) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.source}: {self.prefix}{key} is missing; it must be {what}")
        return default

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = _BIG) -> int:
        """Return an integer of the range; without a default the key must be there."""
        value = self._found(key, default, "an integer")
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, f"it must be an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e12) -> float:
        """Return a finite number above ``low``; without a default the key must be there."""
        value = self._found(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
            raise self.error(key, f"it must be a number above {low:g} and at most {high:g}")
        return float(value)

    def optional_integer(self, key: str) -> int | None:
        """Return a positive integer, or None where it is absent."""
        return None if self.get(key) is None else self.integer(key)

    def optional_number(self, key: str) -> float | None:
        """Return a number above zero, or None where it is absent."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a truth value."""
        value = self._found(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, "it must be true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Return a string."""
        value = self._found(key, default, "a string")
        if not isinstance(value, str):
            raise self.error(key, "it must be a string")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return a mapping, empty where it is absent."""
        value = self._found(key, {}, "a mapping")
        if not isinstance(value, Mapping):
            raise self.error(key, "it must be a mapping")
        return value

    def uniform(self, key: str, default: int | None = None) -> int:
        """Return an integer that GGUF may also give once per layer."""
        value = self.get(key)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise self.error(key, "layers of different shapes are not supported")
            return Fields({key: value[0]}, self.source).integer(key)
        return self.integer(key, default)


def short(value: Any) -> str:
    """Return the value for a message, cut to a line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def unsupported(source: str, key: str, name: Any, known: Sequence[str]) -> CheckpointError:
    """Return an error that lists what is supported instead."""
    return CheckpointError(f"{source}: {key} {short(name)} is not supported; supported are {', '.join(known)}")


def default_head_width(fields: Fields, key: str, hidden: int, heads: int) -> int:
    """Return the head width that the key states, else hidden / heads."""
    if fields.get(key) is None and hidden % heads:
        raise CheckpointError(
            f"{fields.source}: a hidden size of {hidden} does not divide into {heads} heads, and {fields.prefix}{key}"
            " is missing"
        )
    return fields.integer(key, hidden // heads, high=1 << 16)


def token_ids(value: Any, key: str, source: str, vocabulary: int) -> list[int]:
    """Return the token ids of an id, a list of ids or None; those outside the vocabulary can never be sampled."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) for each in ids):
        raise CheckpointError(f"{source}: {key} is {short(value)}; it must be a token id or a list of them")
    return [each for each in ids if 0 <= each < vocabulary]
