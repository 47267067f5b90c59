"""The page stands alone, says what was measured, and escapes what it did not write."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from headway.bench import svg
from headway.bench.ask import Record
from headway.bench.load import LoadResult
from headway.bench.report import MOST_BARS, render
from headway.bench.summary import Slo, report_json
from tests.bench.test_summary import record

VOID = {"meta", "br", "hr"}


class Balance(HTMLParser):
    """Collects what is wrongly nested."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def page(records: list[Record], model: str = "m") -> str:
    result = LoadResult(records=records, started=0.0, seconds=2.0, loop_lag_s=[0.002])
    report = report_json(result, model=model, url="http://h", mode="closed", seed=1, slo=Slo(ttft_ms=500))
    return render(report, result)


def mixed() -> list[Record]:
    return [
        *(record(0.1 * index, ttft=0.05 + 0.01 * index) for index in range(20)),
        record(0.5, outcome="refused", tokens=0),
        record(0.6, outcome="error", error="reset", tokens=0),
    ]


def test_the_page_needs_nothing_from_outside() -> None:
    text = page(mixed())
    assert not re.search(r"<(script|link|img|iframe)|src=|href=|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text
    balance = Balance()
    balance.feed(text)
    assert (balance.wrong, balance.open) == ([], [])


def test_every_picture_is_well_formed_and_drawn() -> None:
    pictures = re.findall(r"<svg.*?</svg>", page(mixed()), re.DOTALL)
    assert len(pictures) == 3
    trees = [ET.fromstring(picture) for picture in pictures]
    assert all(tree.find("title") is not None for tree in trees)
    assert [len(tree.findall("polyline")) for tree in trees] == [1, 1, 0]
    assert len(trees[2].findall("g")) == 22
    styles = {rect.get("style") for rect in trees[2].iter("rect")}
    assert {f"fill:var(--{name})" for name in ("wait", "stream", "bad", "refused")} <= styles


def test_figures_are_in_the_tables() -> None:
    text = page([record(ttft=0.123)])
    assert "123.0" in text
    assert "promised ttft_ms" in text
    assert "tokens counted by" in text


def test_names_are_escaped() -> None:
    text = page([record(tag='<b>"&')], model="<script>alert(1)</script>")
    assert "<script>" not in text
    assert "<b>" not in text


def test_an_empty_run_is_a_page_too() -> None:
    text = page([])
    assert text.count("nothing measured") == 3


def test_a_long_run_draws_some_and_says_so() -> None:
    text = page([record(0.01 * index, tokens=2) for index in range(1000)])
    assert text.count("<g>") <= MOST_BARS
    assert "one request in 4 is drawn" in text


@pytest.mark.parametrize(("least", "most"), [(0.0, 1.0), (0.0, 0.37), (3.0, 90_000.0), (0.0, 1e-4)])
def test_marks_are_few_and_within(least: float, most: float) -> None:
    marks = svg.ticks(least, most)
    assert 2 <= len(marks) <= 7
    assert all(least <= mark <= most * (1 + 1e-9) for mark in marks)


def test_equal_values_are_a_curve() -> None:
    picture = svg.cumulative("t", "ms", [5.0, 5.0, 5.0])
    assert ET.fromstring(picture).find("polyline") is not None
    assert svg.decades(0.02, 40_000.0) == pytest.approx([0.1, 1, 10, 100, 1000, 10_000])
    assert len(svg.decades(61.0, 94.0)) >= 3
