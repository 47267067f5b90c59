import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from headway.engine.messages import Abort, AbortWaiting, Emitted, Refused
from headway.engine.work import Work
from headway.types import Finish
from tests.engine.fake_runner import EOS, Bench, FakeRunner, submit

LONG = tuple(i % 60 + 1 for i in range(40))


def test_greedy_tokens_are_the_models() -> None:
    bench = Bench()
    for i in range(6):
        bench.engine.submit(submit(str(i), LONG[: 1 + 7 * i], ignore_eos=True))
    bench.run()
    for i in range(6):
        assert bench.tokens[str(i), 0] == bench.runner.greedy(LONG[: 1 + 7 * i], 8)
        assert bench.last[str(i), 0].finish is Finish.LENGTH
    assert bench.held() == 0


@pytest.mark.parametrize("step_tokens", [1, 3, 7, 64])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_chunk_size_changes_no_token(step_tokens: int, prefix_cache: bool) -> None:
    bench = Bench(step_tokens=step_tokens, prefix_cache=prefix_cache)
    for i in range(5):
        bench.engine.submit(submit(str(i), LONG[i:], seed=4, temperature=1.0, ignore_eos=True))
    bench.run()
    for i in range(5):
        alone = Bench(step_tokens=64).answer(submit("a", LONG[i:], seed=4, temperature=1.0, ignore_eos=True))
        assert bench.tokens[str(i), 0] == alone


def test_cancel_queued_requests_never_run() -> None:
    bench = Bench(max_running=1)
    bench.engine.submit(submit("long", LONG, max_tokens=60, ignore_eos=True))
    bench.steps(4)
    for i in range(100):
        bench.engine.submit(submit(str(i), LONG[:5], max_tokens=2))
    bench.step()
    assert bench.engine.load().waiting == 100
    for i in range(90):
        bench.engine.abort(Abort(id=str(i)))
    assert bench.engine.load().waiting == 10
    freed = bench.engine.take_status().freed
    assert [entry[:2] for entry in freed] == [("queued", "disconnect")] * 90
    bench.run()
    assert {request_id for request_id, _ in bench.tokens} == {"long", *(str(i) for i in range(90, 100))}
    assert bench.held() == 0
    assert not bench.engine.sampler._histories


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_cancel_prefix_of_a_neighbour_in_mid_prefill_changes_no_token(steps: int) -> None:
    bench = Bench()
    bench.engine.submit(submit("first", LONG + LONG, ignore_eos=True))
    bench.steps(steps)  # 16 tokens each
    bench.engine.submit(submit("second", (*LONG[:30], 7, 8), ignore_eos=True))
    bench.step()
    bench.engine.abort(Abort(id="first"))
    for i in range(3):  # others take whatever was freed
        bench.engine.submit(submit(f"other{i}", LONG[i + 3 :], ignore_eos=True))
    bench.run()
    assert bench.tokens["second", 0] == bench.runner.greedy((*LONG[:30], 7, 8), 8)
    assert bench.timing("second").cached_tokens == min(16 * steps, 28)
    assert bench.held() == 0


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 39])
def test_prefix_exact_block_boundaries(length: int) -> None:
    bench = Bench()
    for i, size in enumerate((length, length, length + 1, length - 1)):
        answer = bench.answer(submit(str(i), LONG[:size], ignore_eos=True))
        assert answer == bench.runner.greedy(LONG[:size], 8)
        if i == 1:
            assert bench.timing("1").cached_tokens == (length - 1) // 4 * 4
    computed = Counter(w.start + k for step in bench.runner.steps for w in step for k in range(len(w.token_ids)))
    assert computed[length - 2] >= 1
    load = bench.engine.load()
    assert load.prefix_hit_tokens + load.prefix_miss_tokens == 4 * length
    assert not load.integrity


def test_prefix_exact_also_reuses_generated_tokens() -> None:
    bench = Bench()
    answer = bench.answer(submit("a", LONG[:10], ignore_eos=True))
    turn = (*LONG[:10], *answer, 5, 6)
    assert bench.answer(submit("b", turn, ignore_eos=True)) == bench.runner.greedy(turn, 8)
    assert bench.timing("b").cached_tokens == 16


