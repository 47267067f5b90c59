"""Arrivals, open and closed loops, and that a slow server cannot make the generator look away."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headway.bench.ask import Planned, Target
from headway.bench.load import (
    ClosedLoop,
    LoadResult,
    OpenLoop,
    Plan,
    Progress,
    at_times,
    constant,
    merge,
    poisson,
    replay,
    run_load,
    synthetic,
)
from headway.bench.prompts import Prompts
from headway.bench.summary import summarise
from headway.bench.trace import TraceRow
from headway.errors import InvalidRequest
from tests.bench.fake_server import FakeServer, Script, serving

QUICK = Script(ttft_s=0.01, itl_s=0.002)


def loaded(script: Any, plan: Plan, **options: Any) -> tuple[LoadResult, FakeServer]:
    async def run() -> tuple[LoadResult, FakeServer]:
        async with serving(script) as server:
            target = Target(url=server.url, model="m", timeout_s=options.pop("timeout_s", 5.0))
            return await run_load(plan, target, **options), server

    return asyncio.run(run())


def requests(count: int | None = None, **fields: Any) -> Any:
    endless = itertools.repeat(Planned(prompt="hello", output_tokens=3, **fields))
    return endless if count is None else itertools.islice(endless, count)


def test_poisson_arrivals_have_the_mean_rate_and_repeat_by_seed() -> None:
    times = list(itertools.islice(poisson(50.0, seed=4), 20_000))
    assert times == sorted(times)
    assert 20_000 / times[-1] == pytest.approx(50.0, rel=0.03)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05)  # as of an exponential, and no other common one
    assert times[:50] == list(itertools.islice(poisson(50.0, seed=4), 50))
    assert times[:50] != list(itertools.islice(poisson(50.0, seed=5), 50))


def test_constant_arrivals_are_even() -> None:
    assert list(itertools.islice(constant(4.0), 4)) == [0.0, 0.25, 0.5, 0.75]


def test_an_open_loop_does_not_slow_down_with_the_server() -> None:
    slow = Script(ttft_s=0.6, itl_s=0.0)
    result, server = loaded(slow, OpenLoop(requests=at_times(requests(), constant(50.0))), duration_s=0.5)
    assert len(result.counted) == 25
    assert server.most_running == 25  # all of them waited at once
    assert [record.scheduled_s for record in sorted(result.counted, key=lambda one: one.scheduled_s)] == pytest.approx(
        [index / 50 for index in range(25)]
    )
    assert max(record.sent_s for record in result.records) < 0.6
    assert result.seconds >= 1.0


def test_a_generator_that_is_late_cannot_hide_it() -> None:
    def script(number: int, body: dict[str, Any]) -> Script:
        if number == 0:
            time.sleep(0.2)  # the loop is the client's too: whatever is due meanwhile goes out late
        return QUICK

    result, _ = loaded(script, OpenLoop(requests=at_times(requests(10), constant(100.0))))
    late = max(result.counted, key=lambda record: record.lag_s)
    assert late.lag_s > 0.1
    assert late.ttft_s is not None
    assert late.ttft_s > late.lag_s
    assert max(result.loop_lag_s) > 0.1
    lag = summarise(result.counted).lag_ms["max"]
    assert lag is not None
    assert lag > 100


def test_a_burst_is_cut_at_the_most_and_goes_out_one_by_one() -> None:
    made: list[float] = []

    def burst() -> Iterator[Planned]:
        for _ in range(30):
            made.append(time.monotonic())
            yield Planned(prompt="x", output_tokens=1)

    result, server = loaded(QUICK, OpenLoop(requests=burst()), most_requests=12)
    assert len(server.bodies) == len(result.counted) == 12
    first_sent = min(record.sent_s for record in result.records) + result.started
    assert first_sent < made[5]  # it did not wait until all were made


def test_a_closed_loop_keeps_exactly_so_many_in_flight() -> None:
    result, server = loaded(QUICK, ClosedLoop(requests=requests(), concurrency=3), most_requests=20)
    assert len(result.counted) == 20
    assert server.most_running == 3
    assert {record.outcome for record in result.records} == {"completed"}
    ends = [(record.sent_s, 1) for record in result.records] + [(record.done_s, -1) for record in result.records]
    running = list(itertools.accumulate(step for _, step in sorted(ends)))
    assert max(running) == 3


def test_what_is_in_flight_at_the_end_is_waited_for_and_counted() -> None:
    result, _ = loaded(Script(ttft_s=0.4, itl_s=0.0), ClosedLoop(requests=requests(), concurrency=2), duration_s=0.2)
    assert [record.outcome for record in result.counted] == ["completed"] * 2
    assert result.seconds >= 0.4


def test_the_warm_up_does_not_count() -> None:
    plan = OpenLoop(requests=at_times(requests(), constant(50.0)))
    result, server = loaded(QUICK, plan, warmup_s=0.2, duration_s=0.2)
    assert len(server.bodies) == len(result.records) == 20
    assert len(result.counted) == 10
    assert all(record.scheduled_s >= 0.2 for record in result.counted)
    assert 0.2 <= result.seconds < 0.5
    assert summarise(result.records).requests == 10


def test_a_dead_server_is_not_hammered() -> None:
    result, server = loaded(
        Script(status=503, retry_after="1"), ClosedLoop(requests=requests(), concurrency=2), duration_s=0.35
    )
    assert {record.outcome for record in result.records} == {"refused"}
    assert 4 <= len(server.bodies) <= 10


def test_one_run_mixes_kinds_and_summarises_each() -> None:
    def script(number: int, body: dict[str, Any]) -> Script:
        return Script(ttft_s=0.15, itl_s=0.0) if body.get("kind") == "slow" else Script(ttft_s=0.01, itl_s=0.0)

    slow = at_times(requests(5, tag="slow", body={"kind": "slow"}, headers={"x-kind": "slow"}), constant(20.0))
    quick = at_times(requests(10, tag="quick"), constant(40.0))
    result, server = loaded(script, OpenLoop(requests=merge(slow, quick)))
    assert (len(result.tagged("slow")), len(result.tagged("quick"))) == (5, 10)
    assert sum(headers.get("x-kind") == "slow" for headers in server.headers) == 5
    slow_ms, quick_ms = (summarise(result.tagged(tag)).ttft_ms.p50 for tag in ("slow", "quick"))
    assert slow_ms is not None
    assert quick_ms is not None
    assert slow_ms >= 149
    assert quick_ms < slow_ms


def test_a_trace_is_replayed_at_its_times() -> None:
    rows = [
        TraceRow(at_s=at, input_tokens=600, output_tokens=2, hash_ids=(1, index)) for index, at in enumerate([0, 0.1])
    ]
    result, server = loaded(QUICK, OpenLoop(requests=replay(rows, Prompts(0))))
    assert [record.scheduled_s for record in result.records] == [0, 0.1]
    assert [body["max_tokens"] for body in server.bodies] == [2, 2]
    first, second = (body["messages"][0]["content"].split() for body in server.bodies)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


def test_synthetic_requests_have_the_asked_lengths() -> None:
    made = list(itertools.islice(synthetic(Prompts(1), input_tokens=(5, 9), output_tokens=(2, 3), seed=1), 60))
    assert {len(str(planned.prompt).split()) for planned in made} == {5, 6, 7, 8, 9}
    assert {planned.output_tokens for planned in made} == {2, 3}
    assert len({str(planned.prompt) for planned in made}) == 60


def test_progress_is_told() -> None:
    seen: list[Progress] = []
    loaded(QUICK, ClosedLoop(requests=requests(), concurrency=1), duration_s=0.7, on_progress=seen.append)
    assert seen
    assert seen[-1].sent >= seen[-1].completed > 0


def test_a_request_that_cannot_be_made_raises_as_itself() -> None:
    planned = Planned(prompt="x", output_tokens=1, headers={"a": "b\nc"})
    for plan in (OpenLoop(requests=[planned]), ClosedLoop(requests=[planned], concurrency=1)):
        with pytest.raises(InvalidRequest, match="line break"):
            loaded(QUICK, plan)
