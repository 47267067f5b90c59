"""What every table of benchmarks/ begins with, and how a row is written."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

from headway.bench.measure import machine_line

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Return the commit that is measured, with a plus when files differ from it."""
    short, dirty = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain")
    return (short or "unknown") + ("+" if dirty else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def head(command: str, columns: tuple[str, ...] = ("figure", "median", "least to greatest")) -> None:
    """Print where, what and how, and the table's head."""
    print(f"`python -m {command}` at {commit()}; {machine_line()}\n")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)


def row(name: str, values: Sequence[float], unit: str, digits: int = 0) -> None:
    """Print one figure with its spread."""
    space = " " if unit else ""
    low, high, middle = min(values), max(values), statistics.median(values)
    print(f"| {name} | {middle:,.{digits}f}{space}{unit} | {low:,.{digits}f} to {high:,.{digits}f} |", flush=True)
