"""When a request would get its first token, told on arrival: the API process's own picture of the engine's work.

The engine process is busy with a step when a request arrives, and a refusal must not wait for it. So the API process
keeps what it has sent, hears what comes back, takes over the engine's cost model with each heartbeat, and plays the
queue forward: prompts in the scheduler's order at the rate that the streams beside them leave, streams ending as long
as answers have lately been. What it predicted is compared with what came, and the next predictions are scaled by it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from headway.engine.cost import CostModel, Shape
from headway.engine.fairness import QUANTUM
from headway.engine.messages import Outlook, Submit
from headway.engine.pace import crowd_limit_s, step_limit_s

_RATE = 0.1
_KEPT = 0.97
"""Share of the predictions that what is kept in hand should cover."""
_GUARD_RATE = 0.1
_GRAIN_S = 0.05
"""Added to both sides before they are compared: of an idle engine's milliseconds no ratio tells anything."""
_FIRST_GUESS_TOKENS = 128
_OVERTAKEN = 4.0 / 3.0
"""The oldest prompt keeps a quarter of each step: one that overtakes it gets on so much slower."""
_MOST_PLAYED = 2048
"""Jobs that are played forward one by one."""


class Job:
    """What is known of one request between its arrival and its end."""

    __slots__ = ("answered", "expected", "known", "predicted", "sent", "started", "submit", "tokens")

    def __init__(self, submit: Submit, tokens: int, expected: float, sent: float) -> None:
        self.submit = submit
        self.tokens = tokens
        """Of the prompt, still to compute."""
        self.known = len(submit.token_ids) - tokens
        """Of the prompt, in the prefix cache, as far as one can tell from outside."""
        self.expected = expected
        """Tokens that its answer will have."""
        self.sent = sent
        self.started = False
        """It holds a place in the running batch."""
        self.answered = 0
        """Tokens that have come, of the choice that has most."""
        self.predicted = 0.0
        """Seconds to the first token, as played forward on arrival."""

    @property
    def decodes(self) -> bool:
        """Whether its first token is there."""
        return self.answered > 0

    @property
    def left(self) -> float:
        """Tokens that its answer still takes; one that is longer than expected goes on for half as long again."""
        most = float(self.submit.params.max_tokens or 1)
        left = self.expected - self.answered
        return min(most - self.answered, left if left >= 1.0 else 1.0 + 0.5 * self.expected)


class Verdict(NamedTuple):
    """What was found on arrival; seconds from now."""

    first_token_s: float
    late_by_s: float
    """How far beyond its target, or beyond that of one that it would make late; 0 when all is well."""
    alone_s: float
    """What it would take with nothing beside it."""
    retry_s: float = 0.0
    """When it would be taken, if nobody else came."""
    played_s: float = 0.0
    """The first token by the play alone, before what is learned from earlier ones."""


class Prefixes:
    """Which prompts the engine has lately computed, by the hashes of their blocks: a guess at its prefix cache."""

    def __init__(self, block_tokens: int, n_blocks: int) -> None:
        self._size = block_tokens
        self._limit = n_blocks
        self._seen: OrderedDict[int, None] = OrderedDict()

    def _chain(self, submit: Submit) -> Iterable[int]:
        link: Hashable = submit.tenant
        ids = submit.token_ids
        for start in range(0, len(ids) - self._size + 1, self._size):
            link = hash((link, ids[start : start + self._size]))
            yield link

    def cached(self, submit: Submit) -> int:
        """Return how many of the prompt's tokens are probably cached."""
        count = 0
        for link in self._chain(submit):
            if link not in self._seen:
                break
            self._seen.move_to_end(link)
            count += self._size
        return min(count, len(submit.token_ids) - 1)

    def computed(self, submit: Submit) -> None:
        """Note a prompt whose blocks are in the engine's cache now."""
        for link in self._chain(submit):
            self._seen[link] = None
            self._seen.move_to_end(link)
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)


