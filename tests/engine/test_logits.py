import time

import numpy as np
import pytest

from headway.engine.logits import History, adjust, adjusts, penalised
from headway.engine.sequence import Sequence
from headway.kernels.draws import sane
from headway.types import Params
from tests.engine.test_sequence import first

INF = float("inf")


def adjusted(row: list[float], sequence: Sequence) -> list[float]:
    changed = np.array(row, dtype=np.float32)
    params = sequence.group.submit.params
    adjust(changed, sequence, History(sequence, len(row)) if penalised(params) else None)
    return [float(value) for value in changed]


def with_output(*output: int, **params: object) -> Sequence:
    sequence = first(max_tokens=99, **params)
    for token in output:
        sequence.append(token)
    return sequence


def test_repetition_penalty_counts_prompt_and_output_once() -> None:
    sequence = with_output(1, 1, prompt=(2,), repetition_penalty=2.0)
    assert adjusted([4.0, 4.0, -4.0, 0.0], sequence) == [4.0, 2.0, -8.0, 0.0]


def test_presence_and_frequency_count_the_output_only() -> None:
    sequence = with_output(1, 1, 3, prompt=(2,), presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted([0.0, 0.0, 0.0, 0.0], sequence) == [0.0, -1.0, 0.0, -0.75]


def test_bias_comes_after_the_penalties() -> None:
    sequence = with_output(1, prompt=(2,), repetition_penalty=2.0, logit_bias={1: 3.0})
    assert adjusted([0.0, 4.0, 0.0], sequence) == [0.0, 5.0, 0.0]


def test_ids_outside_of_the_vocabulary_are_ignored() -> None:
    sequence = with_output(7, prompt=(9,), repetition_penalty=2.0, logit_bias={-1: 5.0, 4: 5.0}, stop_token_ids=(99,))
    assert adjusted([1.0, 1.0, 1.0, 1.0], sequence) == [1.0, 1.0, 1.0, 1.0]


def test_a_bias_of_thousands_of_tokens_costs_little() -> None:
    sequence = with_output(1, logit_bias=dict.fromkeys(range(4096), 1.0))
    row = np.zeros(50_000, dtype=np.float32)
    best = 1.0
    for _ in range(5):
        began = time.thread_time()
        adjust(row, sequence, None)
        best = min(best, time.thread_time() - began)
    assert row[:4096].tolist() == [5.0] * 4096
    assert not row[4096:].any()
    assert best < 0.002, f"{best * 1e3:.2f} ms per row"


def test_min_tokens_masks_what_would_end() -> None:
    sequence = with_output(1, min_tokens=2, stop_token_ids=(2, 77))
    assert adjusted([1.0, 1.0, 1.0, 1.0], sequence) == [-INF, 1.0, -INF, 1.0]
    sequence.append(1)
    assert not adjusts(sequence)
    assert adjusted([1.0, 1.0, 1.0, 1.0], sequence) == [1.0, 1.0, 1.0, 1.0]


def test_min_tokens_with_ignore_eos_masks_the_stop_tokens_only() -> None:
    sequence = with_output(1, min_tokens=2, stop_token_ids=(2,), ignore_eos=True)
    assert adjusted([1.0, 1.0, 1.0], sequence) == [1.0, 1.0, -INF]


def test_a_history_catches_up_as_if_it_was_new() -> None:
    sequence = with_output(1, prompt=(2,), repetition_penalty=1.5, frequency_penalty=0.5)
    history = History(sequence, 4)
    params = sequence.group.submit.params
    for token in (3, 1, 1):
        row = np.ones(4, dtype=np.float32)
        adjust(row, sequence, history)
        sequence.append(token)
    old, new = np.ones(4, dtype=np.float32), np.ones(4, dtype=np.float32)
    adjust(old, sequence, history)
    adjust(new, sequence, History(sequence, 4))
    assert old.tolist() == new.tolist()
    assert params.repetition_penalty == 1.5


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (Params(), False),
        (Params(temperature=0.0, top_k=1), False),
        (Params(repetition_penalty=1.1), True),
        (Params(presence_penalty=-1.0), True),
        (Params(frequency_penalty=0.1), True),
    ],
)
def test_penalised_asks_for_a_history_only_when_needed(params: Params, expected: bool) -> None:
    assert penalised(params) is expected


def test_sane_makes_nan_impossible_and_inf_finite() -> None:
    row = sane(np.array([1.0, np.nan, INF, -INF], dtype=np.float32))
    assert row.tolist() == [1.0, -INF, float(np.finfo(np.float32).max), -INF]


def test_sane_returns_a_good_row_itself() -> None:
    row = np.array([1.0, -INF], dtype=np.float32)
    assert sane(row) is row


def test_the_smallest_repetition_penalty_overflows_without_a_warning() -> None:
    sequence = with_output(1, 1, prompt=(2,), repetition_penalty=1e-300)
    row = adjusted([1.0, 1.0, -1.0, 0.0], sequence)
    assert not np.isnan(row).any()
    assert row[1] == np.inf