def test_prefix_tenants_share_nothing() -> None:
    bench = Bench()
    answers = [bench.answer(submit(name, LONG, tenant=name, ignore_eos=True)) for name in ("a", "b")]
    assert answers[0] == answers[1]
    assert bench.timing("b").cached_tokens == 0
    steps = [bench.timing(name).steps for name in ("a", "b")]
    assert steps[0] == steps[1]
    bench.answer(submit("again", LONG, tenant="a", ignore_eos=True))
    assert bench.timing("again").cached_tokens == 36


def test_prefix_salt_model_is_part_of_the_key() -> None:
    bench = Bench(model_salt="adapter-1")
    bench.answer(submit("a", LONG))
    bench.engine.model_salt = "adapter-2"
    bench.answer(submit("b", LONG))
    assert bench.timing("b").cached_tokens == 0


def test_long_blocks_short_not() -> None:
    bench = Bench(n_blocks=1200, step_tokens=256, max_running=64, context_tokens=4100)
    for i in range(8):
        bench.engine.submit(submit(f"chat{i}", (i + 1, 2, 3), max_tokens=60, ignore_eos=True))
    bench.steps(3)
    long = tuple(i % 60 + 1 for i in range(4000))
    bench.engine.submit(submit("long", long, max_tokens=2))
    bench.steps(2)
    bench.engine.submit(submit("short", (9, 9, 8, 9, 9), max_tokens=2, ignore_eos=True))
    before = len(bench.runner.steps)
    bench.run()
    assert bench.first_at["short"] == before + 1
    assert bench.first_at["short"] < bench.first_at["long"] <= before + 17
    # The chats got one token in each step, and no step was longer than the budget.
    assert bench.last["chat0", 0].timing is not None
    assert bench.timing("chat0").steps == 60
    assert max(sum(len(w.token_ids) for w in step) for step in bench.runner.steps) <= 256
    assert bench.tokens["short", 0] == bench.runner.greedy((9, 9, 8, 9, 9), 2)


def test_never_fits_is_refused_at_once_with_both_numbers() -> None:
    bench = Bench(n_blocks=20, context_tokens=100)
    bench.engine.submit(submit("fits", LONG[:5]))
    bench.engine.submit(submit("kv", LONG, max_tokens=41))
    bench.engine.submit(submit("context", LONG, max_tokens=61))
    bench.step()
    assert bench.refused["kv"].code == "exceeds_kv_capacity"
    assert "81 tokens" in bench.refused["kv"].message
    assert "holds 80" in bench.refused["kv"].message
    assert bench.refused["context"].code == "context_length_exceeded"
    assert "101 tokens" in bench.refused["context"].message
    assert "holds 100" in bench.refused["context"].message
    bench.run()
    assert bench.last["fits", 0].finish is not None
    assert bench.answer(submit("exactly", LONG, max_tokens=40, ignore_eos=True)) == bench.runner.greedy(LONG, 40)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempt_cycle_ends_and_costs_little(prefix_cache: bool) -> None:
    # 3 sequences of 60 tokens fill the 45 blocks; 6 of them run.
    bench = Bench(n_blocks=45, step_tokens=64, prefix_cache=prefix_cache)
    for i in range(6):
        bench.engine.submit(submit(str(i), LONG[i : i + 8], max_tokens=52, ignore_eos=True))
    bench.run()
    for i in range(6):
        assert bench.tokens[str(i), 0] == bench.runner.greedy(LONG[i : i + 8], 52)
    load = bench.engine.load()
    assert 1 <= load.preemptions <= 6
    assert sum(bench.timing(str(i)).preemptions for i in range(6)) == load.preemptions
    assert bench.timing("0").preemptions == 0
    # Three at a time, one batch after the other, would take 2 * 53 steps.
    assert load.steps <= 2 * 53 + 5
    assert not load.integrity


