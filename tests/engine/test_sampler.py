import math
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.engine.logits import FLOOR
from headway.engine.messages import Submit
from headway.engine.runner import pack
from headway.engine.sampler import Sampler, logprobs, uniform
from headway.engine.sequence import Group, Sequence
from headway.engine.work import Work
from headway.kernels import has_native
from headway.kernels.draws import Draws, Floats, largest
from headway.kernels.draws import draw as numpy_draw
from headway.kernels.ops import Ops, Program, Value
from headway.types import Params

INF = float("inf")
NAN = float("nan")


def sequence(params: Params, *, seed: int = 1, output: tuple[int, ...] = (), index: int = 0) -> Sequence:
    submit = Submit(id="r", token_ids=(1, 2), params=params)
    group = Group(submit, number=1, received=0.0, seed=seed, max_tokens=99, eos=frozenset({0}), salt=("", ""))
    choice = group.choices[index]
    for token in output:
        choice.append(token)
    return choice


def row(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def both(logits: Floats, draws: Draws) -> NDArray[np.int32]:
    """Draw by NumPy, which defines what is right, and by the library, which must agree."""
    found = numpy_draw(logits, draws)
    if has_native():
        np.testing.assert_array_equal(native().draw(logits, draws), found)
    return found


@cache
def native() -> Program:
    from headway.kernels.cpu import NativeKernels
    from tests.kernels.support import compile_model

    def model(ops: Ops) -> Value:
        x = ops.embed("table", width=16)
        x = ops.attend(x, x, x, layer=0, heads=1, kv_heads=1, head_width=16, scale=1.0)
        return ops.head(x, "table", width=300)

    weights = {"table": np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)}
    return compile_model(NativeKernels(2), model, weights, n_blocks=2, block_tokens=16)


def draw(values: Floats, params: Params, *, seed: int = 1, index: int = 0) -> int:
    return Sampler(len(values), both).sample(values[None], [0], [sequence(params, seed=seed, index=index)])[0]


def pick(logits: Floats, params: Params, u: float) -> int:
    one = Draws(
        rows=np.zeros(1, np.int32),
        temperature=np.array([params.temperature], np.float32),
        top_k=np.array([params.top_k], np.int32),
        top_p=np.array([params.top_p], np.float32),
        min_p=np.array([params.min_p], np.float32),
        u=np.array([u]),
    )
    return int(both(logits[None], one)[0])


def plain(values: Floats, params: Params) -> tuple[list[int], list[float]]:
    """The reference: sort everything, cut, renormalise. Returns ids (best first) and probabilities."""
    ids = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.top_k:
        ids = ids[: params.top_k]
    weights = [math.exp((float(values[i]) - float(values[ids[0]])) / params.temperature) for i in ids]
    total, mass = sum(weights), 0.0
    kept: list[tuple[int, float]] = []
    for i, weight in zip(ids, weights, strict=True):
        if kept and mass >= params.top_p * total:
            break
        kept.append((i, weight))
        mass += weight
    kept = [(i, weight) for i, weight in kept if weight >= params.min_p]
    total = sum(weight for _, weight in kept)
    return [i for i, _ in kept], [weight / total for _, weight in kept]


