"""Which tokens run in this step, and who holds the blocks.

A step is {sequence: number of tokens}; there are no phases. Running sequences that need one token go first, each step;
what is left goes to longer ones ("prefill") in the order

    priority, then the tenant that has had less, then least slack, then shortest remaining, then arrival,

so that a short prompt overtakes a long one, except that a quarter of it is kept for the oldest: the long one gets on.
Slack is the time until the first token is due, less what the prompt still takes (cost.py). A first token that is late
is due again after half as long as it was given at first, then counts as most urgent: what has missed its time
steps aside once, for those that can still meet theirs, and does not starve.

What is left is a token budget and a time: a step stays under the tightest inter-token target of the sequences that
decode in it, as far as the cost model can tell, so that no prompt freezes a stream.

Admission takes the blocks of all known tokens at once, so only a decode can lack a block. Then the least important
running sequence (highest priority number, latest arrival) is preempted: its blocks go back, its tokens are computed
again later. Importance never changes and preempted sequences come back in its order, before anything new of their
priority, when their tokens and a watermark fit: hence between two ends of sequences nobody is preempted twice (blocks
that waiting siblings give back aside), and the most important one always runs to its end.

While none of its tenant and priority is admitted, a waiting sequence gains one priority level per ``aging_s``;
admission obeys the gained level, so nobody starves in the queue; the share for the oldest sees to it afterwards.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import inf
from operator import attrgetter, itemgetter
from typing import NamedTuple

from headway.config import EngineConfig
from headway.engine.blocks import BlockPool, Match
from headway.engine.cost import CostModel, Shape
from headway.engine.fairness import Shares
from headway.engine.pace import crowd_limit_s, step_limit_s
from headway.engine.sequence import Group, Sequence, Status

_OLDEST_SHARE = 4
"""1/4 of the prefill budget is the oldest prefill's."""
_ALONE_TOKENS = 32
"""A chunk with no decode beside it has at least so many tokens, whatever they take: fewer waste the reading of the
weights."""
_CRUMB_TOKENS = 8
"""A chunk that would be shorter, and is not a prompt's rest, waits for the next step."""
_MOST_KINDS = 4096
"""Tenants and priorities whose last admission is remembered, before all are forgotten."""

_by_order = attrgetter("order")

Rank = tuple[int, int, int, float, int, tuple[int, int, int]]


class Item(NamedTuple):
    """A sequence's part of a step."""

    sequence: Sequence
    tokens: int