class Forecast:
    """Every request that the engine holds, and what it will make of one more."""

    def __init__(self, *, max_running: int, step_tokens: int, longest_step_s: float) -> None:
        self.cost = CostModel()
        self.jobs: dict[str, Job] = {}
        self._max_running = max_running
        self._step_tokens = step_tokens
        self._longest_step_s = longest_step_s
        self._answer_tokens = float(_FIRST_GUESS_TOKENS)
        self._excess: dict[str, float] = {}
        self._prefixes: Prefixes | None = None
        self.bias = 1.0
        """How much later first tokens come than played forward."""
        self.guard = 1.3
        """What covers nearly all of them: predictions are multiplied by it before they are held against a promise."""

    def started(self, block_tokens: int, n_blocks: int) -> None:
        """Begin anew with an engine that has just started: its cache is empty."""
        self._prefixes = Prefixes(block_tokens, n_blocks)

    def heard(self, outlook: Outlook) -> None:
        """Take over what the engine says of itself."""
        if outlook.terms:
            self.cost.terms = list(outlook.terms)
            self.cost.pace = outlook.pace
            self.cost.error = outlook.error
        self._excess = dict(outlook.excess)
        for request_id, tokens in outlook.prefilling:
            job = self.jobs.get(request_id)
            if job is not None:
                job.started = True
                job.tokens = min(job.tokens, tokens)

    def submitted(self, submit: Submit, now: float, verdict: Verdict | None = None) -> None:
        """Note a request that goes to the engine."""
        job = self._job(submit, now)
        if verdict is not None:
            job.predicted = verdict.played_s
        self.jobs[submit.id] = job

    def answered(self, request_id: str, tokens: int, now: float) -> None:
        """Note that the engine has said so many more tokens of the request's answer."""
        job = self.jobs.get(request_id)
        if job is None:
            return
        if not job.answered:
            job.tokens = 0
            job.started = True
            if self._prefixes is not None:
                self._prefixes.computed(job.submit)
            if job.predicted > 0.0:
                self._compare(job.predicted, now - job.sent)
        job.answered += tokens

    def ended(self, request_id: str, *, whole: bool) -> None:
        """Forget a request; the length of a ``whole`` answer tells of those to come."""
        job = self.jobs.pop(request_id, None)
        if job is not None and whole and job.answered:
            self._answer_tokens += _RATE * (job.answered / max(1, job.submit.params.n) - self._answer_tokens)

    def alone_s(self, submit: Submit) -> float:
        """Return the seconds to the first token with nothing beside the request."""
        job = self._job(submit, 0.0)
        return self.cost.prefill_s(job.tokens, job.known)

    def verdict(self, submit: Submit, now: float) -> Verdict:
        """Play the queue forward with one more request."""
        new = self._job(submit, now)
        found = self._play([*self.jobs.values(), new])
        played_s = found[id(new)]
        late = max(0.0, self._guarded(found[id(new)]) - _left(new, now))
        behind = [job for job in self.jobs.values() if found.get(id(job), 0.0) > found[id(new)]]
        late_now = [
            job
            for job in behind
            if self._guarded(found[id(job)]) > _left(job, now) and self._owes(submit.tenant, job.submit.tenant)
        ]
        if late_now:
            without = self._play(list(self.jobs.values()))
            for job in late_now:
                if self._guarded(without[id(job)]) <= _left(job, now):  # on time, but for the new one
                    late = max(late, self._guarded(found[id(job)]) - _left(job, now))
        return Verdict(
            first_token_s=played_s * self.bias,
            late_by_s=late,
            alone_s=self.cost.prefill_s(new.tokens, new.known),
            retry_s=late / self.guard,
            played_s=played_s,
        )

    def wait_s(self) -> float:
        """Return the seconds after which everything that is queued now has its first token."""
        found = self._play(list(self.jobs.values()))
        return max(found.values(), default=0.0) * self.bias

    def backlog_tokens(self) -> int:
        """Return how many tokens of prompts wait to be computed."""
        return sum(job.tokens for job in self.jobs.values())

    def _owes(self, tenant: str, other: str) -> bool:
        """Whether a tenant has to mind what it does to another: not while it has had no more than anybody else."""
        return tenant == other or self._excess.get(tenant, 0.0) >= QUANTUM

    def _compare(self, predicted: float, took: float) -> None:
        """Learn from a first token that came: the mean of the ratio, and its quantile by steps up and down."""
        ratio = min(4.0, (took + _GRAIN_S) / (predicted + _GRAIN_S))
        self.bias += _RATE * (ratio - self.bias)
        step = _KEPT if ratio > self.guard else _KEPT - 1.0
        self.guard = min(4.0, max(1.0, self.guard + _GUARD_RATE * step))

    def _guarded(self, seconds: float) -> float:
        return (seconds + _GRAIN_S) * self.guard - _GRAIN_S

    def _job(self, submit: Submit, now: float) -> Job:
        cached = self._prefixes.cached(submit) if self._prefixes is not None else 0
        most = float(submit.params.max_tokens or 1)
        return Job(submit, len(submit.token_ids) - cached, max(1.0, min(most, self._answer_tokens)), now)

    def _order(self, job: Job) -> tuple[int, float, float]:
        submit = job.submit
        due = inf if submit.ttft_by is None else submit.ttft_by
        return (submit.priority, due - self.cost.prefill_s(job.tokens, job.known), job.sent)

    def _in_order(self, queue: list[Job]) -> Iterator[Job]:
        """Yield the jobs as the scheduler would take them: by importance, tenants in turn by tokens, by slack."""
        tenants: dict[str, list[Job]] = {}
        for job in sorted(queue, key=self._order, reverse=True):
            tenants.setdefault(job.submit.tenant, []).append(job)
        served = {tenant: self._excess.get(tenant, 0.0) for tenant in tenants}

        def place(tenant: str) -> tuple[int, int, float, float, str]:
            priority, slack, sent = self._order(tenants[tenant][-1])
            return (priority, int(served[tenant] / QUANTUM), slack, sent, tenant)

        heads = [place(tenant) for tenant in tenants]
        heapify(heads)
        while heads:
            tenant = heappop(heads)[-1]
            job = tenants[tenant].pop()
            yield job
            served[tenant] += job.tokens + job.expected
            if tenants[tenant]:
                heappush(heads, place(tenant))

    def _play(self, jobs: list[Job]) -> dict[int, float]:
        """Return the seconds to the first token of each job (by ``id``) that has none yet."""
        queue = list(self._in_order([job for job in jobs if not job.decodes]))
        stage = _Stage(self, [job for job in jobs if job.decodes], sum(job.started for job in jobs))
        oldest = min((job for job in queue if job.started), key=lambda job: job.sent, default=None)
        found: dict[int, float] = {}
        for job in queue[:_MOST_PLAYED]:
            if not job.started:
                stage.take_place(job)
            slowed = oldest is not None and job is not oldest and id(oldest) not in found
            found[id(job)] = stage.prefill(job, _OVERTAKEN if slowed else 1.0)
            stage.decode(job)
        for job in queue[_MOST_PLAYED:]:
            found[id(job)] = stage.now_s * (1.0 + len(queue) / _MOST_PLAYED)
        return found