def test_seed_neighbours_change_no_token() -> None:
    alone = Bench().answer(submit("me", LONG[:9], temperature=1.0, seed=7, ignore_eos=True))
    bench = Bench(n_blocks=200, max_running=16)
    for i in range(15):
        bench.engine.submit(submit(str(i), LONG[: 3 + i], temperature=1.0, seed=100 + i, ignore_eos=True))
    assert bench.answer(submit("me", LONG[:9], temperature=1.0, seed=7, ignore_eos=True)) == alone
    assert Bench().answer(submit("me", LONG[:9], temperature=1.0, seed=8, ignore_eos=True)) != alone


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_seed_neighbours_any_seed_repeats(seed: int) -> None:
    answers = {
        tuple(Bench().answer(submit("me", LONG[:9], temperature=1.5, seed=seed, ignore_eos=True))) for _ in range(3)
    }
    assert len(answers) == 1


def test_seed_neighbours_without_a_seed_answers_differ() -> None:
    answers = {tuple(Bench().answer(submit("me", LONG[:9], temperature=1.5, ignore_eos=True))) for _ in range(4)}
    assert len(answers) == 4


def test_temp_zero_topk_is_greedy() -> None:
    plain = Bench().answer(submit("a", LONG, ignore_eos=True))
    for params in ({"top_k": 1}, {"top_p": 0.0001}, {"min_p": 0.99}, {"top_k": 1, "top_p": 0.0001, "min_p": 0.99}):
        assert Bench().answer(submit("a", LONG, ignore_eos=True, **params)) == plain


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.8])
def test_logprobs_order_is_that_of_the_raw_model(repetition_penalty: float) -> None:
    bench = Bench()
    request = submit("a", LONG, logprobs=5, repetition_penalty=repetition_penalty, logit_bias={3: 4.0}, ignore_eos=True)
    bench.engine.submit(submit("neighbour", LONG[:9], max_tokens=50, prompt_logprobs=1, ignore_eos=True))
    answer = bench.answer(request)
    assert answer == bench.expected(request)
    context = list(LONG)
    details = [detail for message in bench.said if isinstance(message, Emitted) for detail in message.logprobs]
    assert [detail.token_id for detail in details] == answer
    for detail in details:
        logits = bench.runner.logits_of(context).astype(np.float64)
        expected = logits - math.log(np.exp(logits).sum())
        assert detail.logprob == pytest.approx(expected[detail.token_id], abs=1e-5)
        assert [i for i, _ in detail.top] == np.argsort(-expected, kind="stable")[:5].tolist()
        assert [v for _, v in detail.top] == pytest.approx(np.sort(expected)[::-1][:5], abs=1e-5)
        context.append(detail.token_id)


@pytest.mark.parametrize("step_tokens", [3, 16, 64])
def test_prompt_logprobs_are_complete_in_spite_of_chunks_and_cache(step_tokens: int) -> None:
    bench = Bench(step_tokens=step_tokens)
    bench.answer(submit("warm", LONG))
    bench.engine.submit(submit("neighbour", LONG[3:9], max_tokens=50, ignore_eos=True))
    bench.answer(submit("a", LONG, prompt_logprobs=2, n=2))
    said = [m for m in bench.said if isinstance(m, Emitted) and m.id == "a"]
    found = said[0].prompt_logprobs
    assert not any(message.prompt_logprobs for message in said[1:]), "they are told once for all choices"
    assert len(found) == len(LONG)
    assert found[0] is None
    for position, detail in enumerate(found[1:], 1):
        logits = bench.runner.logits_of(LONG[:position]).astype(np.float64)
        assert detail is not None
        assert detail.token_id == LONG[position]
        assert detail.logprob == pytest.approx(logits[LONG[position]] - math.log(np.exp(logits).sum()), abs=1e-5)
        assert len(detail.top) == 2
    assert bench.timing("a").cached_tokens == 0


def test_prompt_logprobs_are_complete_after_preemption() -> None:
    bench = Bench()
    bench.engine.submit(submit("a", LONG, prompt_logprobs=0))
    bench.steps(2)
    bench.engine.scheduler._preempt(bench.engine.scheduler.running[0])
    bench.run()
    (found,) = [m.prompt_logprobs for m in bench.said if isinstance(m, Emitted) and m.prompt_logprobs]
    assert [detail.token_id for detail in found if detail is not None] == list(LONG[1:])


