"""``headway bench engine``: decode and prefill rates without HTTP, as shares of the machine's measured limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from headway.bench.measure import percentile


class Workload(Protocol):
    """An engine that can be timed; the adapter lives above, since bench knows no engine."""

    @property
    def decode_steps(self) -> int:
        """How many steps a call of ``decode_step_s`` runs."""
        ...

    def facts(self) -> Facts:
        """Return what does not change between runs."""
        ...

    def decode_step_s(self, batch: int, context: int) -> float:
        """Return the seconds that one decode step of ``batch`` sequences at ``context`` tokens takes."""
        ...

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds that the prefill of one prompt takes."""
        ...

    def limits(self) -> tuple[float, float]:
        """Return bytes a second from memory and operations a second at most, measured now."""
        ...

    def profile(self, run: Callable[[], float], times: int) -> tuple[float, dict[str, tuple[float, int]]]:
        """Return the seconds of some calls of ``run``, and seconds and calls by Op in them."""
        ...


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is about."""

    model: str
    kernels: str
    isa: str
    threads: int
    ready_s: float
    rss_mb: float
    weight_read_bytes: int
    """Bytes of weights that a decode step reads."""
    kv_token_bytes: int
    flops_per_token: float
    """Multiplications and additions of the linear layers, per prefill token."""


class DecodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Decode at one batch size and context."""

    batch: int
    context: int
    tokens_per_s: float
    bandwidth_share: float


class PrefillRow(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill of one length."""

    tokens: int
    tokens_per_s: float
    peak_share: float


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The contract's JSON."""

    model: str
    kernels: str
    isa: str
    threads: int
    ready_s: float
    rss_mb: float
    read_gb_per_s: float
    decode: list[DecodeRow]
    prefill: list[PrefillRow]


def measure(
    workload: Workload, *, batches: Sequence[int], contexts: Sequence[int], prefills: Sequence[int], repeats: int
) -> EngineReport:
    """Time every combination ``repeats`` times, interleaved, and report medians."""
    facts = workload.facts()
    cases = [(batch, context) for context in contexts for batch in batches]
    decode: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    prefill: dict[int, list[float]] = {tokens: [] for tokens in prefills}
    bandwidth: list[float] = []
    flops: list[float] = []
    for _ in range(repeats):
        read_now, peak_now = workload.limits()
        bandwidth.append(read_now)
        flops.append(peak_now)
        for case in cases:
            decode[case].append(workload.decode_step_s(*case))
        for tokens in prefills:
            prefill[tokens].append(workload.prefill_s(tokens))
    read, peak = percentile(bandwidth, 0.5), percentile(flops, 0.5)
    decode_rows = []
    for (batch, context), seconds in decode.items():
        step_s = percentile(seconds, 0.5)
        needed = facts.weight_read_bytes + batch * context * facts.kv_token_bytes
        share = needed / read / step_s
        row = DecodeRow(
            batch=batch, context=context, tokens_per_s=round(batch / step_s, 2), bandwidth_share=round(share, 3)
        )
        decode_rows.append(row)
    prefill_rows = []
    for tokens, seconds in prefill.items():
        took_s = percentile(seconds, 0.5)
        share = tokens * facts.flops_per_token / peak / took_s
        prefill_rows.append(
            PrefillRow(tokens=tokens, tokens_per_s=round(tokens / took_s, 1), peak_share=round(share, 3))
        )
    return EngineReport(
        model=facts.model,
        kernels=facts.kernels,
        isa=facts.isa,
        threads=facts.threads,
        ready_s=round(facts.ready_s, 3),
        rss_mb=round(facts.rss_mb, 1),
        read_gb_per_s=round(read / 1e9, 2),
        decode=decode_rows,
        prefill=prefill_rows,
    )


def table(report: EngineReport) -> str:
    """Return the report for a person."""
    lines = [
        f"{report.model} on {report.kernels} ({report.isa}), {report.threads} threads: "
        f"ready in {report.ready_s:.2f} s, {report.rss_mb:.0f} MB resident, reads {report.read_gb_per_s:.1f} GB/s",
        f"{'decode':>8} {'batch':>6} {'context':>8} {'tokens/s':>10} {'of bandwidth':>13}",
    ]
    for row in report.decode:
        lines.append(f"{'':8} {row.batch:6} {row.context:8} {row.tokens_per_s:10.1f} {row.bandwidth_share:13.0%}")
    lines.append(f"{'prefill':>8} {'tokens':>6} {'':8} {'tokens/s':>10} {'of peak':>13}")
    for fill in report.prefill:
        lines.append(f"{'':8} {fill.tokens:6} {'':8} {fill.tokens_per_s:10.1f} {fill.peak_share:13.0%}")
    return "\n".join(lines)
