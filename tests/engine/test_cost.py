import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.engine.cost import KNOTS, PROBES, CostModel, Probe, Shape, calibrate
from tests.engine.world import truth


def test_calibration_tells_what_was_measured_and_what_was_not() -> None:
    cost = calibrate(lambda probe: truth(probe.shape), 10.0, 4096)
    for probe in PROBES:
        assert cost.step_s(probe.shape) == pytest.approx(truth(probe.shape), rel=0.1)
    for shape in (Shape().with_decodes(12, 12 * 300), Shape().with_decodes(6, 900).with_prefill(48, 0)):
        assert cost.step_s(shape) == pytest.approx(truth(shape), rel=0.3)


def test_calibration_of_a_slow_model_keeps_to_its_time() -> None:
    spent = 0.0

    def measure(probe: Probe) -> float:
        nonlocal spent
        spent += 20.0 * truth(probe.shape)
        return 20.0 * truth(probe.shape)

    cost = calibrate(measure, 0.4, 4096)
    assert spent < 0.8  # one step beyond the limit, for what had not been known
    one, two = cost.step_s(Shape(1, 1, 16)), cost.step_s(Shape(64, 64, 64 * 16))
    assert one == pytest.approx(20.0 * truth(Shape(1, 1, 16)), rel=0.2)
    assert two > 3 * one


def test_calibration_leaves_out_what_the_context_does_not_hold() -> None:
    seen: list[Probe] = []

    def measure(probe: Probe) -> float:
        seen.append(probe)
        return truth(probe.shape)

    calibrate(measure, 10.0, 64)
    assert max(max(probe.context, probe.start + probe.prefill) for probe in seen) <= 64


@pytest.mark.parametrize("start", ["guess", "calibrated"])
def test_steps_teach_the_model_a_machine_it_did_not_know(start: str) -> None:
    rng = random.Random(1)
    cost = CostModel() if start == "guess" else calibrate(lambda probe: truth(probe.shape), 10.0, 4096)
    errors = []
    for _ in range(1500):
        shape = Shape().with_decodes(n := rng.randint(1, 16), n * rng.randint(20, 800))
        if rng.random() < 0.5:
            shape = shape.with_prefill(rng.randint(1, 60), rng.choice([0, 64, 900]))
        errors.append(cost.learn(shape, 1.7 * truth(shape) * rng.lognormvariate(0.0, 0.05)))
    assert sorted(errors[-300:])[150] < 0.1
    assert cost.error < 0.15


def test_a_machine_that_slows_down_is_followed_within_a_few_steps() -> None:
    cost = calibrate(lambda probe: truth(probe.shape), 10.0, 4096)
    shape = Shape().with_decodes(8, 800)
    for _ in range(20):
        cost.learn(shape, 2.0 * truth(shape))
    assert cost.step_s(shape) == pytest.approx(2.0 * truth(shape), rel=0.1)
    other = Shape().with_decodes(2, 100)  # the pace is the machine's: what did not run is slower too
    assert cost.step_s(other) == pytest.approx(2.0 * truth(other), rel=0.35)


def test_one_stall_does_not_spoil_the_model() -> None:
    cost = calibrate(lambda probe: truth(probe.shape), 10.0, 4096)
    shape = Shape().with_decodes(8, 800)
    for _ in range(50):
        cost.learn(shape, truth(shape))
    cost.learn(shape, 500.0 * truth(shape))
    assert cost.step_s(shape) < 1.5 * truth(shape)


shapes = st.builds(
    lambda decodes, context, prefill, start: (
        Shape().with_decodes(decodes, decodes * context).with_prefill(prefill, start)
        if prefill
        else Shape().with_decodes(decodes, decodes * context)
    ),
    st.integers(1, 300),
    st.integers(1, 4000),
    st.integers(0, 300),
    st.integers(0, 4000),
)


@given(st.lists(st.tuples(shapes, st.floats(1e-5, 10.0)), max_size=60))
def test_whatever_is_learned_more_work_takes_longer_and_time_is_positive(steps: list[tuple[Shape, float]]) -> None:
    cost = CostModel()
    for shape, seconds in steps:
        assert cost.learn(shape, seconds) >= 0.0
    assert all(term > 0.0 for term in cost.terms)
    curve = cost.terms[: len(KNOTS)]
    assert all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(curve))
    assert all(high <= 2.1 * low for low, high in itertools.pairwise(curve))


@given(shapes, st.integers(0, 3000), st.floats(0.001, 3.0), st.integers(1, 400))
def test_room_is_what_fits_and_no_less(shape: Shape, start: int, limit_s: float, most: int) -> None:
    cost = calibrate(lambda probe: truth(probe.shape), 10.0, 4096)
    room = cost.room(shape, start, limit_s, most)
    assert 0 <= room <= most
    if room:
        assert cost.step_s(shape.with_prefill(room, start)) <= limit_s
    if room < most:
        assert cost.step_s(shape.with_prefill(room + 1, start, 1)) > limit_s


def test_a_prompt_alone_takes_the_sum_of_its_chunks() -> None:
    cost = calibrate(lambda probe: truth(probe.shape), 10.0, 4096)
    steps = [Shape().with_prefill(64, start, int(start == 448)) for start in range(0, 512, 64)]
    assert cost.prefill_s(512) == pytest.approx(sum(map(cost.step_s, steps)), rel=0.1)
    assert cost.prefill_s(0) == 0.0


def test_a_step_of_nothing_takes_no_time_and_teaches_nothing() -> None:
    cost = CostModel()
    before = list(cost.terms)
    assert cost.step_s(Shape()) == 0.0
    cost.learn(Shape(), 1.0)
    cost.learn(Shape(1, 1, 10), 0.0)
    assert cost.terms == before
