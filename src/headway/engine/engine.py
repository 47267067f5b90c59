"""The loop: schedule, run, sample, emit.

One thread owns an Engine. Messages come in between steps, so whatever ends a request frees its blocks at once, and no
step that is running can read them.
"""

from __future__ import annotations

import heapq
import logging
import secrets
from collections import deque
from math import inf

from headway.config import EngineConfig
from headway.engine.blocks import BlockPool
from headway.engine.cost import CostModel, Shape
from headway.engine.messages import (
    Abort,
    AbortWaiting,
    Emitted,
    FromEngine,
    Logprobs,
    Outlook,
    Refused,
    Submit,
)
from headway.engine.messages import Status as StatusMessage
from headway.engine.sampler import Sampler, logprobs
from headway.engine.scheduler import Item, Scheduler
from headway.engine.sequence import End, Group, Sequence
from headway.engine.work import Runner, Work
from headway.errors import (
    ContextExceeded,
    DeadlineExceeded,
    EngineDied,
    HeadwayError,
    InvalidRequest,
    NeverFits,
    Overloaded,
    RequestTimeout,
)
from headway.kernels.draws import Floats
from headway.telemetry.clock import Clock
from headway.types import Finish, Load, Ran, StepReport

_log = logging.getLogger("headway.engine")

_KEPT_REPORTS = 4096