class Scheduler:
    """Holds the waiting and the running sequences; the only writer of their tables."""

    def __init__(self, config: EngineConfig, pool: BlockPool, cost: CostModel) -> None:
        self.pool = pool
        self.cost = cost
        self.step_tokens = config.step_tokens
        self.longest_step_s = config.longest_step_s
        self.shares = Shares()
        self._admitted_at: dict[tuple[str, int], float] = {}
        """When a sequence of this tenant and priority was last admitted, while some wait."""
        # A step computes at least one token of each running sequence, within the budget.
        self.max_running = min(config.max_running, config.step_tokens)
        self.aging_s = config.aging_s
        self.running: list[Sequence] = []
        """Sorted by importance."""
        self.waiting: dict[Sequence, None] = {}
        self.held_back = 0
        self._sharing: dict[Sequence, None] = {}
        """Waiting siblings that hold blocks of their prompt already."""
        self.preemptions = 0
        self.hit_tokens = 0
        self.miss_tokens = 0

    def add(self, group: Group) -> None:
        """Queue a request's first choice; its siblings are held back until the prompt is computed."""
        self.held_back += len(group.choices)
        for _ in group.choices:
            self.shares.enter(group.submit.tenant)
        self._queue(group.choices[0])

    def schedule(self, now: float) -> list[Item]:
        """Return this step's work, with blocks allocated; empty only when nothing is running or waiting."""
        items = self._decodes()
        shape = _decode_shape(items)
        budget = self.step_tokens - len(items)
        if budget <= 0:
            return items
        prefilling = [sequence for sequence in self.running if sequence.remaining > 1]
        limit_s = self._limit_s(items, shape)
        granted: dict[Sequence, int] = {}
        if prefilling:
            oldest = min(prefilling, key=lambda sequence: (sequence.group.number, sequence.index))
            whole = self._room(shape, oldest, 0, limit_s, budget)
            granted[oldest] = min(oldest.remaining, max(1, whole // _OLDEST_SHARE))
            budget -= granted[oldest]
            shape = shape.with_prefill(granted[oldest], oldest.computed, int(granted[oldest] == oldest.remaining))
        for sequence in self._candidates(prefilling, now):
            before = granted.get(sequence, 0)
            left = sequence.remaining - before
            if left <= 0:
                continue
            if budget <= 0 or (
                granted and self._room(shape, sequence, before, limit_s, budget) < min(left, _CRUMB_TOKENS)
            ):
                break
            if sequence.status is Status.WAITING and not (self._keeps_pace(sequence) and self._admit(sequence, now)):
                break  # the head of the queue keeps its turn: nothing overtakes it for want of blocks
            room = self._room(shape, sequence, before, limit_s, budget)
            take = min(sequence.remaining - before, room if granted else max(room, 1))
            if take <= 0:
                continue
            granted[sequence] = before + take
            budget -= take
            shape = shape.with_prefill(take, sequence.computed + before, int(before + take == sequence.remaining))
        items.extend(Item(sequence, tokens) for sequence, tokens in granted.items())
        return items

    def _limit_s(self, items: list[Item], shape: Shape) -> float:
        """Return what the step may take: the tightest target in it, less what predictions miss by."""
        target = min((item.sequence.group.itl_s for item in items), default=inf)
        return step_limit_s(self.cost, shape, target, self.longest_step_s)

    def _room(self, shape: Shape, sequence: Sequence, before: int, limit_s: float, budget: int) -> int:
        """Return how many more tokens of the sequence, ``before`` of which are granted, fit into the step."""
        most = min(budget, max(sequence.remaining - before, 1))
        room = self.cost.room(shape, sequence.computed + before, limit_s, most)
        if not shape.context:  # no decode waits for this step
            room = max(room, min(most, _ALONE_TOKENS - shape.rows))
        return room

    def _keeps_pace(self, sequence: Sequence) -> bool:
        """Whether all that run can decode together with this one within their targets."""
        if not self.running:
            return True
        default_s = asked_s = inf
        context = 0
        for other in (*self.running, sequence):
            group = other.group
            if group.itl_asked:
                asked_s = min(asked_s, group.itl_s)
            else:
                default_s = min(default_s, group.itl_s)
            context += len(other.tokens)
        count = len(self.running) + 1
        over_share = self.shares.excess(sequence.group.submit.tenant) > 0
        limit_s = crowd_limit_s(self.cost, context // count, default_s, asked_s, over_share=over_share)
        return limit_s == inf or self.cost.step_s(Shape().with_decodes(count, context)) <= limit_s

    def computed(self, item: Item) -> None:
        """Note that a step has run: offer full blocks to the prefix cache, let siblings start."""
        sequence, size = item.sequence, self.pool.block_tokens
        sequence.computed += item.tokens
        self.shares.charge(sequence.group.submit.tenant, item.tokens)
        while (sequence.registered + 1) * size <= sequence.computed and self.pool.prefix_cache:
            start = sequence.registered * size
            sequence.prefix = self.pool.register(
                sequence.table[sequence.registered],
                sequence.tokens[start : start + size],
                sequence.group.salt,
                sequence.prefix,
            )
            sequence.registered += 1
        if sequence.computed >= sequence.output_start and self.held_back:
            self._let_siblings_start(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in any phase; its blocks are free when this returns."""
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        elif sequence.status is Status.WAITING:
            del self.waiting[sequence]
        elif sequence.status is Status.HELD_BACK:
            self.held_back -= 1
        else:
            return
        sequence.status = Status.FINISHED
        self.shares.leave(sequence.group.submit.tenant)
        if not self.waiting or len(self._admitted_at) > _MOST_KINDS:
            self._admitted_at.clear()
        self._give_back(sequence)
        choices = sequence.group.choices
        if not any(choice.status in (Status.WAITING, Status.RUNNING) for choice in choices):
            # The one that computed the prompt is gone: the next sibling does it.
            heir = next((choice for choice in choices if choice.status is Status.HELD_BACK), None)
            if heir is not None:
                self._queue(heir)

    def check_integrity(self) -> str:
        """Return the first broken invariant of the pool against all live tables, or ""."""
        return self.pool.check_integrity(sequence.table for sequence in (*self.running, *self.waiting))

    def _decodes(self) -> list[Item]:
        """Sequences one token short, the most important first; victims are taken from the other end."""
        items = []
        pool, running = self.pool, self.running
        size, position = pool.block_tokens, 0
        while position < len(running):
            sequence = running[position]
            position += 1
            if len(sequence.tokens) - sequence.computed != 1:
                continue
            if len(sequence.table) * size <= sequence.computed and not self._grow(sequence):
                continue
            items.append(Item(sequence, 1))
        return items

    def _grow(self, sequence: Sequence) -> bool:
        """Allocate a sequence's next block, preempting for it; False when the sequence itself had to go."""
        if not self.pool.can_allocate(1):
            self._take_back_shared()
        while not self.pool.can_allocate(1):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.table.extend(self.pool.allocate(1))
        return True

    def _candidates(self, prefilling: list[Sequence], now: float) -> Iterator[Sequence]:
        """Prefilling and admissible waiting sequences in the order of service."""
        ranked = [(self._rank(s, s.group.submit.priority, now), s) for s in prefilling]
        returning: list[Sequence] = []
        if self.waiting and len(self.running) < self.max_running and (self.pool.available() or not self.running):
            ranked.extend((self._rank(s, self._level(s, now), now), s) for s in self.waiting)
            returning = sorted((s for s in self.waiting if s.preempted), key=_by_order)
        ranked.sort(key=itemgetter(0))
        for _, sequence in ranked:
            if sequence.status is Status.WAITING:
                if len(self.running) >= self.max_running:
                    continue
                first = next((s for s in returning if s.status is Status.WAITING), None)
                # Preempted ones return in order of importance; only a more important request goes before them.
                if (
                    first is not None
                    and first is not sequence
                    and (sequence.preempted or sequence.group.submit.priority >= first.group.submit.priority)
                ):
                    continue
            yield sequence

    def _level(self, sequence: Sequence, now: float) -> int:
        """Return a waiting sequence's priority after aging; one whose like is being served does not age."""
        group = sequence.group
        since = max(group.received, self._admitted_at.get((group.submit.tenant, group.submit.priority), 0.0))
        return group.submit.priority - int((now - since) / self.aging_s)

    def _rank(self, sequence: Sequence, level: int, now: float) -> Rank:
        """Return the place of a sequence in the order of service, smallest first."""
        group = sequence.group
        return (
            level,
            0 if sequence.preempted else 1,
            self.shares.excess(group.submit.tenant),
            group.due_at(now) - self.cost.prefill_s(sequence.remaining, sequence.computed),
            sequence.remaining,
            sequence.order,
        )

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Move a waiting sequence to the running ones if its blocks and a reserve can be had."""
        pool = self.pool
        match = Match((), 0, None)
        if not sequence.table and not sequence.scores_prompt:
            match = pool.match_prefix(sequence.tokens, sequence.group.salt)
        have = len(sequence.table) + len(match.blocks)
        need = pool.blocks_for(len(sequence.tokens)) - have
        if not pool.can_allocate(need + self._reserve(sequence), match.blocks):
            if self.running:
                return False
            # Nothing runs, so all that is held belongs to waiting siblings; alone, every accepted request fits.
            self._take_back_shared(keep=sequence)
            if not pool.can_allocate(need, match.blocks):
                return False
        pool.share(match.blocks)
        sequence.table.extend(match.blocks)
        sequence.table.extend(pool.allocate(need))
        if match.blocks:
            sequence.computed = match.tokens
            sequence.registered = len(match.blocks)
            sequence.prefix = match.prefix
        self._count_hits(sequence, match.tokens)
        del self.waiting[sequence]
        self._admitted_at[sequence.group.submit.tenant, sequence.group.submit.priority] = now
        self._sharing.pop(sequence, None)
        sequence.preempted = False
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_by_order)
        return True

    def _reserve(self, sequence: Sequence) -> int:
        """Blocks to leave over: one for each running sequence, and one for this one's own growth."""
        pool = self.pool
        grows = pool.blocks_for(sequence.most_tokens) > pool.blocks_for(len(sequence.tokens))
        return (len(self.running) + grows) if self.running else 0

    def _count_hits(self, sequence: Sequence, tokens: int) -> None:
        if not sequence.count_hits:
            return
        sequence.count_hits = False
        group = sequence.group
        if sequence.computed == tokens:  # not one that starts from a sibling's blocks
            self.hit_tokens += tokens
            self.miss_tokens += len(sequence.tokens) - tokens
            if sequence.index == 0:
                group.cached_tokens = tokens

    def _let_siblings_start(self, first: Sequence) -> None:
        """Give the held-back siblings the prompt's full blocks; each computes the rest of the prompt itself."""
        shared = (first.output_start - 1) // self.pool.block_tokens
        for sibling in first.group.choices:
            if sibling.status is not Status.HELD_BACK:
                continue
            sibling.table = first.table[:shared]
            self.pool.share(sibling.table)
            self._sharing[sibling] = None
            sibling.computed = shared * self.pool.block_tokens
            # The blocks are findable already; registering them again returns the same links.
            self._queue(sibling)

    def _take_back_shared(self, keep: Sequence | None = None) -> None:
        """Waiting siblings give the prompt's blocks back before anybody is preempted; they will compute it again."""
        for sequence in [sequence for sequence in self._sharing if sequence is not keep]:
            self._give_back(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._stop_running(sequence)
        self._give_back(sequence)
        sequence.preempted = True
        sequence.preemptions += 1
        self.preemptions += 1
        sequence.status = Status.WAITING
        self.waiting[sequence] = None

    def _give_back(self, sequence: Sequence) -> None:
        self._sharing.pop(sequence, None)
        self.pool.release(sequence.table)
        sequence.forget_computed()

    def _queue(self, sequence: Sequence) -> None:
        self.held_back -= 1
        sequence.status = Status.WAITING
        self.waiting[sequence] = None

    def _stop_running(self, sequence: Sequence) -> None:
        place = bisect_left(self.running, sequence.order, key=_by_order)
        assert self.running[place] is sequence
        del self.running[place]


def _decode_shape(items: list[Item]) -> Shape:
    """Return what a step of these decodes does."""
    return Shape(len(items), len(items), sum(item.sequence.computed + 1 for item in items), 0)
