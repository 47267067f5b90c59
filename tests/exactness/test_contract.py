"""The contract on real weights: a request's tokens, greedy or seeded, are its own, whatever happens around it.

Every request is run alone first (one thread, no prefix cache); then together with others under one setting after the
other, and under random mixtures of all of them. Requests arrive and are cancelled between steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from headway.config import environment
from headway.engine.messages import Abort, Emitted, Submit
from headway.engine.tokenizer import load_tokenizer
from headway.kernels import has_native
from headway.llm import LLM
from headway.models.checkpoint import open_checkpoint
from headway.models.pull import resolve
from headway.types import Params

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

if not has_native():
    pytest.skip("built with HEADWAY_NATIVE=0", allow_module_level=True)

MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b")
OUTPUT = 40
_PREFIX = "You are a careful assistant. Answer in one short sentence, name your source, and never guess. " * 6
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived a clockmaker who mended what nobody else would touch. "
    * 13,
    _PREFIX + "Question: why is the sky blue?",
    _PREFIX + "Question: what is a prime number?",
    "1, 2, 3, 5, 8,",
)
SEEDED: tuple[dict[str, Any], ...] = (
    {"top_p": 0.95},
    {"top_p": 0.95, "presence_penalty": 0.6},
    {"min_p": 0.05},
    {"top_k": 40},
    {"top_p": 0.9, "repetition_penalty": 1.1},
    {"top_p": 0.95, "frequency_penalty": 0.4, "logit_bias": {11: -2.0}},
)


@dataclass(frozen=True)
class Ask:
    """One request."""

    name: str
    token_ids: tuple[int, ...]
    params: Params

    def submit(self, name: str | None = None, priority: int = 0) -> Submit:
        return Submit(id=name or self.name, token_ids=self.token_ids, params=self.params, priority=priority)


@cache
def asks(model: str) -> tuple[Ask, ...]:
    """The prompts, each greedy and seeded."""
    tokenizer = load_tokenizer(open_checkpoint(resolve(model, environment())))
    found = []
    for i, text in enumerate(PROMPTS):
        ids = tuple(tokenizer.encode(text))
        greedy = Params(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        seeded = Params(temperature=0.8, seed=100 + i, max_tokens=OUTPUT, ignore_eos=True, **SEEDED[i])
        found += [Ask(f"greedy {i}", ids, greedy), Ask(f"seeded {i}", ids, seeded)]
    return tuple(found)


class Loaded:
    """One model in memory at a time."""

    def __init__(self) -> None:
        self._key: object = None
        self._llm: LLM | None = None

    def get(self, model: str, **settings: Any) -> LLM:
        key = (model, tuple(sorted(settings.items())))
        if key != self._key or self._llm is None:
            self.close()
            self._llm = LLM(model, kernels="cpu", **{"kv_memory": "512MiB", **settings})
            self._key = key
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.__exit__(None, None, None)
        self._llm = None


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    found = Loaded()
    yield found
    found.close()


@dataclass
class Play:
    """What happens between the steps: arrivals and cancellations by the number of steps run."""

    arrivals: Sequence[tuple[int, Submit]]
    cancels: Mapping[str, int] = field(default_factory=dict)
    """Steps after its arrival at which a request is cancelled."""

    def run(self, llm: LLM) -> dict[str, list[int]]:
        engine = llm.engine
        tokens: dict[str, list[int]] = {}
        waiting = sorted(self.arrivals, key=lambda arrival: arrival[0])
        due: list[tuple[int, str]] = []
        for step in range(100_000):
            while waiting and (waiting[0][0] <= step or not engine.has_work):
                _, submit = waiting.pop(0)
                engine.submit(submit)
                if submit.id in self.cancels:
                    due.append((step + self.cancels[submit.id], submit.id))
            for at, name in due:
                if at == step:
                    engine.abort(Abort(id=name))
            if not engine.has_work and not waiting:
                break
            for message in engine.step():
                assert isinstance(message, Emitted), message
                tokens.setdefault(message.id, []).extend(message.token_ids)
        assert engine.load().blocks_held == 0
        assert not engine.load().integrity
        return tokens


def alone(loaded: Loaded, model: str, kv_dtype: str = "bf16") -> dict[str, list[int]]:
    """Each request's tokens by itself: the reference of all the others."""
    if (model, kv_dtype) not in _ALONE:
        llm = loaded.get(model, threads=1, prefix_cache=False, kv_dtype=kv_dtype)
        found: dict[str, list[int]] = {}
        for ask in asks(model):
            found |= Play([(0, ask.submit())]).run(llm)
        assert all(len(ids) == OUTPUT for ids in found.values())
        _ALONE[model, kv_dtype] = found
    return _ALONE[model, kv_dtype]


_ALONE: dict[tuple[str, str], dict[str, list[int]]] = {}


def together(model: str, seed: int) -> list[tuple[int, Submit]]:
    """All requests in some order, within a few steps."""
    rng = random.Random(seed)
    found = [(rng.randrange(12), ask.submit()) for ask in asks(model)]
    rng.shuffle(found)
    return found


def neighbours(model: str, seed: int, count: int) -> tuple[list[tuple[int, Submit]], dict[str, int]]:
    """Requests of others, cancelled in any phase."""
    rng = random.Random(seed)
    arrivals, cancels = [], {}
    for i in range(count):
        name = f"neighbour {i}"
        ids = tuple(rng.randrange(100, 20_000) for _ in range(rng.choice((5, 40, 300))))
        params = Params(temperature=1.0, max_tokens=60, ignore_eos=True)
        arrivals.append((rng.randrange(30), Submit(id=name, token_ids=ids, params=params)))
        cancels[name] = rng.randrange(1, 25)
    return arrivals, cancels