class Engine:
    """Turns Submits into Emitteds: every request ends in ``finish`` of all its choices, in one Refused, or by Abort."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        eos: frozenset[int],
        context_tokens: int,
        clock: Clock,
        model_salt: str = "",
        cost: CostModel | None = None,
    ) -> None:
        self.runner = runner
        self.clock = clock
        self.eos = eos
        self.context_tokens = context_tokens
        self.model_salt = model_salt
        self.max_waiting = config.max_waiting
        self.pool = BlockPool(runner.n_blocks, runner.block_tokens, config.prefix_cache)
        self.cost = cost or CostModel()
        self.scheduler = Scheduler(config, self.pool, self.cost)
        self.sampler = Sampler(runner.vocabulary, runner.draw)
        self.busy_since: float | None = None
        """Start of the step that is running; another thread may read it."""
        self.steps = 0
        self._groups: dict[str, Group] = {}
        self._numbers = 0
        self._deadlines: list[tuple[float, int, str]] = []
        """A heap of (instant, number, id); what ended earlier stays in it until its time."""
        self._out: list[FromEngine] = []
        """Leaves with the next step."""
        self._reports: deque[StepReport] = deque(maxlen=_KEPT_REPORTS)
        self._traced = 0
        """Steps whose report is still to name what ran."""
        self._freed: list[tuple[str, str, float]] = []
        self._integrity = ""
        self._checked_at_step = 0

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do or say something."""
        return bool(self._groups or self._out)

    def submit(self, submit: Submit) -> None:
        """Queue a request, or refuse it with the next step's messages."""
        now = self.clock.now()
        try:
            group = self._accept(submit, now)
        except HeadwayError as error:
            self._out.append(_refusal(submit.id, error))
            return
        self._groups[submit.id] = group
        for instant in (submit.start_by, submit.deadline):
            if instant is not None:
                heapq.heappush(self._deadlines, (instant, group.number, submit.id))
        self.scheduler.add(group)

    def abort(self, abort: Abort) -> None:
        """End a request, or a choice of it, at once and without a word."""
        group = self._groups.get(abort.id)
        if group is None:
            return
        ending = [choice for choice in group.live() if abort.index in (None, choice.index)]
        if ending:
            since = self.clock.now() if abort.since is None else abort.since
            self._end(group, ending, "" if abort.cause == "stop" else abort.cause, since)

    def abort_waiting(self, message: AbortWaiting) -> None:
        """Refuse every request that no step has run yet."""
        error = Overloaded("the server is shutting down; the request was not started", retry_after_s=1.0)
        for group in [group for group in self._groups.values() if not group.started]:
            self._refuse(group, error, "drain")

    def trace(self, steps: int) -> None:
        """Have the reports of the next steps name what ran in them."""
        self._traced = max(self._traced, steps)

    def fail_all(self, message: str) -> list[FromEngine]:
        """Refuse everything that is held; return the refusals and whatever had not left yet."""
        for group in list(self._groups.values()):
            self._refuse(group, EngineDied(message), "error")
        return self._leave()

    def step(self) -> list[FromEngine]:
        """Run one step; return what to say, in order."""
        start = self.busy_since = self.clock.now()
        self._expire(start)
        items = self.scheduler.schedule(start)
        if items:
            shape, decodes = _shape(items)
            predicted = self.cost.step_s(shape)
            try:
                logits = self._run(items, start)
                tokens = self._sample(items, logits)
            except Exception as error:
                self._fail(items, error)
            else:
                ran = _ran(items) if self._traced > 0 else ()
                self._emit(items, logits, tokens)
                self._report(shape, decodes, ran, predicted, len(tokens), start)
        self.busy_since = None
        return self._leave()

    def load(self) -> Load:
        """Return the present figures; the pool's invariants are checked when nothing is held."""
        scheduler, counts = self.scheduler, self.pool.counts()
        if not self._groups and self._checked_at_step != self.steps:
            self._checked_at_step = self.steps
            self._integrity = self._integrity or self.scheduler.check_integrity()
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + scheduler.held_back,
            blocks_held=counts.held,
            blocks_cached=counts.cached,
            blocks_free=counts.free,
            block_tokens=self.pool.block_tokens,
            capacity_tokens=self.pool.n_blocks * self.pool.block_tokens,
            steps=self.steps,
            preemptions=scheduler.preemptions,
            prefix_hit_tokens=scheduler.hit_tokens,
            prefix_miss_tokens=scheduler.miss_tokens,
            integrity=self._integrity,
        )

    def take_status(self) -> StatusMessage:
        """Return the heartbeat, with what happened since the last one."""
        status = StatusMessage(
            load=self.load(),
            outlook=self._outlook(),
            busy_since=self.busy_since,
            steps=tuple(self._reports),
            freed=tuple(self._freed),
        )
        self._reports.clear()
        self._freed.clear()
        return status

    def _outlook(self) -> Outlook:
        cost, scheduler = self.cost, self.scheduler
        return Outlook(
            terms=tuple(cost.terms),
            pace=cost.pace,
            error=cost.error,
            prefilling=tuple(
                (sequence.group.submit.id, sequence.remaining)
                for sequence in scheduler.running
                if not sequence.prefilled and sequence.index == 0
            ),
            excess=scheduler.shares.counters(),
        )

    def _accept(self, submit: Submit, now: float) -> Group:
        """Return the request's state, or raise what refuses it."""
        prompt, capacity = len(submit.token_ids), self.pool.n_blocks * self.pool.block_tokens
        most = self.context_tokens - prompt if submit.params.max_tokens is None else submit.params.max_tokens
        total = prompt + max(most, 0)
        if submit.id in self._groups:
            raise InvalidRequest(f"a request with the id {submit.id!r} is running")
        if prompt == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        # A row that does not exist would fail the whole step, and every neighbour in it.
        for token_id in (min(submit.token_ids), max(submit.token_ids)):
            if not 0 <= token_id < self.runner.vocabulary:
                limit = self.runner.vocabulary - 1
                raise InvalidRequest(f"token id {token_id} is outside the vocabulary 0..{limit}", param="prompt")
        if total > self.context_tokens:
            raise ContextExceeded(
                f"the prompt ({prompt} tokens) and max_tokens ({most}) make {total} tokens; "
                f"the context holds {self.context_tokens}"
            )
        if total > capacity:
            raise NeverFits(
                f"the prompt ({prompt} tokens) and max_tokens ({most}) make {total} tokens; "
                f"the KV cache holds {capacity}"
            )
        if min(submit.deadline or inf, submit.start_by or inf) <= now:
            raise DeadlineExceeded("the deadline had passed when the engine took the request over")
        if len(self.scheduler.waiting) >= self.max_waiting:
            raise Overloaded(f"{self.max_waiting} requests are waiting already", retry_after_s=1.0)
        self._numbers += 1
        return Group(
            submit,
            number=self._numbers,
            received=now,
            seed=secrets.randbits(63) if submit.params.seed is None else submit.params.seed,
            max_tokens=most,
            eos=self.eos.union(submit.ends),
            salt=(self.model_salt, submit.tenant),
        )

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, number, request_id = heapq.heappop(self._deadlines)
            group = self._groups.get(request_id)
            if group is None or group.number != number:
                continue
            over = group.submit.deadline is not None and group.submit.deadline <= now
            if group.started and not over:
                continue  # it began in time
            if group.started:
                error: HeadwayError = RequestTimeout("the request's time was up while it ran")
            else:
                error = DeadlineExceeded("the deadline passed while the request waited")
            self._refuse(group, error, "deadline", since=deadline)

    def _run(self, items: list[Item], now: float) -> Floats:
        work = []
        for sequence, tokens in items:
            start, end = sequence.computed, sequence.computed + tokens
            sequence.scheduled = sequence.scheduled or now
            sequence.steps += 1
            wanted = tokens if sequence.scores_prompt else int(_samples(sequence, tokens))
            work.append(Work(sequence.tokens[start:end], start, sequence.table, wanted))
        return self.runner.run(work)

    def _sample(self, items: list[Item], logits: Floats) -> dict[Sequence, tuple[int, int]]:
        """Return (token, its row) of each sequence whose known tokens are all computed now."""
        rows, row = {}, 0
        for sequence, tokens in items:
            samples = _samples(sequence, tokens)
            row += tokens if sequence.scores_prompt else int(samples)
            if samples and sequence.group.max_tokens > 0:
                rows[sequence] = row - 1
        assert row == len(logits)
        ids = self.sampler.sample(logits, list(rows.values()), list(rows))
        return {sequence: (token, at) for (sequence, at), token in zip(rows.items(), ids, strict=True)}

    def _emit(self, items: list[Item], logits: Floats, tokens: dict[Sequence, tuple[int, int]]) -> None:
        now, row = self.clock.now(), 0
        for item in items:
            sequence = item.sequence
            if sequence.scores_prompt:
                self._score_prompt(item, logits[row : row + item.tokens])
                row += item.tokens
            else:
                row += int(_samples(sequence, item.tokens))
            self.scheduler.computed(item)
            if sequence.remaining == 0:
                self._say(sequence, tokens.get(sequence), logits, now)

    def _score_prompt(self, item: Item, rows: Floats) -> None:
        """Note the log-probabilities of the prompt's tokens that follow the computed ones."""
        sequence = item.sequence
        if not sequence.prompt_logprobs:
            sequence.prompt_logprobs.append(None)
        top = sequence.group.submit.params.prompt_logprobs or 0
        for i in range(item.tokens):
            following = sequence.computed + i + 1
            if following < sequence.output_start:
                sequence.prompt_logprobs.append(logprobs(rows[i], sequence.tokens[following], top))

    def _say(self, sequence: Sequence, sampled: tuple[int, int] | None, logits: Floats, now: float) -> None:
        """Append the sampled token and emit it; end the sequence if it made an end."""
        params = sequence.group.submit.params
        first = not sequence.prefilled
        if first:
            sequence.prefilled = sequence.first_token = now
        end: End | None = End(Finish.LENGTH, None, False)  # of a request for no tokens at all
        details: tuple[Logprobs, ...] = ()
        if sampled is not None:
            token, row = sampled
            if params.logprobs is not None:
                details = (logprobs(logits[row], token, params.logprobs),)
            end = sequence.append(token)
        prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), []
        sequence.group.prompt_told = True
        if end is not None:
            self._end(sequence.group, [sequence], "", now)
        self._out.append(
            Emitted(
                id=sequence.group.submit.id,
                index=sequence.index,
                token_ids=() if sampled is None else (sampled[0],),
                logprobs=details,
                prompt_logprobs=prompt_logprobs,
                finish=end and end.finish,
                stop_reason=end and end.stop_reason,
                ended_by_token=end is not None and end.by_token,
                timing=sequence.timing(0.0 if end is None else now) if first or end is not None else None,
            )
        )

    def _fail(self, items: list[Item], error: Exception) -> None:
        """Refuse the requests of a step that raised; the others go on."""
        _log.error("a step of %d sequences failed", len(items), exc_info=error)
        for group in dict.fromkeys(item.sequence.group for item in items):
            self._refuse(group, HeadwayError(f"the engine failed in a step: {type(error).__name__}"), "error")

    def _refuse(self, group: Group, error: HeadwayError, cause: str, since: float | None = None) -> None:
        self._end(group, group.live(), cause, self.clock.now() if since is None else since)
        self._out.append(_refusal(group.submit.id, error))

    def _end(self, group: Group, choices: list[Sequence], cause: str, since: float) -> None:
        """Give back what choices hold; with a cause, note from which phase and how long after ``since``."""
        phases = {choice.phase for choice in choices}
        for choice in choices:
            self.scheduler.finish(choice)
            self.sampler.forget(choice)
        if not group.live():
            del self._groups[group.submit.id]
        if cause:
            phase = next(phase for phase in ("decode", "prefill", "queued") if phase in phases)
            self._freed.append((phase, cause, max(self.clock.now() - since, 0.0)))

    def _report(self, shape: Shape, decodes: int, ran: Ran, predicted: float, sampled: int, start: float) -> None:
        seconds = self.clock.now() - start
        self.cost.learn(shape, seconds)
        self.steps += 1
        self._traced -= bool(ran)
        self._reports.append(
            StepReport(
                started=start,
                seconds=seconds,
                predicted=predicted,
                decode_rows=decodes,
                prefill_tokens=shape.rows - decodes,
                context_tokens=shape.context,
                prefill_pairs=shape.pairs,
                sampled=sampled,
                ran=ran,
            )
        )

    def _leave(self) -> list[FromEngine]:
        out, self._out = self._out, []
        return out


def _shape(items: list[Item]) -> tuple[Shape, int]:
    """Return what a step does, and how many of its rows are decodes."""
    rows = logits = context = pairs = decodes = 0
    for sequence, tokens in items:
        rows += tokens
        logits += tokens if sequence.scores_prompt else int(_samples(sequence, tokens))
        if tokens == 1:
            decodes += bool(sequence.prefilled)
            context += sequence.computed + 1
        else:
            pairs += tokens * sequence.computed + tokens * (tokens + 1) // 2
    return Shape(rows, logits, context, pairs), decodes


def _ran(items: list[Item]) -> Ran:
    """Return (request, choice, tokens) of each part of a step."""
    return tuple((sequence.group.submit.id, sequence.index, tokens) for sequence, tokens in items)


def _samples(sequence: Sequence, tokens: int) -> bool:
    """Whether computing so many more tokens leads to the next token."""
    return tokens == sequence.remaining


def _refusal(request_id: str, error: HeadwayError) -> Refused:
    return Refused(id=request_id, code=error.code, message=error.message, retry_after_s=error.retry_after_s)
