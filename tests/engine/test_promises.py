"""What scheduler, cost model and forecast promise together, over thousands of random traces on a fake clock.

Steps take what a formula says, with noise; nothing here runs a model.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from math import inf

import pytest

from headway.engine.cost import Shape
from headway.engine.messages import Submit
from headway.engine.sequence import Status
from tests.engine.world import Fate, World, truth

MANY = int(os.environ.get("HEADWAY_TRACES", "1"))
"""Continuous integration runs several times as many."""


def traces(count: int) -> range:
    return range(count * MANY)


Arrival = tuple[float, int, int]
"""Instant, tokens of the prompt, tokens of the answer."""


def arrivals(rng: random.Random, requests: int, rate: float) -> list[Arrival]:
    """Short prompts, now and then a long one, at random instants."""
    now, found = 0.0, []
    for _ in range(requests):
        now += rng.expovariate(rate)
        prompt = rng.randint(200, 1500) if rng.random() < 0.15 else rng.randint(4, 80)
        found.append((now, prompt, rng.randint(1, 60)))
    return found


def play(
    trace: list[Arrival], seed: int, *, ttft_s: float, upto: int | None = None, force: int | None = None
) -> tuple[World, list[Fate]]:
    """Run a trace; one of its requests may be forced in, and those after one left out."""
    world = World(seed=seed, max_running=8)
    begun = world.clock.now()
    fates = []
    for i, (instant, prompt, output) in enumerate(trace):
        world.run_until(begun + instant)
        fates.append(world.arrive(world.request(prompt, output, ttft_s=ttft_s, itl_s=0.1), force=i == force))
        if i == upto:
            break
    return world, fates


def test_accepted_requests_are_in_time_and_all_end() -> None:
    accepted = late = refused = 0
    for seed in traces(160):
        rng = random.Random(seed)
        world, fates = play(arrivals(rng, 25, rng.choice([1.0, 4.0, 16.0])), seed, ttft_s=rng.choice([0.6, 1.5]))
        world.run()
        taken = [fate for fate in fates if fate.refused_at is None]
        assert all(fate.ended_at is not None for fate in taken)
        assert world.engine.pool.counts().held == 0
        accepted += len(taken)
        refused += len(fates) - len(taken)
        late += sum(fate.late for fate in taken)
    assert accepted > 1200 * MANY
    assert refused > 400 * MANY  # the traces are heavy enough to need it
    assert late <= 0.05 * accepted


def test_refused_requests_would_have_been_late_or_made_others_late() -> None:
    needed = examined = 0
    for seed in traces(60):
        rng = random.Random(1000 + seed)
        trace = arrivals(rng, 16, 12.0)
        _, fates = play(trace, seed, ttft_s=0.6)
        refused = [i for i, fate in enumerate(fates) if fate.refused_at is not None]
        if not refused:
            continue
        i = rng.choice(refused)
        world, again = play(trace, seed, ttft_s=0.6, upto=i, force=i)
        world.run()
        examined += 1
        # Within what the forecast's own margin is for.
        slack = min(fate.submit.ttft_by - fate.first_at for fate in again if fate.first_at and fate.submit.ttft_by)
        needed += slack < 0.25 * 0.6
    assert examined > 30 * MANY
    assert needed >= 0.8 * examined


def test_retry_after_is_when_the_request_would_have_been_taken() -> None:
    ratios = []
    for seed in traces(120):
        rng = random.Random(2000 + seed)
        trace = arrivals(rng, 16, 12.0)
        _, fates = play(trace, seed, ttft_s=0.6)
        refused = [i for i, fate in enumerate(fates) if fate.refused_at is not None and fate.verdict.alone_s < 0.4]
        if not refused:
            continue
        i = rng.choice(refused)
        world, again = play(trace, seed, ttft_s=0.6, upto=i)
        fate = again[i]
        assert fate.refused_at is not None
        told = max(0.05, fate.verdict.retry_s)
        while world.clock.now() < fate.refused_at + 60:  # nobody else comes: when is there room?
            submit = world.request(len(fate.submit.token_ids), 10, ttft_s=0.6)
            if world.forecast.verdict(submit, world.clock.now()).late_by_s <= 0:
                break
            if not world.engine.has_work:
                world.clock.advance(0.01)
            else:
                world.step()
        ratios.append((world.clock.now() - fate.refused_at + 0.05) / (told + 0.05))
    assert len(ratios) > 30 * MANY
    within = sum(0.5 <= ratio <= 2.0 for ratio in ratios)
    assert within >= 0.8 * len(ratios)


def test_no_step_is_longer_than_its_streams_were_promised() -> None:
    checked = over = 0
    for seed in traces(100):
        rng = random.Random(3000 + seed)
        itl_s = rng.choice([0.03, 0.05, 0.1, 0.3])
        world = World(seed=seed, max_running=8)
        for _ in range(rng.randint(1, 4)):
            world.arrive(world.request(rng.randint(4, 40), 60, itl_s=itl_s))
        for _ in range(5):
            world.step()
        world.arrive(world.request(rng.randint(500, 3000), 2))
        for _ in range(40):
            running = [s for s in world.engine.scheduler.running if s.remaining == 1 and s.prefilled]
            decodes = truth(Shape().with_decodes(len(running), sum(len(s.tokens) for s in running)))
            began = world.clock.now()
            world.step()
            report = world.engine.take_status().steps
            if not running or not report:
                continue
            bound = max(min(itl_s, 0.1), 1.25 * decodes)
            assert report[0].predicted <= 1.1 * bound or report[0].prefill_tokens <= 1
            checked += 1
            over += world.clock.now() - began > 1.2 * bound
    assert checked > 1500 * MANY
    assert over <= 0.02 * checked


def test_what_matters_more_goes_first() -> None:
    """No step computes a less important prompt, the oldest one's share aside, while a more important one has more."""
    for seed in traces(100):
        rng = random.Random(4000 + seed)
        world = World(seed=seed, max_running=4, aging_s=1e6)
        scheduler = world.engine.scheduler
        pending = [(rng.randint(20, 600), rng.randint(1, 20), rng.randint(0, 2)) for _ in range(10)]
        while pending or world.engine.has_work:
            if pending and rng.random() < 0.3:
                prompt, output, priority = pending.pop()
                world.arrive(world.request(prompt, output, priority=priority))
            before = {s: s.computed for s in (*scheduler.running, *scheduler.waiting) if s.remaining > 1}
            oldest = min((s for s in scheduler.running if s.remaining > 1), key=lambda s: s.group.number, default=None)
            full = len(scheduler.running) >= scheduler.max_running
            world.step()
            full = full or len(scheduler.running) >= scheduler.max_running
            moved = {s for s, computed in before.items() if s.computed > computed or s.prefilled}
            for sequence in moved - {oldest}:
                for other in before.keys() - moved:
                    if other.status is Status.WAITING and full:
                        continue  # no place for it: places are not taken away for importance
                    assert other.group.submit.priority >= sequence.group.submit.priority


