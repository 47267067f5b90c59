"""``headway bench engine --profile``: where the time of a step goes, by Op."""

from __future__ import annotations

from functools import partial

import msgspec

from headway.bench.engine import Workload

DECODE_STEPS = 32
BAR = 60


class OpTime(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of Op."""

    op: str
    calls: int
    ms: float
    """Of all calls."""
    share: float
    """Of the case's whole time."""


class CaseProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of step."""

    case: str
    ms: float
    """One step, or one prompt's prefill."""
    ops: list[OpTime]
    """The longest first."""
    outside: float
    """Share of the time that no Op took: packing the batch, the calls, the choice of the token."""


def profile(workload: Workload, cases: list[tuple[int, int]], prefills: list[int]) -> list[CaseProfile]:
    """Return where the time goes for each (batch, context) of decode and each length of prefill."""
    found = []
    for batch, context in cases:
        steps = workload.decode_steps
        runs = max(1, DECODE_STEPS // steps)
        taken = workload.profile(partial(workload.decode_step_s, batch, context), runs)
        found.append(_case(f"decode, batch {batch} at {context}", taken, runs * steps))
    for tokens in prefills:
        taken = workload.profile(partial(workload.prefill_s, tokens), 2)
        found.append(_case(f"prefill {tokens}", taken, 2))
    return found


def _case(name: str, taken: tuple[float, dict[str, tuple[float, int]]], times: int) -> CaseProfile:
    seconds, by_op = taken
    ordered = sorted(by_op.items(), key=lambda item: -item[1][0])
    return CaseProfile(
        case=name,
        ms=round(seconds / times * 1e3, 3),
        ops=[
            OpTime(op=op, calls=calls, ms=round(spent * 1e3, 3), share=round(spent / seconds, 4))
            for op, (spent, calls) in ordered
        ],
        outside=round(max(0.0, 1.0 - sum(spent for spent, _ in by_op.values()) / seconds), 4),
    )


def render(cases: list[CaseProfile]) -> str:
    """Return tables for a person, each with a bar whose letters are the Ops'."""
    lines: list[str] = []
    for case in cases:
        lines += ["", f"{case.case}: {case.ms:.2f} ms", f"  [{_bar(case)}]"]
        lines.append(f"  {'op':10} {'calls':>8} {'ms':>10} {'share':>7} {'us a call':>10}")
        for op in case.ops:
            lines.append(f"  {op.op:10} {op.calls:8} {op.ms:10.2f} {op.share:7.1%} {1e3 * op.ms / op.calls:10.1f}")
        lines.append(f"  {'(outside)':10} {'':8} {'':10} {case.outside:7.1%}")
    return "\n".join(lines[1:])


def _bar(case: CaseProfile) -> str:
    """Return a bar of BAR characters: each Op's name, cut or filled to its share; dots are outside of all Ops."""
    bar, total = "", 0.0
    for op in case.ops:
        total += op.share
        width = round(total * BAR) - len(bar)
        if width > 0:
            bar += op.op[: width - 1].ljust(width - 1, "-") + "|"
    return bar.ljust(BAR, ".")
