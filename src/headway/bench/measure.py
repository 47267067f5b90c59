"""Numbers with their spread: medians, percentiles, and the machine's own limits measured in the same run."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A repeated measurement."""

    median: float
    best: float
    worst: float
    runs: int


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` (0..1) of the values lie, by linear interpolation; NaN for none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> Spread:
    """Return median, least and greatest."""
    return Spread(median=percentile(values, 0.5), best=min(values), worst=max(values), runs=len(values))


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - no path to resolve
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def machine_line() -> str:
    """Return the machine in one line, for the head of a table."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}"
