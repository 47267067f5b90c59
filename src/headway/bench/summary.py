"""Boils records down: percentiles, rates, and goodput, which counts only requests that met what was promised."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from headway.bench.ask import Record
from headway.bench.load import LoadResult
from headway.bench.measure import percentile


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must keep to count as good; None promises nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: float | None = None
    """No gap between two deltas may be longer."""

    @property
    def given(self) -> bool:
        """Return whether anything is promised."""
        return self != Slo()

    def met(self, record: Record) -> bool:
        """Return whether a request completed and kept all promises; one without content kept none about the first."""
        if record.outcome != "completed":
            return False
        if self.ttft_ms is not None and (record.ttft_s is None or 1e3 * record.ttft_s > self.ttft_ms):
            return False
        if self.tpot_ms is not None and record.tpot_s is not None and 1e3 * record.tpot_s > self.tpot_ms:
            return False
        return self.itl_ms is None or all(1e3 * gap <= self.itl_ms for gap in record.gaps_s)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """A latency in milliseconds; None where nothing was measured."""

    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    mean: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of some requests; latencies count from the instant at which a request was due, in milliseconds."""

    seconds: float | None
    requests: int
    completed: int
    errors: int
    errors_by_kind: dict[str, int]
    refused: int
    retry_after_s: dict[str, float | None]
    refusal_ms: dict[str, float | None]
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    tokens_per_s: float | None
    requests_per_s: float | None
    goodput_per_s: float | None
    slo: Slo
    input_tokens: int
    """Of completed requests, as the next."""
    output_tokens: int
    tokens_counted_by: Literal["usage", "deltas", "both"] | None
    lag_ms: dict[str, float | None]
    """How late the generator itself sent."""


def summarise(records: Sequence[Record], *, seconds: float | None = None, slo: Slo | None = None) -> Summary:
    """Return the figures of records; without ``seconds`` rates are over the span from the first due to the last end.

    Completed requests alone enter the latencies; records of a warm-up do not enter at all.
    """
    records = [record for record in records if not record.warm_up]
    slo = slo or Slo()
    if seconds is None and records:
        seconds = max(record.done_s for record in records) - min(record.scheduled_s for record in records)
    completed = [record for record in records if record.outcome == "completed"]
    refused = [record for record in records if record.outcome == "refused"]
    kinds = Counter(record.error or "" for record in records if record.outcome == "error")
    output_tokens = sum(record.output_tokens for record in completed)
    counted_by = {record.counted_by for record in completed}
    good = sum(slo.met(record) for record in completed)
    return Summary(
        seconds=rounded(seconds),
        requests=len(records),
        completed=len(completed),
        errors=kinds.total(),
        errors_by_kind=dict(kinds.most_common()),
        refused=len(refused),
        retry_after_s=_points([one.retry_after_s for one in refused if one.retry_after_s is not None], ("p50", "p99")),
        refusal_ms=_points([1e3 * one.e2e_s for one in refused], ("p50", "p99")),
        ttft_ms=distribution(one.ttft_s for one in completed),
        tpot_ms=distribution(one.tpot_s for one in completed),
        itl_ms=distribution(gap for one in completed for gap in one.gaps_s),
        e2e_ms=distribution(one.e2e_s for one in completed),
        tokens_per_s=_rate(output_tokens, seconds),
        requests_per_s=_rate(len(completed), seconds),
        goodput_per_s=_rate(good, seconds) if slo.given else None,
        slo=slo,
        input_tokens=sum(record.input_tokens or 0 for record in completed),
        output_tokens=output_tokens,
        tokens_counted_by="both" if len(counted_by) == 2 else next(iter(counted_by), None),
        lag_ms=_points([1e3 * record.lag_s for record in records], ("p50", "p99", "max")),
    )


def report_json(result: LoadResult, *, model: str, url: str, mode: str, seed: int, slo: Slo | None) -> dict[str, Any]:
    """Return the contract's JSON object of a run."""
    summary = summarise(result.counted, seconds=result.seconds, slo=slo)
    lag = _points([1e3 * late for late in result.loop_lag_s], ("p99", "max"))
    figures: dict[str, Any] = msgspec.to_builtins(summary)
    return {"model": model, "url": url, "mode": mode, **figures, "loop_lag_ms": lag, "seed": seed}


def distribution(seconds: Iterable[float | None]) -> Distribution:
    """Return the spread of some seconds, in milliseconds; None among them is left out."""
    values = sorted(1e3 * value for value in seconds if value is not None)
    mean = math.fsum(values) / len(values) if values else None
    return Distribution(**_points(values, ("p50", "p90", "p95", "p99")), mean=rounded(mean))


def rounded(value: float | None) -> float | None:
    """Return what JSON can hold: three digits after the point, None for what is no number."""
    return None if value is None or not math.isfinite(value) else round(value, 3)


def _points(values: Sequence[float], names: Sequence[str]) -> dict[str, float | None]:
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: rounded(percentile(ordered, shares[name])) for name in names}


def _rate(count: int, seconds: float | None) -> float | None:
    return rounded(count / seconds) if seconds else None


def table(report: dict[str, Any]) -> str:
    """Return the JSON object for a person."""

    def cell(value: float | None) -> str:
        return f"{'-' if value is None else f'{value:,.1f}':>10}"

    lines = [
        f"{report['model']} at {report['url']}, {report['mode']}, {_shown(report['seconds'])} s: "
        f"{report['requests']} requests, {report['completed']} completed, {report['refused']} refused, "
        f"{report['errors']} errors",
        f"{'':12}" + "".join(f"{name:>10}" for name in ("p50", "p90", "p95", "p99", "mean")),
    ]
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        lines.append(f"{name:12}" + "".join(cell(value) for value in report[name].values()))
    goodput = "" if report["goodput_per_s"] is None else f", {_shown(report['goodput_per_s'])} good requests/s"
    by = report["tokens_counted_by"]
    lines.append(
        f"{_shown(report['tokens_per_s'])} tokens/s, {_shown(report['requests_per_s'])} requests/s{goodput}; "
        f"{report['input_tokens']} tokens in, {report['output_tokens']} out" + (f" (counted by {by})" if by else "")
    )
    if report["refused"]:
        answer, after = report["refusal_ms"], report["retry_after_s"]
        lines.append(
            f"refused: answered in {_shown(answer['p50'])} ms (p99 {_shown(answer['p99'])}), "
            f"retry after {_shown(after['p50'])} s (p99 {_shown(after['p99'])})"
        )
    if report["errors"]:
        lines.append("errors: " + ", ".join(f"{kind} {count}" for kind, count in report["errors_by_kind"].items()))
    lag, loop = report["lag_ms"], report["loop_lag_ms"]
    lines.append(
        f"this generator: sent {_shown(lag['p50'])} ms late (p99 {_shown(lag['p99'])}, max {_shown(lag['max'])}); "
        f"event loop late by p99 {_shown(loop['p99'])}, max {_shown(loop['max'])} ms"
    )
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