def test_nobody_starves_under_a_stream_of_more_important_requests() -> None:
    for seed in traces(10):
        world = World(seed=seed, max_running=2)
        low = world.arrive(world.request(40, 5, priority=3))
        rng = random.Random(seed)
        while low.first_at is None:
            world.arrive(world.request(rng.randint(10, 60), rng.randint(5, 20)))
            world.run_until(world.clock.now() + 0.1)
            assert world.clock.now() < 1000 + 60, "starved"
        assert low.first_at - (low.submit.arrived or 0) > 0


def test_a_late_request_steps_aside_once_and_is_served_then() -> None:
    world = World(max_running=1)
    first = world.arrive(world.request(4, 400, ttft_s=1.0))
    world.step()
    missed = world.arrive(world.request(40, 2, ttft_s=0.5), force=True)
    world.run_until(world.clock.now() + 0.7)  # its time is up, the place is still taken
    fresh = world.arrive(world.request(40, 2, ttft_s=0.25), force=True)
    world.run()
    assert first.ended_at is not None
    assert fresh.first_at is not None
    assert missed.first_at is not None
    assert missed.late


def test_tenants_that_both_wait_get_equal_tokens_whatever_they_send() -> None:
    for seed in traces(10):
        rng = random.Random(5000 + seed)
        world = World(seed=seed, max_running=4)
        for i in range(120):
            tenant = "big" if i % 11 else "small"
            world.arrive(world.request(rng.randint(20, 200), rng.randint(1, 30), tenant=tenant), force=True)
        small = [fate for fate in world.fates.values() if fate.submit.tenant == "small"]
        while any(fate.ended_at is None for fate in small):
            world.step()
        work: Counter[str] = Counter()
        for fate in world.fates.values():
            done = len(fate.submit.token_ids) if fate.first_at is not None else 0
            work[fate.submit.tenant] += done + len(fate.gaps)
        # A quantum, and what runs when the last one ends.
        assert work["big"] <= work["small"] + 2 * 64 + 5 * 230


