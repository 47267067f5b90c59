"""The engine's mutable state of one request: a Group, and a Sequence for each of its n choices.

The scheduler writes status, table and computed; the engine appends tokens and notes instants. Nobody else writes.
"""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import NamedTuple

from headway.engine.blocks import Prefix, Salt
from headway.engine.messages import Logprobs, Submit
from headway.types import EngineTiming, Finish, Phase


class Status(Enum):
    """Where a Sequence is."""

    HELD_BACK = "held back"
    """A sibling of a choice that is still computing the prompt they share."""
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class End(NamedTuple):
    """Why a Sequence ended by itself."""

    finish: Finish
    stop_reason: int | None
    by_token: bool


class Sequence:
    """One choice of a request: its tokens, how many of them are computed, and the blocks that hold those."""

    __slots__ = (
        "computed",
        "count_hits",
        "first_token",
        "group",
        "index",
        "order",
        "output_start",
        "preempted",
        "preemptions",
        "prefilled",
        "prefix",
        "prompt_logprobs",
        "registered",
        "scheduled",
        "status",
        "steps",
        "table",
        "tokens",
    )

    def __init__(self, group: Group, index: int) -> None:
        self.group = group
        self.index = index
        self.order = (group.submit.priority, group.number, index)
        """Importance, smallest first: priority, then arrival. It never changes, so preemption cannot go in circles."""
        self.tokens: list[int] = list(group.submit.token_ids)
        """The prompt, then the output."""
        self.output_start = len(self.tokens)
        self.status = Status.HELD_BACK
        self.table: list[int] = []
        self.computed = 0
        """Tokens whose keys and values are in the table's blocks."""
        self.registered = 0
        """Full blocks offered to the prefix cache; ``prefix`` is the last one's link."""
        self.prefix: Prefix | None = None
        self.preempted = False
        """Waiting to be computed again."""
        self.count_hits = True
        """Not admitted yet: the next prefix look-up counts in the statistics."""
        self.preemptions = 0
        self.steps = 0
        self.scheduled = self.prefilled = self.first_token = 0.0
        self.prompt_logprobs: list[Logprobs | None] = []
        """Of the prompt's tokens so far, until they leave with the first token."""

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def n_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.output_start

    @property
    def most_tokens(self) -> int:
        """The length that the Sequence cannot exceed."""
        return self.output_start + self.group.max_tokens

    @property
    def phase(self) -> Phase:
        """How far it has come, for reports."""
        if self.prefilled:
            return "decode"
        return "prefill" if self.scheduled else "queued"

    @property
    def scores_prompt(self) -> bool:
        """Whether logits of all prompt positions are (still) needed: they bypass the prefix cache."""
        wanted = self.group.submit.params.prompt_logprobs is not None and not self.group.prompt_told
        return wanted and len(self.prompt_logprobs) < self.output_start

    def forget_computed(self) -> None:
        """Start over after the blocks were given back; the tokens stay."""
        self.table = []
        self.computed = self.registered = 0
        self.prefix = None
        self.prompt_logprobs = []

    def append(self, token: int) -> End | None:
        """Take the sampled token; return the end that it makes, if it does.

        An end token ends with ``stop`` also when it is the last that ``max_tokens`` allows.
        """
        self.tokens.append(token)
        params = self.group.submit.params
        if self.n_output > params.min_tokens:
            if token in params.stop_token_ids:
                return End(Finish.STOP, token, True)
            if token in self.group.eos:
                return End(Finish.STOP, None, True)
        if self.n_output >= self.group.max_tokens:
            return End(Finish.LENGTH, None, False)
        return None

    def timing(self, finished: float = 0.0) -> EngineTiming:
        """Return the instants and counts so far."""
        return EngineTiming(
            received=self.group.received,
            scheduled=self.scheduled,
            prefilled=self.prefilled,
            first_token=self.first_token,
            finished=finished,
            cached_tokens=self.group.cached_tokens if self.index == 0 else 0,
            preemptions=self.preemptions,
            steps=self.steps,
        )


class Group:
    """A request as the engine holds it; its choices share the prompt's blocks."""

    __slots__ = (
        "cached_tokens",
        "choices",
        "due",
        "eos",
        "itl_asked",
        "itl_s",
        "max_tokens",
        "number",
        "prompt_told",
        "received",
        "salt",
        "seed",
        "submit",
    )

    def __init__(
        self,
        submit: Submit,
        *,
        number: int,
        received: float,
        seed: int,
        max_tokens: int,
        eos: frozenset[int],
        salt: Salt,
    ) -> None:
        self.submit = submit
        self.number = number
        """Arrival order."""
        self.received = received
        self.seed = seed
        """The caller's, or drawn once: the same after preemption."""
        self.max_tokens = max_tokens
        self.eos = frozenset() if submit.params.ignore_eos else eos
        """The end-of-sequence tokens that count for this request."""
        self.salt = salt
        self.due = inf if submit.ttft_by is None else submit.ttft_by
        """When the first token should be there."""
        self.itl_s = inf if submit.itl_s is None else submit.itl_s
        """How long the stream may pause between two tokens."""
        self.itl_asked = submit.itl_asked
        self.cached_tokens = 0
        """Prompt tokens that the prefix cache held when the first choice was admitted."""
        self.prompt_told = False
        """The prompt's log-probabilities have left, with the first choice that got so far: once for all choices."""
        self.choices = [Sequence(self, index) for index in range(submit.params.n)]

    def due_at(self, now: float) -> float:
        """Return the instant that counts for urgency: a late first token is given half as long again, once."""
        return self.due if now <= self.due else self.due + 0.5 * max(self.due - self.received, 0.0)

    def live(self) -> list[Sequence]:
        """Return the choices that have not ended."""
        return [choice for choice in self.choices if choice.status is not Status.FINISHED]

    @property
    def started(self) -> bool:
        """Whether a step has run any of it."""
        return any(choice.scheduled for choice in self.choices)
