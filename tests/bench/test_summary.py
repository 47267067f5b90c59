"""Figures of known records."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headway.bench.ask import Record
from headway.bench.load import LoadResult
from headway.bench.summary import Slo, report_json, summarise, table

KEYS = {
    "model", "url", "mode", "seconds", "requests", "completed", "errors", "errors_by_kind", "refused", "retry_after_s",
    "refusal_ms", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "tokens_per_s", "requests_per_s", "goodput_per_s", "slo",
    "input_tokens", "output_tokens", "tokens_counted_by", "lag_ms", "loop_lag_ms", "seed",
}  # fmt: skip


def record(at: float = 0.0, *, ttft: float = 0.1, gap: float = 0.01, tokens: int = 5, **fields: Any) -> Record:
    deltas = tuple(at + ttft + gap * index for index in range(tokens))
    whole = Record(
        tag="",
        warm_up=False,
        scheduled_s=at,
        sent_s=at + 0.001,
        first_s=deltas[0] if deltas else None,
        last_s=deltas[-1] if deltas else None,
        done_s=deltas[-1] if deltas else at + ttft,
        deltas_s=deltas,
        outcome="completed",
        status=200,
        error=None,
        detail="",
        retry_after_s=None,
        input_tokens=10,
        cached_tokens=None,
        output_tokens=tokens,
        counted_by="usage",
        finish_reason="length",
    )
    return msgspec.structs.replace(whole, **fields)


def test_percentiles_and_rates_are_those_of_the_records() -> None:
    records = [record(float(index), ttft=0.001 * (index + 1)) for index in range(101)]
    got = summarise(records, seconds=50.5)
    assert got.ttft_ms.p50 == pytest.approx(51.0)
    assert got.ttft_ms.p90 == pytest.approx(91.0)
    assert got.ttft_ms.p99 == pytest.approx(100.0)
    assert got.ttft_ms.mean == pytest.approx(51.0)
    assert got.tpot_ms.p99 == pytest.approx(10.0)
    assert got.itl_ms.p50 == pytest.approx(10.0)
    assert got.e2e_ms.p50 == pytest.approx(91.0)
    assert (got.requests_per_s, got.tokens_per_s) == (2.0, 10.0)
    assert (got.input_tokens, got.output_tokens) == (1010, 505)
    assert got.lag_ms["max"] == pytest.approx(1.0)
    assert got.goodput_per_s is None


def test_the_span_is_the_records_own_where_none_is_given() -> None:
    assert summarise([record(1.0), record(3.0)]).seconds == pytest.approx(2.14)


def test_outcomes_are_counted_apart() -> None:
    records = [
        record(),
        record(warm_up=True),
        record(outcome="refused", status=429, retry_after_s=2.0, tokens=0, ttft=0.004),
        record(outcome="refused", status=503, tokens=0, ttft=0.004),
        record(outcome="error", error="reset", tokens=2),
        record(outcome="error", error="http_500", tokens=0),
        record(outcome="error", error="reset", tokens=0),
    ]
    got = summarise(records)
    assert (got.requests, got.completed, got.refused, got.errors) == (6, 1, 2, 3)
    assert got.errors_by_kind == {"reset": 2, "http_500": 1}
    assert got.retry_after_s == {"p50": 2.0, "p99": 2.0}
    assert got.refusal_ms["p50"] == pytest.approx(4.0)
    assert got.output_tokens == 5


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_ms=150), 2),
        (Slo(ttft_ms=99), 0),
        (Slo(tpot_ms=15), 1),
        (Slo(itl_ms=15), 1),
        (Slo(ttft_ms=150, itl_ms=50), 2),
    ],
)
def test_goodput_counts_what_keeps_every_promise(slo: Slo, good: int) -> None:
    records = [
        record(),
        record(gap=0.02),
        record(outcome="error", error="reset"),
        record(tokens=0) if slo.ttft_ms else record(outcome="refused"),
    ]
    assert summarise(records, seconds=1.0, slo=slo).goodput_per_s == good


def test_one_long_gap_breaks_the_promise_about_gaps_but_not_the_mean() -> None:
    stalled = record(deltas_s=(0.1, 0.11, 0.5, 0.51), last_s=0.51, output_tokens=100)
    assert summarise([stalled], seconds=1.0, slo=Slo(tpot_ms=10)).goodput_per_s == 1.0
    assert summarise([stalled], seconds=1.0, slo=Slo(itl_ms=100)).goodput_per_s == 0.0


def test_who_counted_the_tokens_is_said() -> None:
    assert summarise([record()]).tokens_counted_by == "usage"
    assert summarise([record(counted_by="deltas")]).tokens_counted_by == "deltas"
    assert summarise([record(), record(counted_by="deltas")]).tokens_counted_by == "both"


def test_nothing_measured_is_null_and_still_json() -> None:
    result = LoadResult(records=[], started=0.0, seconds=0.0, loop_lag_s=[])
    report = report_json(result, model="m", url="u", mode="closed", seed=0, slo=None)
    assert set(report) == KEYS
    assert report["ttft_ms"] == dict.fromkeys(("p50", "p90", "p95", "p99", "mean"))
    assert report["tokens_per_s"] is None
    json.dumps(report, allow_nan=False)
    assert "0 requests" in table(report)


def test_the_table_names_what_went_wrong() -> None:
    records = [record(), record(outcome="refused", tokens=0), record(outcome="error", error="timeout", tokens=0)]
    result = LoadResult(records=records, started=0.0, seconds=2.0, loop_lag_s=[0.001])
    text = table(report_json(result, model="m", url="u", mode="closed", seed=0, slo=Slo(ttft_ms=500)))
    assert "timeout 1" in text
    assert "refused: answered in" in text
    assert "0.50 good requests/s" in text
