import time
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config import EngineConfig
from headway.engine.blocks import BlockPool
from headway.engine.cost import CostModel
from headway.engine.messages import Submit
from headway.engine.scheduler import Item, Scheduler
from headway.engine.sequence import Group, Sequence, Status
from headway.types import Params
from tests.engine.fake_runner import Bench, quick, submit


class Desk:
    """A scheduler with a pool, and steps without any device: a sampled token is always 1."""

    def __init__(
        self,
        *,
        n_blocks: int = 64,
        block_tokens: int = 4,
        step_tokens: int = 16,
        max_running: int = 8,
        aging_s: float = 5.0,
        prefix_cache: bool = False,
        cost: CostModel | None = None,
    ) -> None:
        config = EngineConfig(step_tokens=step_tokens, max_running=max_running, aging_s=aging_s)
        self.pool = BlockPool(n_blocks, block_tokens, prefix_cache)
        self.scheduler = Scheduler(config, self.pool, cost or quick())
        self.now = 100.0
        self.numbers = 0

    def add(self, prompt: int, max_tokens: int = 4, *, priority: int = 0, n: int = 1, start: int = 0) -> Group:
        self.numbers += 1
        group = Group(
            Submit(
                id=str(self.numbers),
                token_ids=tuple(range(start, start + prompt)),
                params=Params(n=n),
                priority=priority,
            ),
            number=self.numbers,
            received=self.now,
            seed=0,
            max_tokens=max_tokens,
            eos=frozenset(),
            salt=("", ""),
        )
        self.scheduler.add(group)
        return group

    def step(self) -> dict[Sequence, int]:
        items = self.scheduler.schedule(self.now)
        assert not self.scheduler.check_integrity()
        for item in items:
            self.done(item)
        assert not self.scheduler.check_integrity()
        return dict(items)

    def done(self, item: Item) -> None:
        sequence = item.sequence
        self.scheduler.computed(item)
        if sequence.remaining == 0:
            sequence.prefilled = self.now
            if sequence.append(1):
                self.scheduler.finish(sequence)

    def until_decoding(self, groups: Seq[Group]) -> None:
        for _ in range(100):
            if all(group.choices[0].prefilled for group in groups):
                return
            self.step()
        raise AssertionError("not reached")


def first(group: Group) -> Sequence:
    return group.choices[0]


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    desk = Desk()
    group = desk.add(40)
    assert [desk.step()[first(group)] for _ in range(4)] == [16, 16, 8, 1]


def test_decodes_go_first_and_prefill_takes_the_rest() -> None:
    desk = Desk()
    chats = [desk.add(2, 50) for _ in range(5)]
    desk.until_decoding(chats)
    long = desk.add(100)
    step = desk.step()
    assert [step[first(chat)] for chat in chats] == [1] * 5
    assert step[first(long)] == 11


def test_several_prompts_share_a_step() -> None:
    desk = Desk()
    groups = [desk.add(5) for _ in range(3)]
    assert [desk.step()[first(group)] for group in groups[:1]] == [5]
    assert all(first(group).prefilled for group in groups)


def test_a_short_prompt_overtakes_a_long_one_that_still_moves() -> None:
    desk = Desk()
    long = desk.add(100)
    desk.step()
    shorts = [desk.add(12) for _ in range(2)]
    step = desk.step()
    assert step[first(shorts[0])] == 12
    assert step[first(long)] == 4  # a quarter of the budget


def test_the_oldest_prefill_gets_its_share_under_a_stream_of_short_ones() -> None:
    desk = Desk(max_running=4)
    long = desk.add(60, 1)
    for steps in range(40):  # noqa: B007
        desk.step()
        if first(long).status is Status.FINISHED:
            break
        desk.add(16, 1)
    assert 8 <= steps <= 15


def test_priority_comes_before_length() -> None:
    desk = Desk(max_running=1)
    low, high = desk.add(2, 1, priority=1), desk.add(9, 1, priority=0)
    desk.step()
    assert (first(high).status, first(low).status) == (Status.FINISHED, Status.WAITING)


def test_waiting_raises_a_level_so_that_nobody_starves() -> None:
    desk = Desk(max_running=1)
    low = desk.add(4, 1, priority=2)
    for steps in range(40):  # noqa: B007
        desk.add(4, 1, priority=0)
        desk.step()
        desk.now += 1.0
        if first(low).status is Status.FINISHED:
            break
    assert 9 <= steps <= 16