def near_a_cut(values: Floats, params: Params) -> bool:
    """Whether rounding may decide if a token belongs to the candidates."""
    ids, _ = plain(values, Params(temperature=params.temperature, top_k=params.top_k))
    weights = [math.exp((float(values[i]) - float(values[ids[0]])) / params.temperature) for i in ids]
    masses = np.cumsum(weights) / sum(weights)
    return bool(
        (abs(masses - params.top_p) < 1e-4).any() or any(abs(w - params.min_p) < 1e-4 * params.min_p for w in weights)
    )


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=40),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    u=st.floats(0.0, 1.0, exclude_max=True),
)
def test_pick_agrees_with_the_plain_reference(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    params = Params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = row(*values)
    if near_a_cut(logits, params) and top_p < 1.0:
        return
    ids, probabilities = plain(logits, params)
    token = pick(logits, params, u)
    assert token in ids
    below = 0.0
    for i, probability in sorted(zip(ids, probabilities, strict=True)):
        if i == token:
            assert below - 1e-5 <= u <= below + probability + 1e-5
        below += probability


@pytest.mark.parametrize(
    "params",
    [
        Params(),
        Params(temperature=0.7),
        Params(top_k=5),
        Params(top_p=0.8),
        Params(min_p=0.1),
        Params(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    ],
)
@pytest.mark.parametrize("vocabulary", [30, 3000])
def test_the_distribution_is_right(params: Params, vocabulary: int) -> None:
    logits = np.random.default_rng(3).normal(0.0, 2.0, vocabulary).astype(np.float32)
    n = 3000
    seen = Counter(pick(logits, params, uniform(5, 0, position)) for position in range(n))
    ids, probabilities = plain(logits, params)
    assert set(seen) <= set(ids)
    # Chi-square over cells of at least 5 expected draws; the rest are one cell.
    cells: list[tuple[float, float]] = []
    rest = [0.0, 0.0]
    for i, probability in zip(ids, probabilities, strict=True):
        if n * probability >= 5:
            cells.append((seen[i], n * probability))
        else:
            rest = [rest[0] + seen[i], rest[1] + n * probability]
    if rest[1] >= 5:
        cells.append((rest[0], rest[1]))
    chi = sum((observed - expected) ** 2 / expected for observed, expected in cells)
    freedom = max(len(cells) - 1, 1)
    assert chi < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_uniforms_are_in_range_and_uniform() -> None:
    numbers = np.array([uniform(seed, index, p) for seed in (0, -3, 2**70) for index in (0, 1) for p in range(2000)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((counts - 600) ** 2 / 600).sum() < 45
    assert len(set(numbers.tolist())) == len(numbers)


GREEDY = [
    Params(temperature=0.0),
    Params(temperature=0.0, top_k=1, top_p=0.0001, min_p=0.99),
    Params(temperature=1e-6, top_p=0.5),
    Params(temperature=1e-300),
    Params(temperature=5e-324, min_p=0.5),
    Params(temperature=1.0, top_k=1),
    Params(temperature=1.0, top_p=0.0),
    Params(temperature=1.0, top_p=0.0001),
    Params(temperature=1.0, min_p=1.0),
]


@pytest.mark.parametrize("params", GREEDY)
def test_temp_zero_topk_degenerate_parameters_are_greedy(params: Params) -> None:
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(0.0, 1.0, 50).astype(np.float32)
        assert draw(logits, params, seed=seed) == int(logits.argmax())


@pytest.mark.parametrize("params", [*GREEDY, Params(), Params(top_k=3), Params(top_p=0.9), Params(min_p=0.01)])
@pytest.mark.parametrize(
    ("values", "possible"),
    [
        ((NAN, 1.0, -INF, 0.0), {1, 3}),
        ((1.0, NAN, NAN, NAN), {0}),
        ((1.0, INF, 2.0, NAN), {1}),
        ((-INF, -INF, -5.0, -INF), {2}),
        ((-INF, -INF, -INF, -INF), {0}),
        ((NAN, NAN, NAN, NAN), {0}),
        ((3e38, -3e38, 0.0, 3e38), {0, 3}),
    ],
)
def test_broken_rows_give_a_possible_token(values: tuple[float, ...], possible: set[int], params: Params) -> None:
    for seed in range(5):
        assert draw(row(*values), params, seed=seed) in possible


@pytest.mark.parametrize("top_p", [0.0, 1e-12, 1e-9, 1e-7])
def test_a_tiny_top_p_of_equal_logits_leaves_the_first(top_p: float) -> None:
    assert draw(np.ones(3000, dtype=np.float32), Params(top_p=top_p)) == 0


def test_equal_logits_are_cut_by_id() -> None:
    logits = row(1.0, 2.0, 2.0, 2.0, 2.0)
    assert {pick(logits, Params(top_k=2), u / 50) for u in range(50)} == {1, 2}
    assert {pick(logits, Params(top_k=5, top_p=0.4), u / 50) for u in range(50)} == {1, 2}


def test_top_p_that_is_met_exactly_takes_no_token_more() -> None:
    logits = np.zeros(8, dtype=np.float32)
    for top_p, kept in ((0.25, 2), (0.5, 4), (0.5001, 5), (1.0, 8)):
        assert {pick(logits, Params(top_p=top_p), u / 64) for u in range(64)} == set(range(kept))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999), vocabulary=st.integers(250, 3000), count=st.integers(1, 300), levels=st.integers(1, 2000)
)
def test_the_largest_are_what_a_full_sort_finds(seed: int, vocabulary: int, count: int, levels: int) -> None:
    values = np.random.default_rng(seed).integers(0, levels, vocabulary).astype(np.float32)
    expected = sorted(sorted(range(vocabulary), key=lambda i: (-values[i], i))[:count])
    assert largest(values, count).tolist() == expected


def test_a_token_of_no_weight_is_never_picked() -> None:
    logits = np.full(5000, -np.inf, dtype=np.float32)
    logits[[300, 301, 4000]] = 0.0
    assert {pick(logits, Params(), u) for u in (0.0, 0.2, 0.5, 0.9, 1.0 - 2.0**-53)} == {300, 301, 4000}
    assert pick(logits, Params(), 1.0 - 2.0**-53) == 4000
    assert pick(logits, Params(), 0.0) == 300


def test_seed_neighbours_a_row_is_the_same_alone_and_among_others() -> None:
    vocabulary = 2000
    logits: NDArray[np.float32] = np.random.default_rng(1).normal(0.0, 1.0, (16, vocabulary)).astype(np.float32)
    kinds = [Params(), Params(temperature=0.0), Params(top_p=0.9, presence_penalty=0.5), Params(top_k=40)]
    rows = [sequence(kinds[i % 4], seed=i, output=(3, 4)) for i in range(16)]
    together = Sampler(vocabulary, both).sample(logits, range(16), rows)
    alone = [Sampler(vocabulary).sample(logits[i : i + 1], [0], [rows[i]])[0] for i in range(16)]
    backwards = Sampler(vocabulary).sample(logits, range(15, -1, -1), rows[::-1])
    assert together == alone == backwards[::-1]


def test_seeds_choices_and_positions_draw_different_numbers() -> None:
    logits = np.zeros(10_000, dtype=np.float32)
    assert draw(logits, Params(), seed=1) == draw(logits, Params(), seed=1)
    different = {
        draw(logits, Params(), seed=1),
        draw(logits, Params(), seed=2),
        draw(logits, Params(n=2), seed=1, index=1),
        Sampler(10_000).sample(logits[None], [0], [sequence(Params(), seed=1, output=(5,))])[0],
    }
    assert len(different) == 4


def test_the_models_logits_stay_as_they_are() -> None:
    logits = row(1.0, 2.0, NAN)
    params = Params(temperature=0.0, logit_bias={0: 50.0}, repetition_penalty=1.5)
    assert draw(logits, params) == 0
    assert logits[:2].tolist() == [1.0, 2.0]


@pytest.mark.skipif(not has_native(), reason="built with HEADWAY_NATIVE=0")
def test_tokens_of_a_step_are_drawn_from_what_its_head_left() -> None:
    """The largest logits of the step's spans are not taken for those of other rows that come later."""
    program = native()
    work = [Work([token, 5, 7], 0, [block], 3) for block, token in enumerate((3, 9))]
    logits = program.run(pack(work, 16))
    params = [
        Params(temperature=0.0),
        Params(),
        Params(top_k=3),
        Params(top_p=0.9),
        Params(min_p=0.2),
        Params(top_k=200),
    ]
    rows = [sequence(one, seed=seed) for seed, one in enumerate(params)]

    def check(logits: Floats) -> list[int]:
        return Sampler(300, lambda logits, draws: both(logits, draws)).sample(logits, range(6), rows)

    first = check(logits)
    assert first == check(logits.copy())
    assert check(logits[::-1].copy()) != first
    assert check(logits) == first


def test_forget_drops_the_history() -> None:
    sampler = Sampler(4)
    choice = sequence(Params(presence_penalty=1.0))
    sampler.sample(np.zeros((1, 4), dtype=np.float32), [0], [choice])
    assert sampler._histories
    sampler.forget(choice)
    assert not sampler._histories


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(-20, 20), min_size=1, max_size=30), data=st.data())
def test_logprobs_are_the_log_softmax_with_sorted_alternatives(values: list[int], data: st.DataObject) -> None:
    logits = row(*values)
    token = data.draw(st.integers(0, len(values) - 1))
    top = data.draw(st.integers(0, 35))
    norm = math.log(sum(math.exp(value) for value in values))
    found = logprobs(logits, token, top)
    assert found.token_id == token
    assert found.logprob == pytest.approx(values[token] - norm, abs=1e-5)
    best = sorted(range(len(values)), key=lambda i: (-values[i], i))[:top]
    assert [i for i, _ in found.top] == best
    assert [value for _, value in found.top] == pytest.approx([values[i] - norm for i in best], abs=1e-5)


def test_impossible_tokens_have_a_finite_logprob() -> None:
    assert logprobs(row(0.0, -INF, NAN), 1, 3).logprob == FLOOR
    assert [value for _, value in logprobs(row(0.0, -INF, NAN), 0, 3).top] == [0.0, FLOOR, FLOOR]
    assert logprobs(row(NAN, NAN), 0, 2).logprob == FLOOR