def test_a_small_tenant_hardly_notices_a_big_one() -> None:
    def p95(big: bool) -> float:
        waits = []
        for seed in range(12):
            rng = random.Random(6000 + seed)
            world = World(seed=seed, max_running=8)
            begun = world.clock.now()
            events = [(0.5 * i + rng.random() * 0.2, "small") for i in range(30)]
            if big:
                events += [(0.05 * i + rng.random() * 0.02, "big") for i in range(300)]
            for instant, tenant in sorted(events):
                world.run_until(begun + instant)
                world.arrive(world.request(40, 10, tenant=tenant, ttft_s=2.0, itl_s=0.1))
            world.run()
            mine = [fate for fate in world.fates.values() if fate.submit.tenant == "small"]
            assert not any(fate.refused_at for fate in mine)
            waits += [fate.first_at - (fate.submit.ttft_by or 0) + 2.0 for fate in mine if fate.first_at is not None]
        return sorted(waits)[int(0.95 * len(waits))]

    assert p95(big=True) < 0.6  # a step in progress and its own: not the big one's queue of seconds
    assert p95(big=False) < 0.2


def test_streams_that_were_asked_for_are_not_slowed_beyond_it_by_more_streams() -> None:
    world = World(max_running=64)
    for _ in range(64):
        world.arrive(world.request(8, 80, itl_s=0.03, itl_asked=True), force=True)
    crowd = 0
    while world.engine.has_work:
        world.step()
        crowd = max(crowd, len(world.engine.scheduler.running))
    assert 4 <= crowd < 40
    gaps = sorted(gap for fate in world.fates.values() for gap in fate.gaps)
    assert gaps[int(0.99 * len(gaps))] < 0.036


def test_a_target_that_one_stream_alone_misses_keeps_nobody_out_forever() -> None:
    world = World()
    fates = [world.arrive(world.request(8, 10, itl_s=0.0001, itl_asked=True), force=True) for _ in range(5)]
    world.run()
    assert all(fate.ended_at is not None for fate in fates)


def test_work_whose_start_was_asked_for_is_never_begun_late() -> None:
    world = World(max_running=1)
    world.arrive(world.request(8, 300))
    world.step()
    asked: Submit = world.request(8, 5, ttft_s=0.2, start_by=world.clock.now() + 0.2)
    fate = world.arrive(asked, force=True)
    world.run()
    assert fate.refusal == "deadline_exceeded"
    assert fate.first_at is None


def test_the_forecast_of_an_idle_engine_is_the_prompt_alone() -> None:
    world = World()
    verdict = world.forecast.verdict(world.request(100, 10, ttft_s=5.0), world.clock.now())
    assert verdict.first_token_s == pytest.approx(verdict.alone_s, rel=0.5)
    assert verdict.late_by_s == 0.0
    assert world.forecast.wait_s() == 0.0


def test_no_target_is_never_refused() -> None:
    world = World(max_running=2)
    for _ in range(200):
        assert world.arrive(world.request(400, 10)).verdict.late_by_s in (0.0, -inf)


def test_case_long_blocks_short_never_on_the_clock() -> None:
    world = World(max_running=16)
    chats = [world.arrive(world.request(20, 200, itl_s=0.05)) for _ in range(8)]
    world.run_until(world.clock.now() + 0.5)
    for chat in chats:
        chat.gaps.clear()
    long = world.arrive(world.request(4000, 4, ttft_s=120.0))
    world.run_until(world.clock.now() + 0.2)
    short = world.arrive(world.request(5, 4, ttft_s=30.0))
    world.run()
    assert short.first_at is not None
    assert long.first_at is not None
    assert short.first_at < long.first_at
    gaps = sorted(gap for chat in chats for gap in chat.gaps)
    assert gaps[int(0.99 * len(gaps))] <= 0.06
