"""What one rendering of a chat template may use: turns, time, characters, parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jinja2.utils import Namespace

_MAX_TURNS = 1_000_000
MAX_INT_BITS = 4_096
_MAX_DEPTH = 200
_MADE_PER_CHAR = 100
_CHARS_PER_PART = 8
MAX_PARTS = 1_000_000


class TemplateRefused(Exception):
    """The template was stopped; not a jinja2 error, so that no template construct can catch it."""


@dataclass(slots=True)
class Budget:
    """What one rendering may still use."""

    deadline: float
    max_chars: int
    turns: int = _MAX_TURNS
    printed: int = 0
    made: int = 0
    """Characters of all texts made on the way: generators could hold many before one is printed."""

    def tick(self) -> None:
        """Count a loop turn or a call."""
        self.turns -= 1
        if self.turns < 0:
            raise TemplateRefused(f"it takes more than {_MAX_TURNS} loop turns and calls")
        if time.monotonic() > self.deadline:
            raise TemplateRefused("its time limit has passed")

    def check_chars(self, chars: int) -> None:
        """Refuse a text of that many characters."""
        if chars > self.max_chars:
            raise TemplateRefused(f"it makes a text of {chars} characters, more than {self.max_chars}")

    def print(self, chars: int) -> None:
        """Count printed characters, those of captured blocks too."""
        self.printed += chars
        self.check_chars(self.printed)

    def check(self, value: Any) -> Any:
        """Refuse a value that is too large, counted as if its shared parts were written out; return it."""
        if isinstance(value, str | bytes):
            self.check_chars(len(value))
            self.made += len(value)
            if self.made > _MADE_PER_CHAR * self.max_chars:
                raise TemplateRefused(f"it makes texts of more than {_MADE_PER_CHAR * self.max_chars} characters")
        elif isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise TemplateRefused(f"it makes a number of {value.bit_length()} bits, more than {MAX_INT_BITS}")
        elif isinstance(value, Mapping | list | tuple | Namespace):
            self.weigh(value)
        return value

    def weigh(self, root: Any) -> int:
        """Return about how many characters a value takes when it is written out."""
        counted = 1
        chars = 0
        level = [root]
        for _ in range(_MAX_DEPTH):
            below: list[Any] = []
            for value in level:
                if isinstance(value, str | bytes):
                    chars += len(value)
                elif isinstance(value, Mapping):
                    below.extend(value)
                    below.extend(value.values())
                elif isinstance(value, list | tuple):
                    below.extend(value)
                elif isinstance(value, Namespace):
                    below.extend(_attributes(value).values())
                # Level by level, so that a tree of shared parts cannot outgrow the limit before it is seen.
                if counted + len(below) > MAX_PARTS:
                    raise TemplateRefused(f"it makes a value of more than {MAX_PARTS} parts")
            counted += len(below)
            self.check_chars(chars)
            if not below:
                return chars + _CHARS_PER_PART * counted
            level = below
        raise TemplateRefused(f"it nests values deeper than {_MAX_DEPTH}")


def _attributes(namespace: Namespace) -> dict[str, Any]:
    # Namespace answers every other look-up from its contents.
    found: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return found


_active = threading.local()


def current() -> Budget:
    """Return the budget of this thread's rendering."""
    budget: Budget | None = getattr(_active, "budget", None)
    if budget is None:
        raise TemplateRefused("it runs outside of a rendering")
    return budget


@contextmanager
def within(budget: Budget) -> Iterator[None]:
    """Make this thread's renderings use the budget."""
    _active.budget = budget
    try:
        yield
    finally:
        _active.budget = None