def check(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> None:
    for name, ids in expected.items():
        assert list(found[name]) == ids, name


models = pytest.mark.parametrize("model", MODELS)


@models
@pytest.mark.parametrize("threads", [1, 2])
def test_in_company(loaded: Loaded, model: str, threads: int) -> None:
    expected = alone(loaded, model)
    llm = loaded.get(model, threads=threads, prefix_cache=False)
    check(Play(together(model, threads)).run(llm), expected)


@models
@pytest.mark.parametrize("step_tokens", [3, 37])
def test_in_any_chunks(loaded: Loaded, model: str, step_tokens: int) -> None:
    expected = alone(loaded, model)
    llm = loaded.get(model, threads=2, prefix_cache=False, step_tokens=step_tokens)
    check(Play(together(model, step_tokens)).run(llm), expected)


@models
def test_from_the_prefix_cache(loaded: Loaded, model: str) -> None:
    expected = alone(loaded, model)
    llm = loaded.get(model, threads=2)
    for turn in range(2):
        before = llm.engine.load().prefix_hit_tokens
        check(Play(together(model, turn)).run(llm), expected)
    assert llm.engine.load().prefix_hit_tokens - before > 500


@models
def test_after_preemption(loaded: Loaded, model: str) -> None:
    expected = alone(loaded, model)
    token_bytes = loaded.get(model, threads=1, prefix_cache=False).runner.cost.kv_token_bytes
    tokens = max(len(ask.token_ids) for ask in asks(model)) + OUTPUT + 8 * 32
    llm = loaded.get(model, threads=2, prefix_cache=False, kv_memory=f"{tokens * token_bytes}B")
    # Those that came earlier grow, and take the blocks of those that came later.
    params = Params(temperature=1.0, max_tokens=150, ignore_eos=True)
    earlier = [(0, Submit(id=f"earlier {i}", token_ids=(100, 200 + i, 300), params=params)) for i in range(8)]
    check(Play([*earlier, *together(model, 5)]).run(llm), expected)
    assert llm.engine.load().preemptions > 2


@models
def test_while_neighbours_are_cancelled(loaded: Loaded, model: str) -> None:
    expected = alone(loaded, model)
    arrivals, cancels = neighbours(model, 6, 16)
    llm = loaded.get(model, threads=2)
    check(Play([*together(model, 6), *arrivals], cancels).run(llm), expected)


@models
def test_with_a_kv_cache_in_int8(loaded: Loaded, model: str) -> None:
    expected = alone(loaded, model, "int8")
    llm = loaded.get(model, threads=2, kv_dtype="int8", step_tokens=37)
    for turn in range(2):
        check(Play(together(model, turn)).run(llm), expected)


def test_choices_are_those_of_the_seed(loaded: Loaded) -> None:
    model = MODELS[0]
    ask = asks(model)[1]
    several = Submit(id="n", token_ids=ask.token_ids, params=_with(ask.params, n=3))
    found: dict[int, list[int]] = {}
    llm = loaded.get(model, threads=2)
    others = [submit for _, submit in together(model, 8)]
    for submit in (several, *others):
        llm.engine.submit(submit)
    while llm.engine.has_work:
        for message in llm.engine.step():
            if isinstance(message, Emitted) and message.id == "n":
                found.setdefault(message.index, []).extend(message.token_ids)
    assert found[0] == alone(loaded, model)[ask.name]
    assert len({tuple(ids) for ids in found.values()}) == 3


def _with(params: Params, **changes: Any) -> Params:
    import msgspec

    return msgspec.structs.replace(params, **changes)


def mixture(model: str, seed: int, token_bytes: int) -> tuple[dict[str, Any], Callable[[LLM], dict[str, list[int]]]]:
    """Settings, and what happens, drawn at random."""
    rng = random.Random(seed)
    least = max(len(ask.token_ids) for ask in asks(model)) + OUTPUT + 3 * 32
    settings = {
        "threads": rng.choice((1, 2)),
        "step_tokens": rng.choice((5, 19, 64, 256)),
        "prefix_cache": rng.random() < 0.6,
        "max_running": rng.choice((2, 5, 64)),
        "longest_step_s": rng.choice((0.02, 0.1, 10.0)),
        "kv_memory": f"{rng.choice((least, 2 * least, 20_000)) * token_bytes}B",
    }
    arrivals = [
        (at * rng.choice((1, 4)), ask.submit(priority=rng.randrange(3)))
        for ask, (at, _) in zip(asks(model), together(model, seed), strict=True)
    ]
    others, cancels = neighbours(model, seed, rng.choice((0, 6, 12)))
    return settings, Play([*arrivals, *others], cancels).run


@pytest.mark.parametrize(
    ("model", "seed"), [*((MODELS[0], seed) for seed in range(8)), (MODELS[1], 20), (MODELS[1], 21)]
)
def test_in_random_mixtures(loaded: Loaded, model: str, seed: int) -> None:
    expected = alone(loaded, model)
    token_bytes = {MODELS[0]: 23_040, MODELS[1]: 12_288}[model]
    settings, run = mixture(model, seed, token_bytes)
    check(run(loaded.get(model, **settings)), expected)
