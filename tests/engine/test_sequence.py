import pytest

from headway.engine.messages import Submit
from headway.engine.sequence import End, Group, Sequence, Status
from headway.types import Finish, Params

EOS = 0


def group(prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 3, number: int = 1, **params: object) -> Group:
    submit = Submit(id="r", token_ids=prompt, params=Params(**params), priority=2)  # type: ignore[arg-type]
    return Group(
        submit, number=number, received=1.0, seed=3, max_tokens=max_tokens, eos=frozenset({EOS}), salt=("m", "")
    )


def first(**params: object) -> Sequence:
    return group(**params).choices[0]  # type: ignore[arg-type]


def test_a_group_has_n_choices_that_wait_for_the_first() -> None:
    choices = group(n=3).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert {choice.status for choice in choices} == {Status.HELD_BACK}


def test_the_order_is_priority_then_arrival_then_choice() -> None:
    assert group(number=4, n=2).choices[1].order == (2, 4, 1)


def test_max_tokens_ends_with_length() -> None:
    sequence = first(max_tokens=2)
    assert sequence.append(9) is None
    assert sequence.append(9) == End(Finish.LENGTH, None, False)
    assert sequence.n_output == 2


def test_an_end_token_that_fills_max_tokens_ends_with_stop() -> None:
    sequence = first(max_tokens=2)
    assert sequence.append(9) is None
    assert sequence.append(EOS) == End(Finish.STOP, None, True)


def test_ignore_eos_goes_on() -> None:
    assert first(ignore_eos=True).append(EOS) is None


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_callers_stop_token_is_the_reason_even_when_it_is_eos(ignore_eos: bool) -> None:
    sequence = first(stop_token_ids=(EOS, 4), ignore_eos=ignore_eos)
    assert sequence.append(EOS) == End(Finish.STOP, EOS, True)


def test_min_tokens_come_before_an_end_token_counts() -> None:
    sequence = first(min_tokens=1, max_tokens=9)
    assert sequence.append(EOS) is None
    assert sequence.append(EOS) == End(Finish.STOP, None, True)


def test_forget_computed_keeps_the_tokens() -> None:
    sequence = first()
    sequence.append(9)
    sequence.table, sequence.computed, sequence.registered = [1, 2], 3, 1
    sequence.forget_computed()
    assert (sequence.table, sequence.computed, sequence.registered, sequence.prefix) == ([], 0, 0, None)
    assert sequence.tokens == [5, 6, 7, 9]
    assert sequence.remaining == 4


@pytest.mark.parametrize(
    ("scheduled", "prefilled", "phase"), [(0.0, 0.0, "queued"), (2.0, 0.0, "prefill"), (2.0, 3.0, "decode")]
)
def test_the_phase_is_how_far_it_has_come(scheduled: float, prefilled: float, phase: str) -> None:
    sequence = first()
    sequence.scheduled, sequence.prefilled = scheduled, prefilled
    assert sequence.phase == phase