def test_max_running_is_kept_and_never_above_the_budget() -> None:
    desk = Desk(max_running=3)
    for _ in range(5):
        desk.add(2, 9)
    desk.step()
    assert len(desk.scheduler.running) == 3
    assert Desk(max_running=50, step_tokens=7).scheduler.max_running == 7


def test_admission_leaves_blocks_for_those_that_run() -> None:
    desk = Desk(n_blocks=8)
    desk.add(4, 20)
    desk.step()
    second = desk.add(20, 4)  # 5 of 7 blocks, but 1 for each running one and 1 for its own growth stay over
    third = desk.add(4 * 4, 4)
    desk.step()
    assert first(third).status is Status.RUNNING
    assert first(second).status is Status.WAITING


def test_the_head_of_the_queue_is_not_overtaken_for_want_of_blocks() -> None:
    desk = Desk(n_blocks=8)
    desk.add(4, 20)
    desk.step()
    big = desk.add(24, 4, priority=0)
    small = desk.add(4, 4, priority=1)
    desk.step()
    assert (first(big).status, first(small).status) == (Status.WAITING, Status.WAITING)


def test_the_latest_of_the_lowest_priority_is_preempted_and_returns_first() -> None:
    desk = Desk(n_blocks=10, max_running=4)
    one, two, low = desk.add(7, 20), desk.add(7, 20), desk.add(7, 9, priority=3)
    desk.until_decoding([one, two, low])
    while not desk.scheduler.preemptions:
        desk.step()
    assert first(low).preempted
    assert (first(one).status, first(two).status) == (Status.RUNNING, Status.RUNNING)
    fresh = desk.add(2, 1, priority=3)
    important = desk.add(2, 1, priority=0)
    while first(low).preempted:
        assert first(fresh).status is Status.WAITING
        desk.step()
    assert first(important).status is Status.FINISHED


def test_the_requester_is_the_victim_when_all_others_matter_more() -> None:
    desk = Desk(n_blocks=6, max_running=4)
    groups = [desk.add(8, 8, priority=p) for p in (0, 0, 1)]
    desk.until_decoding(groups[:2])
    while any(group.live() for group in groups):
        desk.step()
    assert first(groups[0]).preemptions == 0


def test_siblings_take_the_prompts_blocks_and_compute_the_rest_only() -> None:
    desk = Desk()
    group = desk.add(11, 9, n=3)
    desk.step()
    assert desk.scheduler.held_back == 0
    second = group.choices[1]
    assert second.table == first(group).table[:2]
    step = desk.step()
    assert [step[choice] for choice in group.choices] == [1, 3, 3]
    assert desk.pool.counts().held == 2 + 3
    assert desk.scheduler.hit_tokens == 0


def test_siblings_that_wait_give_blocks_back_before_anybody_is_preempted() -> None:
    desk = Desk(n_blocks=5, max_running=1)
    group = desk.add(9, 11, n=2)
    while group.live():
        desk.step()
    assert desk.scheduler.preemptions == 0
    assert desk.pool.counts().free == 5


def with_a_waiting_sibling(desk: Desk) -> Sequence:
    """A sequence that waits and holds 2 blocks of the prompt that its sibling computed."""
    group = desk.add(9, 1, n=2, priority=1)
    desk.step()
    assert desk.pool.counts().held == 2
    return group.choices[1]


def test_a_decode_gets_the_blocks_of_a_waiting_sibling() -> None:
    desk = Desk(n_blocks=5, max_running=1)
    sibling = with_a_waiting_sibling(desk)
    important = desk.add(4, 16)
    desk.until_decoding([important])
    while first(important).status is Status.RUNNING:
        desk.step()
    assert desk.scheduler.preemptions == 0
    while sibling.status is not Status.FINISHED:
        desk.step()


def test_an_admission_gets_the_blocks_of_a_waiting_sibling_when_nothing_runs() -> None:
    desk = Desk(n_blocks=5, max_running=1)
    with_a_waiting_sibling(desk)
    important = desk.add(17, 1)
    desk.until_decoding([important])


def test_a_preempted_sequence_returns_before_one_that_has_waited_longer() -> None:
    desk = Desk(max_running=2)
    desk.add(4, 50)
    back = desk.add(4, 50)
    desk.step()
    desk.now -= 30.0
    waited = desk.add(4, 50)
    desk.now += 30.0
    desk.scheduler._preempt(first(back))
    desk.step()
    assert (first(back).status, first(waited).status) == (Status.RUNNING, Status.WAITING)


