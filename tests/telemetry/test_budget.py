"""The ledger: contiguous stages, TTFT as delivered, and what nobody claims."""

from __future__ import annotations

import pytest

from headway.telemetry.budget import ORDER, Ledger, Ledgers
from headway.telemetry.clock import FakeClock
from headway.types import EngineTiming


def check(ledger: Ledger) -> None:
    """The invariant of docs/path.md: stages up to the first content + unattributed = TTFT; little is unattributed."""
    assert ledger.ttft is not None
    assert ledger.first_content is not None
    before = sum(s.end - s.start for s in ledger.spans if s.end <= ledger.first_content)
    assert before + ledger.unattributed == pytest.approx(ledger.ttft, abs=1e-9)
    for earlier, later in zip(ledger.spans, ledger.spans[1:], strict=False):
        assert earlier.end <= later.start
    assert ledger.unattributed <= max(0.001, 0.02 * ledger.ttft)


def answered(clock: FakeClock, *, gap_s: float = 0.0) -> Ledger:
    """Return the ledger of a request that passed every stage."""
    ledger = Ledger(clock, "r")
    clock.advance(0.002)
    ledger.end("accept")
    with ledger.stage("parse"):
        clock.advance(0.001)
    clock.advance(gap_s)
    with ledger.stage("admit"):
        pass
    ledger.dispatch()
    start = clock.now()
    clock.advance(0.1)
    ledger.engine(
        EngineTiming(scheduled=start + 0.03, prefilled=start + 0.08, first_token=start + 0.09, cached_tokens=7)
    )
    ledger.deliver()
    clock.advance(0.4)
    ledger.deliver()
    ledger.tokens = 5
    ledger.last_chunk()
    clock.advance(0.01)
    ledger.finish()
    return ledger


def test_every_millisecond_has_an_owner() -> None:
    ledger = answered(FakeClock())
    check(ledger)
    took = {span.stage: round((span.end - span.start) * 1000, 6) for span in ledger.spans}
    assert took == {
        "accept": 2,
        "parse": 1,
        "admit": 0,
        "queue": 30,
        "prefill": 50,
        "first_token": 20,
        "decode": 400,
        "flush": 10,
    }
    assert [s.stage for s in ledger.spans] == [name for name in ORDER if name in took]


def test_json_is_the_contracts_timing() -> None:
    timing = answered(FakeClock()).to_json()
    assert timing["ttft_ms"] == 103.0
    assert timing["e2e_ms"] == 513.0
    assert timing["tpot_ms"] == 100.0
    assert timing["unattributed_ms"] == 0.0
    assert timing["cached_tokens"] == 7
    assert timing["degraded"] == []
    assert timing["stages"][0] == {"stage": "accept", "start_ms": 0.0, "ms": 2.0}
    assert timing["stages"][4] == {"stage": "prefill", "start_ms": 33.0, "ms": 50.0}


def test_time_that_no_stage_claims_is_unattributed_and_breaks_the_invariant() -> None:
    ledger = answered(FakeClock(), gap_s=0.02)
    assert ledger.unattributed == pytest.approx(0.02)
    with pytest.raises(AssertionError):
        check(ledger)


def test_case_ttft_role_chunk() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    ledger.dispatch()
    clock.advance(0.01)  # the role chunk leaves
    clock.advance(0.01)  # an empty content leaves
    assert ledger.ttft is None
    clock.advance(0.08)
    ledger.deliver()
    assert ledger.ttft == pytest.approx(0.1)
    check(ledger)


def test_a_backend_without_instants_gives_an_estimated_stage() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    ledger.dispatch()
    clock.advance(0.05)
    ledger.deliver()
    check(ledger)
    assert ledger.to_json()["stages"] == [{"stage": "prefill", "start_ms": 0.0, "ms": 50.0, "estimated": True}]


@pytest.mark.parametrize(
    "timing",
    [
        EngineTiming(scheduled=5.0, prefilled=4.0, first_token=3.0),
        EngineTiming(scheduled=1e9, prefilled=2e9, first_token=3e9),
        EngineTiming(scheduled=1000.01),
    ],
)
def test_bad_instants_of_an_upstream_cannot_break_the_order(timing: EngineTiming) -> None:
    clock = FakeClock(1000.0)
    ledger = Ledger(clock)
    ledger.end("accept")
    ledger.dispatch()
    clock.advance(0.05)
    ledger.engine(timing)
    ledger.deliver()
    check(ledger)


def test_an_empty_answer_has_no_ttft() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    ledger.dispatch()
    clock.advance(0.05)
    ledger.last_chunk()
    ledger.finish()
    assert ledger.ttft is None
    assert ledger.tpot is None
    assert ledger.to_json()["ttft_ms"] is None
    assert ledger.unattributed == 0.0


def test_server_timing_holds_the_stages_known_before_the_first_content() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    clock.advance(0.002)
    ledger.end("accept")
    ledger.dispatch()
    start = clock.now()
    clock.advance(0.1)
    ledger.engine(EngineTiming(scheduled=start + 0.03, prefilled=start + 0.08, first_token=start + 0.09))
    assert ledger.server_timing() == "accept;dur=2.0, queue;dur=30.0, prefill;dur=50.0, first_token;dur=20.0"
    assert [s.stage for s in ledger.spans] == ["accept"]


def test_the_store_is_bounded_and_keeps_running_requests() -> None:
    clock = FakeClock()
    store = Ledgers(2)
    store.open("running", Ledger(clock))
    for name in ("a", "b", "c"):
        store.open(name, Ledger(clock))
        store.close(name)
    assert store.get("a") is None
    assert store.get("b") is not None
    assert store.get("c") is not None
    assert store.is_running("running")
    assert len(store) == 1
    store.close("running", keep=False)
    assert store.get("running") is None
    store.close("never opened")
