"""Plots as inline SVG, drawn for a column of a phone; colours come from the page's own variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

import msgspec

WIDTH: Final = 360
HEIGHT: Final = 220
LEFT: Final = 44
RIGHT: Final = 12
TOP: Final = 10
BOTTOM: Final = 34
POINTS: Final = 400
"""A curve of more points than pixels only makes the file large."""


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A request as a line in time: seconds, and the colours between them."""

    edges: tuple[float, ...]
    colours: tuple[str, ...]
    title: str


def ticks(least: float, most: float, count: int = 5) -> list[float]:
    """Return round values between two, about ``count`` of them."""
    span = most - least
    if span <= 0:
        return [least]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(least / step - 1e-9)
    return [index * step for index in range(first, math.floor(most / step + 1e-9) + 1)]


def decades(least: float, most: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten between two; fewer where they crowd, even steps where few fit."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    every = (1, 2, 5) if len(powers) <= 3 else (1,)
    marks = [mark for power in powers for mark in (f * 10.0**power for f in every) if least <= mark <= most]
    return marks if len(marks) >= 3 else ticks(least, most, 4)


def cumulative(title: str, unit: str, values: Sequence[float]) -> str:
    """Return the curve of the share of values up to each value, on a logarithmic axis."""
    ordered = sorted(values)
    least = next((value for value in ordered if value > 0), None)
    if least is None:
        return _empty(title)
    most = max(ordered[-1], least * 1.5)

    def across(value: float) -> float:
        share = math.log(max(value, least) / least) / math.log(most / least)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def up(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    places = sorted({round(index * (len(ordered) - 1) / POINTS) for index in range(POINTS + 1)})
    line = " ".join(f"{across(ordered[at]):.1f},{up((at + 1) / len(ordered)):.1f}" for at in places)
    curve = f'<polyline points="{across(ordered[0]):.1f},{up(0):.1f} {line}" class="curve"/>'
    return _figure(title, [*_across_axis(decades(least, most), across, unit), *_up_axis(up), curve], HEIGHT)


def timeline(title: str, bars: Sequence[Bar], end: float, *, row: float = 3.0) -> str:
    """Return one line a request, from top to bottom, over seconds."""
    if not bars or end <= 0:
        return _empty(title)
    height = round(TOP + BOTTOM + max(40.0, row * len(bars)))

    def across(value: float) -> float:
        return 12 + min(max(value / end, 0.0), 1.0) * (WIDTH - 12 - RIGHT)

    parts = _across_axis(ticks(0.0, end), across, "s", height)
    for index, bar in enumerate(bars):
        y = TOP + row * (index + 0.5)
        pieces = []
        for begin, stop, colour in zip(bar.edges, bar.edges[1:], bar.colours, strict=False):
            x, wide = across(begin), max(across(stop) - across(begin), 0.6)
            pieces.append(
                f'<rect x="{x:.1f}" y="{y - row * 0.4:.1f}" width="{wide:.1f}" height="{row * 0.8:.1f}" '
                f'style="fill:var(--{colour})"/>'
            )
        parts.append(f"<g><title>{escape(bar.title)}</title>{''.join(pieces)}</g>")
    return _figure(title, parts, height)


def _across_axis(
    marks: Sequence[float], across: Callable[[float], float], unit: str, height: float = HEIGHT
) -> list[str]:
    floor = height - BOTTOM
    parts = []
    for mark in marks:
        x = across(mark)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{floor:.1f}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="{floor + 14:.1f}" text-anchor="middle">{mark:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{floor + 28:.1f}" text-anchor="end">{escape(unit)}</text>')
    return parts


def _up_axis(up: Callable[[float], float]) -> list[str]:
    parts = []
    for share in (0.0, 0.5, 0.9, 1.0):
        y = up(share)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    return parts


def _figure(title: str, parts: Sequence[str], height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _empty(title: str) -> str:
    text = f'<text x="{WIDTH / 2:g}" y="30" text-anchor="middle">nothing measured</text>'
    return _figure(title, [text], 60)