def test_preempted_sequences_return_in_order_of_importance() -> None:
    desk = Desk(max_running=2)
    one, two = desk.add(4, 50), desk.add(20, 50)
    desk.until_decoding([one, two])
    three = desk.add(4, 50)
    for group in (two, one):
        desk.scheduler._preempt(first(group))
    desk.step()
    assert first(one).status is Status.RUNNING
    desk.step()
    assert (first(two).status, first(three).status) == (Status.RUNNING, Status.WAITING)


def test_a_sibling_inherits_the_prompt_when_the_first_is_ended() -> None:
    desk = Desk()
    group = desk.add(40, 2, n=3)
    desk.step()
    desk.scheduler.finish(first(group))
    assert desk.pool.counts().held == 0
    while group.live():
        desk.step()
    assert all(choice.n_output == 2 for choice in group.choices[1:])


def test_finish_twice_is_harmless() -> None:
    desk = Desk()
    group = desk.add(40, 2)
    desk.step()
    desk.scheduler.finish(first(group))
    desk.scheduler.finish(first(group))
    assert desk.pool.counts().free == 64


def test_a_step_of_256_running_sequences_is_planned_in_a_millisecond_or_two() -> None:
    desk = Desk(n_blocks=8192, block_tokens=32, step_tokens=512, max_running=256, prefix_cache=True)
    groups = [desk.add(20, 5000, start=1000 * i) for i in range(256)]
    desk.until_decoding(groups)
    for i in range(744):
        desk.add(20, 5000, start=400_000 + 1000 * i)
    times = []
    for _ in range(40):
        start = time.thread_time()
        items = desk.scheduler.schedule(desk.now)
        times.append(time.thread_time() - start)
        for item in items:
            desk.done(item)
    assert sorted(times)[20] < 0.002


Trace = list[tuple[float, int, int, int, int, int]]


@settings(max_examples=150, deadline=None)
@given(
    trace=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0, 0.1, 1.0]),  # time since the last arrival
            st.integers(1, 30),  # prompt
            st.integers(1, 14),  # output
            st.integers(0, 2),  # priority
            st.sampled_from([1, 1, 1, 3]),  # choices
            st.integers(0, 30),  # cancelled after so many steps; most never
        ),
        min_size=1,
        max_size=14,
    ),
    n_blocks=st.integers(11, 30),
    step_tokens=st.sampled_from([1, 3, 8, 64]),
    prefix_cache=st.booleans(),
)
def test_any_trace_ends_everything_once_and_gives_all_blocks_back(
    trace: Trace, n_blocks: int, step_tokens: int, prefix_cache: bool
) -> None:
    bench = Bench(
        n_blocks=n_blocks, step_tokens=step_tokens, max_running=5, prefix_cache=prefix_cache, context_tokens=64
    )
    cancel_at: dict[int, list[str]] = {}
    expected: dict[tuple[str, int], list[int]] = {}
    prompts = [tuple((7 * i + 3 * p) % 60 + 1 for p in range(t[1])) for i, t in enumerate(trace)]
    for i, (gap, _, output, priority, n, cancel) in enumerate(trace):
        bench.run_for(gap)
        request = submit(
            str(i),
            prompts[i],
            max_tokens=output,
            priority=priority,
            n=n,
            temperature=float(i % 2),
            seed=i,
            presence_penalty=0.5 * (i % 3),
            ignore_eos=True,
        )
        bench.engine.submit(request)
        if cancel < 8:
            cancel_at.setdefault(bench.engine.steps + cancel, []).append(str(i))
        else:
            expected |= {(str(i), c): bench.expected(request, c) for c in range(n)}
    bench.run(cancel_at=cancel_at)
    sequences = sum(t[4] for t in trace)
    tokens = sum((t[1] + t[2]) * t[4] for t in trace)
    for key, answer in expected.items():
        assert bench.tokens[key] == answer
        assert bench.ends[key] == 1
    assert all(count == 1 for count in bench.ends.values())
    assert bench.engine.pool.counts().held == 0
    assert not bench.engine.load().integrity
    # Nobody is preempted twice between two ends of sequences.
    assert bench.engine.scheduler.preemptions <= (sequences + 1) * 5
    assert all(sum(len(w.token_ids) for w in step) <= step_tokens for step in bench.runner.steps)
    assert len(bench.runner.steps) <= 3 * tokens + 10


@pytest.mark.parametrize("step_tokens", [1, 2, 5])
def test_a_tiny_budget_still_moves_everybody(step_tokens: int) -> None:
    desk = Desk(step_tokens=step_tokens)
    groups = [desk.add(9, 3) for _ in range(6)]
    for _ in range(100):
        desk.step()
    assert not any(group.live() for group in groups)