def _left(job: Job, now: float) -> float:
    return inf if job.submit.ttft_by is None else job.submit.ttft_by - now


class _Stage:
    """The engine, played forward: time passes in steps, streams end, places come free."""

    def __init__(self, forecast: Forecast, decoding: list[Job], running: int) -> None:
        self._forecast = forecast
        self._ends = [job.left for job in decoding for _ in range(job.submit.params.n)]
        """Steps at which streams end; a heap."""
        heapify(self._ends)
        self._context = sum(len(job.submit.token_ids) + job.answered for job in decoding)
        self._default_s = self._asked_s = inf
        for job in decoding:
            self._promise(job)
        self._running = running
        self._steps = 0.0
        self._paces: dict[tuple[int, int], tuple[float, float]] = {}
        # A step is under way, half done on average.
        self.now_s = 0.5 * self._step_s() if decoding else 0.0

    def _promise(self, job: Job) -> None:
        """Note what a stream was promised; it is kept for those that come after it too."""
        itl_s = job.submit.itl_s or inf
        if job.submit.itl_asked:
            self._asked_s = min(self._asked_s, itl_s)
        else:
            self._default_s = min(self._default_s, itl_s)

    def take_place(self, job: Job) -> None:
        """Wait until one more may run."""
        self._promise(job)
        over_share = self._forecast._excess.get(job.submit.tenant, 0.0) >= QUANTUM
        while self._ends and not self._has_place(len(job.submit.token_ids), over_share):
            self._pass(self._ends[0] - self._steps, self._step_s())
        self._running += job.submit.params.n

    def _has_place(self, context: int, over_share: bool) -> bool:
        if self._running >= self._forecast._max_running:
            return False
        context, count = self._context + context, self._running + 1
        cost = self._forecast.cost
        limit_s = crowd_limit_s(cost, context // count, self._default_s, self._asked_s, over_share=over_share)
        return limit_s == inf or cost.step_s(Shape().with_decodes(count, context)) <= limit_s

    def prefill(self, job: Job, slowed: float) -> float:
        """Compute a prompt beside what decodes; return when its first token is there."""
        left, step_s = job.tokens * slowed, 0.0
        while left > 0:
            chunk, step_s = self._pace(job)
            steps = left / chunk
            if self._ends and self._ends[0] - self._steps < steps:
                steps = max(0.0, self._ends[0] - self._steps)
            left -= steps * chunk
            self._pass(steps, step_s)
            if left < 0.5:
                break
        # It ends within a step, and the token is there when the step is over: half of one, on average.
        return self.now_s + 0.5 * step_s

    def decode(self, job: Job) -> None:
        """Let its stream begin."""
        for _ in range(job.submit.params.n):
            heappush(self._ends, self._steps + max(0.0, job.left - 1.0))
        self._context += len(job.submit.token_ids)
        self._promise(job)

    def _pass(self, steps: float, step_s: float) -> None:
        steps = max(0.0, steps)
        self.now_s += steps * step_s
        self._steps += steps
        while self._ends and self._ends[0] <= self._steps + 1e-9:
            heappop(self._ends)
            self._running -= 1
            self._context -= self._context // (len(self._ends) + 1)

    def _step_s(self) -> float:
        return self._forecast.cost.step_s(Shape().with_decodes(len(self._ends), self._context))

    def _pace(self, job: Job) -> tuple[float, float]:
        """Return tokens of the prompt a step, and the seconds of such a step."""
        start = job.known + job.tokens // 2
        key = (len(self._ends), start >> 9)
        found = self._paces.get(key)
        if found is None:
            forecast = self._forecast
            cost = forecast.cost
            shape = Shape().with_decodes(len(self._ends), self._context)
            limit = step_limit_s(cost, shape, min(self._default_s, self._asked_s), forecast._longest_step_s)
            most = max(1, forecast._step_tokens - len(self._ends))
            chunk = cost.room(shape, start, limit, most)
            if not self._ends:
                chunk = max(chunk, min(32, most))
            chunk = max(1, chunk)
            found = self._paces[key] = (float(chunk), cost.step_s(shape.with_prefill(chunk, start)))
        return found
