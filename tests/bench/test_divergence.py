from __future__ import annotations

import numpy as np
import pytest

from headway.bench.divergence import divergence, summary


def logits_of(*rows: list[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.log(np.array(rows, np.float32))


def test_equal_distributions_do_not_diverge_whatever_their_constant() -> None:
    one = logits_of([0.5, 0.25, 0.25], [0.1, 0.2, 0.7])
    kl, same, lost = divergence(one + np.float32(7), one, [0, 2])
    np.testing.assert_allclose(kl, 0, atol=1e-6)
    assert same.all()
    np.testing.assert_allclose(lost, [0], atol=1e-6)


def test_divergence_is_measured_from_the_reference() -> None:
    found, reference = logits_of([0.25, 0.75], [0.5, 0.5]), logits_of([0.5, 0.5], [0.5, 0.5])
    kl, same, lost = divergence(found, reference, [0, 0])
    assert kl[0] == pytest.approx(0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75))
    assert kl[1] == pytest.approx(0, abs=1e-7)
    assert same.tolist() == [False, True]
    assert lost.tolist() == [pytest.approx(np.log(2))]


def test_a_summary_joins_texts_by_position() -> None:
    found, reference = logits_of([0.25, 0.75], [0.5, 0.5]), logits_of([0.5, 0.5], [0.5, 0.5])
    whole = summary([divergence(found, reference, [0, 0]), divergence(reference, reference, [1, 1])])
    assert whole.positions == 4
    assert whole.mean_kl == pytest.approx(0.143841 / 4, rel=1e-4)
    assert whole.top1 == 0.75
    assert whole.perplexity_ratio == pytest.approx(2**0.5)


def test_logits_of_another_shape_are_refused() -> None:
    one = logits_of([0.5, 0.5])
    with pytest.raises(ValueError, match="for 2 tokens"):
        divergence(one, one, [0, 1])
