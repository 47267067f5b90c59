"""What a step may take, and how many streams may run, so that streams keep their targets and prompts get on.

The scheduler obeys these two rules and the forecast plays by them; both must see the same engine.
"""

from __future__ import annotations

from math import inf

from headway.engine.cost import CostModel, Shape

_DECODE_SHARE = 0.6
"""Streams are let in while their decodes alone take this much of the target: the rest of it is for prompts."""
_STRETCH = 1.25
"""Prefill may make a step this much longer even where decodes alone take all that their target allows."""
_OVER_SHARE = 0.85
"""Of the crowd's limit, for tenants that have had more than others: the rest is kept for those, who then need not wait
for a stream to end."""
_FEW = 2.0
"""A default target keeps nobody out while all streams together decode in this multiple of what one takes alone: where
a default is out of reach for the machine, some streams still share a step."""


def margin(cost: CostModel) -> float:
    """Return the share of a limit that predictions may fill, since they err."""
    return 1.0 / (1.0 + min(cost.error, 0.5))


def step_limit_s(cost: CostModel, decodes: Shape, target_s: float, longest_s: float) -> float:
    """Return what a step with these decodes may be predicted to take; ``target_s`` is the tightest of theirs."""
    return max(min(target_s * margin(cost), longest_s), _STRETCH * cost.step_s(decodes))


def crowd_limit_s(cost: CostModel, context: int, default_s: float, asked_s: float, *, over_share: bool) -> float:
    """Return what the decodes of all streams together may take if one more is let in.

    ``context`` is that of one stream; the targets are the tightest of those by default and of those that were asked
    for, which are kept even if a stream has to run alone for it. ``over_share``: the newcomer's tenant has had more
    tokens than another that has work.
    """
    if default_s == inf and asked_s == inf:
        return inf
    share = _DECODE_SHARE * margin(cost) * (_OVER_SHARE if over_share else 1.0)
    alone_s = cost.step_s(Shape().with_decode(context))
    return min(max(share * default_s, _FEW * alone_s), max(share * asked_s, _STRETCH * alone_s))