def test_a_preempted_request_counts_its_prompt_once_and_keeps_its_cached_tokens() -> None:
    bench = Bench()
    bench.engine.submit(submit("a", LONG, ignore_eos=True))
    bench.steps(4)
    bench.engine.scheduler._preempt(bench.engine.scheduler.running[0])
    bench.run()
    load = bench.engine.load()
    assert (load.prefix_hit_tokens, load.prefix_miss_tokens) == (0, len(LONG))
    assert (bench.timing("a").cached_tokens, bench.timing("a").preemptions) == (0, 1)


def test_prompt_logprobs_of_one_token() -> None:
    bench = Bench()
    bench.answer(submit("a", (5,), prompt_logprobs=0, max_tokens=1))
    assert bench.last["a", 0].prompt_logprobs == (None,)


def ending_prompt(runner: FakeRunner, length: int) -> tuple[int, ...]:
    """A prompt whose greedy answer has EOS for the first time as its ``length``-th token."""
    for start in range(3000):
        prompt = (start % 60 + 1, start // 60 + 1, 9)
        answer = runner.greedy(prompt, length)
        if EOS in answer and answer.index(EOS) == length - 1:
            return prompt
    raise AssertionError("no such prompt")


def test_stream_finish_length_and_stop() -> None:
    bench = Bench()
    bench.answer(submit("one", LONG, max_tokens=1, ignore_eos=True))
    assert bench.last["one", 0].finish is Finish.LENGTH
    assert not bench.last["one", 0].ended_by_token
    prompt = ending_prompt(bench.runner, 4)
    answer = bench.answer(submit("exact", prompt, max_tokens=4))
    assert answer[-1] == EOS
    last = bench.last["exact", 0]
    assert (last.finish, last.ended_by_token, last.stop_reason) == (Finish.STOP, True, None)
    assert len(bench.answer(submit("ignored", prompt, max_tokens=6, ignore_eos=True))) == 6
    longer = bench.answer(submit("later", prompt, max_tokens=12, min_tokens=5))
    assert EOS not in longer[:5]


def test_stop_token_ids_end_with_their_id_as_the_reason() -> None:
    bench = Bench()
    third = bench.runner.greedy(LONG, 3)[2]
    answer = bench.answer(submit("a", LONG, stop_token_ids=(third,), ignore_eos=True))
    assert answer[-1] == third
    last = bench.last["a", 0]
    assert (last.finish, last.stop_reason, last.ended_by_token) == (Finish.STOP, third, True)


def test_no_tokens_asked_for_ends_after_the_prompt() -> None:
    bench = Bench()
    assert bench.answer(submit("a", LONG, max_tokens=0, prompt_logprobs=0)) == []
    assert bench.last["a", 0].finish is Finish.LENGTH
    assert len(bench.last["a", 0].prompt_logprobs) == len(LONG)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_n_choices_share_the_prompt_and_differ_by_seed(prefix_cache: bool) -> None:
    bench = Bench(prefix_cache=prefix_cache, step_tokens=64)
    bench.answer(submit("a", LONG, n=4, temperature=1.0, seed=3, ignore_eos=True))
    answers = [tuple(bench.tokens["a", index]) for index in range(4)]
    assert len(set(answers)) == 4
    assert sum(len(w.token_ids) for step in bench.runner.steps for w in step) == 40 + 3 * 4 + 4 * 7
    assert bench.timing("a").cached_tokens == 0
    again = Bench(prefix_cache=False, step_tokens=5, n_blocks=16)  # little room: choices run one after the other
    again.answer(submit("a", LONG, n=4, temperature=1.0, seed=3, ignore_eos=True))
    assert [tuple(again.tokens["a", index]) for index in range(4)] == answers


def test_one_choice_may_be_stopped_alone() -> None:
    bench = Bench()
    bench.engine.submit(submit("a", LONG[:5], n=2, ignore_eos=True))
    bench.steps(3)
    bench.engine.abort(Abort(id="a", index=0, cause="stop"))
    bench.run()
    assert len(bench.tokens["a", 1]) == 8
    assert len(bench.tokens["a", 0]) < 8
    assert not bench.engine.take_status().freed  # a normal end
    assert bench.held() == 0


@pytest.mark.parametrize(("steps", "phase"), [(0, "queued"), (1, "prefill"), (4, "decode")])
def test_an_abort_frees_at_once_from_any_phase(steps: int, phase: str) -> None:
    bench = Bench()
    bench.engine.submit(submit("a", LONG, ignore_eos=True, presence_penalty=1.0))
    bench.steps(steps)
    since = bench.clock.now()
    bench.clock.advance(0.25)
    bench.engine.abort(Abort(id="a", since=since))
    bench.engine.abort(Abort(id="a"))
    bench.engine.abort(Abort(id="unknown"))
    assert bench.held() == 0
    assert not bench.engine.has_work
    assert not bench.engine.sampler._histories
    ((freed_phase, cause, seconds),) = bench.engine.take_status().freed
    assert (freed_phase, cause) == (phase, "disconnect")
    assert seconds == pytest.approx(0.25)
    assert bench.engine.take_status().freed == ()


def test_abort_waiting_refuses_what_has_not_started() -> None:
    bench = Bench(max_running=1)
    for i in range(3):
        bench.engine.submit(submit(str(i), LONG[:5], ignore_eos=True))
    bench.step()
    bench.engine.abort_waiting(AbortWaiting())
    bench.run()
    assert set(bench.refused) == {"1", "2"}
    assert bench.refused["1"].code == "server_is_overloaded"
    assert len(bench.tokens["0", 0]) == 8


def test_a_deadline_ends_waiting_and_running_requests_differently() -> None:
    bench = Bench(max_running=1)
    start = bench.clock.now()
    bench.engine.submit(submit("running", LONG, max_tokens=100, deadline=start + 0.2, ignore_eos=True))
    bench.engine.submit(submit("waiting", LONG, deadline=start + 0.1))
    bench.engine.submit(submit("late", LONG, deadline=start))
    bench.engine.submit(submit("calm", LONG[:5], deadline=start + 99, ignore_eos=True))
    bench.run()
    codes = {request_id: refused.code for request_id, refused in bench.refused.items()}
    assert codes == {"running": "request_timeout", "waiting": "deadline_exceeded", "late": "deadline_exceeded"}
    assert not any(w.token_ids[:3] == LONG[:3] and w.start == 0 for step in bench.runner.steps[1:] for w in step)
    assert len(bench.tokens["calm", 0]) == 8
    assert [entry[:2] for entry in bench.engine.take_status().freed] == [("queued", "deadline"), ("decode", "deadline")]


def test_a_deadline_counts_as_the_decision_to_free() -> None:
    bench = Bench()
    bench.engine.submit(submit("a", LONG, max_tokens=100, deadline=bench.clock.now() + 0.05, ignore_eos=True))
    bench.steps(3)
    bench.clock.advance(0.5)
    bench.step()
    ((_, cause, seconds),) = bench.engine.take_status().freed
    assert cause == "deadline"
    assert seconds == pytest.approx(0.48)


def test_a_token_without_a_row_fails_its_request_and_no_neighbour() -> None:
    bench = Bench()
    bench.engine.submit(submit("good", LONG, ignore_eos=True))
    for name, bad in (("above", bench.runner.vocabulary), ("below", -1)):
        bench.engine.submit(submit(name, (5, bad, 6)))
    bench.run()
    assert {name: refused.code for name, refused in bench.refused.items()} == {
        "above": "invalid_request_error",
        "below": "invalid_request_error",
    }
    assert len(bench.tokens["good", 0]) == 8


def test_end_tokens_of_the_request_count_beside_the_models() -> None:
    bench = Bench()
    third = bench.runner.greedy(LONG, 3)[2]
    request = msgspec.structs.replace(submit("a", LONG, max_tokens=50), ends=(third, 10**6))
    assert bench.answer(request)[-1] == third
    last = bench.last["a", 0]
    assert (last.finish, last.stop_reason, last.ended_by_token) == (Finish.STOP, None, True)
    ignored = msgspec.structs.replace(submit("b", LONG, ignore_eos=True), ends=(third,))
    assert len(bench.answer(ignored)) == 8


def test_a_deadline_is_forgotten_when_its_request_ends() -> None:
    bench = Bench()
    bench.engine.submit(submit("a", LONG[:3], max_tokens=2, deadline=bench.clock.now() + 0.1, ignore_eos=True))
    bench.run()
    bench.ends.clear()
    bench.engine.submit(submit("a", LONG[:3], max_tokens=30, ignore_eos=True))
    bench.run()
    assert bench.ends["a", 0] == 1
    assert not bench.refused


def test_a_step_without_work_is_none() -> None:
    bench = Bench()
    bench.engine.submit(submit("empty", ()))
    bench.run()
    assert bench.refused["empty"].code == "invalid_request_error"
    assert bench.engine.steps == 0
    assert bench.engine.take_status().steps == ()


def test_bad_submits_are_refused() -> None:
    bench = Bench(max_waiting=2)
    bench.engine.submit(submit("empty", ()))
    for request_id in ("a", "b", "b", "c"):
        bench.engine.submit(submit(request_id, LONG))
    assert [(m.id, m.code) for m in bench.engine._out if isinstance(m, Refused)] == [
        ("empty", "invalid_request_error"),
        ("b", "invalid_request_error"),
        ("c", "server_is_overloaded"),
    ]


def test_a_step_that_raises_fails_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(max_running=2)
    for request_id in ("a", "b", "c"):
        bench.engine.submit(submit(request_id, LONG[:5], ignore_eos=True, presence_penalty=0.1))
    bench.steps(2)

    def fault(work: Sequence[Work]) -> None:
        bench.runner.before_run = lambda work: None
        raise RuntimeError("the device is gone")

    bench.runner.before_run = fault
    bench.run()
    assert {request_id: refused.code for request_id, refused in bench.refused.items()} == {
        "a": "internal_error",
        "b": "internal_error",
    }
    assert len(bench.tokens["c", 0]) == 8
    assert bench.held() == 0
    assert "the device is gone" in caplog.text


def test_fail_all_refuses_everything_at_once() -> None:
    bench = Bench(max_running=1)
    for request_id in ("a", "b"):
        bench.engine.submit(submit(request_id, LONG))
    bench.step()
    said = bench.engine.fail_all("the engine process is going away")
    assert [(m.id, m.code) for m in said if isinstance(m, Refused)] == [("a", "engine_died"), ("b", "engine_died")]
    assert bench.held() == 0
    assert not bench.engine.has_work


def test_the_timing_is_in_order() -> None:
    bench = Bench()
    bench.engine.submit(submit("a", LONG, ignore_eos=True))
    bench.clock.advance(1.0)
    bench.run()
    said = [m for m in bench.said if isinstance(m, Emitted)]
    assert [m.timing is not None for m in said] == [True, *[False] * 6, True]
    timing = bench.timing("a")
    assert timing.received + 1.0 == timing.scheduled
    assert timing.scheduled < timing.prefilled <= timing.first_token < timing.finished
    assert (timing.steps, timing.preemptions, timing.cached_tokens) == (10, 0, 0)


def test_the_status_tells_what_the_steps_did() -> None:
    bench = Bench()
    bench.engine.submit(submit("a", LONG[:5], max_tokens=20, ignore_eos=True))
    bench.steps(2)
    bench.engine.submit(submit("b", LONG[:30], ignore_eos=True))
    bench.step()
    reports = bench.engine.take_status().steps
    assert [(r.decode_rows, r.prefill_tokens, r.context_tokens, r.sampled) for r in reports] == [
        (0, 5, 0, 1),
        (1, 0, 6, 1),
        (1, 15, 7, 1),
    ]
    load = bench.engine.take_status().load
    assert (load.running, load.waiting, load.steps, load.block_tokens) == (2, 0, 3, 4)
    assert load.blocks_held + load.blocks_cached + load.blocks_free == 64


def test_integrity_is_checked_when_idle() -> None:
    bench = Bench()
    bench.answer(submit("a", LONG))
    assert not bench.engine.load().integrity
    bench.answer(submit("b", LONG))
    bench.engine.pool._free.pop()
    assert "lost" in bench.engine.load().integrity
