"""How far one model's next-token distributions lie from another's, over the same text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.bench.measure import percentile


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Of all positions of a text."""

    positions: int
    mean_kl: float
    """Kullback-Leibler divergence from the reference, in nats."""
    p99_kl: float
    top1: float
    """Share of positions whose likeliest token is the same."""
    perplexity_ratio: float
    """Perplexity of the text over the reference's."""


def divergence(
    found: NDArray[np.float32], reference: NDArray[np.float32], token_ids: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]:
    """Return KL, agreement of the likeliest token, and the log-probability lost on the text's next token.

    Both logits are [positions, vocabulary]; ``token_ids`` has one id per position, and the last predicts nothing.
    """
    if found.shape != reference.shape or len(token_ids) != len(found):
        raise ValueError(f"logits of {found.shape} and {reference.shape} for {len(token_ids)} tokens")
    ours, theirs = _log_softmax(found), _log_softmax(reference)
    kl = (np.exp(theirs) * (theirs - ours)).sum(-1)
    same = found.argmax(-1) == reference.argmax(-1)
    row, following = np.arange(len(token_ids) - 1), np.asarray(token_ids[1:], np.int64)
    return kl, same, theirs[row, following] - ours[row, following]


def summary(
    parts: Sequence[tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.float64]]],
) -> Divergence:
    """Join the results of several texts."""
    kl, same, lost = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return Divergence(
        positions=len(kl),
        mean_kl=float(kl.mean()),
        p99_kl=percentile(kl.tolist(), 0.99),
        top1=float(same.mean()),
        perplexity_ratio=float(np.exp(lost.mean())),
    )


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))
