"""Weights that are rounded as they are loaded."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.kernels.tensor import Float32
from headway.models.checkpoint.rounded import Bits, RoundedTensor, round_to_nearest, rounded
from tests.kernels.support import ArrayTensor


def normal(n: int, k: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal((n, k), dtype=np.float32)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([32, 64, 128]),
    rows=st.integers(1, 40),
    scale=st.sampled_from([1e-6, 1e-3, 1.0, 1e4]),
    shift=st.sampled_from([0.0, -3.0, 5.0]),
)
@example(seed=0, bits=4, group=32, rows=26, scale=1e4, shift=-3.0)  # minima beyond half precision's range
def test_every_weight_is_within_half_a_step_of_what_it_was(
    seed: int, bits: Bits, group: int, rows: int, scale: float, shift: float
) -> None:
    weight = (normal(rows, 256, seed) + np.float32(shift)) * np.float32(scale)
    found = round_to_nearest(weight, bits, group)
    step = np.repeat(found.scale, group, axis=1)
    # Half a step, and what half precision took from the scale and the minimum.
    slack = step * 0.51 + np.abs(weight) * 2**-10 + scale * 1e-7
    assert (np.abs(found.float32() - weight) <= slack).all()
    assert found.codes.max() < 2**bits


def test_groups_of_equal_weights_and_of_none_are_kept() -> None:
    weight = np.zeros((3, 128), np.float32)
    weight[1] = 2.0
    weight[2] = -0.5
    for bits in (4, 8):
        found = round_to_nearest(weight, bits, 64).float32()
        np.testing.assert_allclose(found, weight, rtol=1e-3)
        assert not found[0].any()


def test_a_large_matrix_is_rounded_as_its_rows_are() -> None:
    weight = normal(700, 512)
    whole = round_to_nearest(weight, 4, 128)
    part = round_to_nearest(weight[600:], 4, 128)
    np.testing.assert_array_equal(whole.float32()[600:], part.float32())


@pytest.mark.parametrize(("columns", "group"), [(256, 128), (576, 64), (96, 32)])
def test_the_widest_group_that_divides_the_columns_is_taken(columns: int, group: int) -> None:
    tensor = rounded(ArrayTensor("w", normal(4, columns)), 4)
    assert isinstance(tensor, RoundedTensor)
    affine = tensor.affine()
    assert (tensor.group, affine.group, tensor.kind) == (group, group, f"int4-g{group}")
    np.testing.assert_array_equal(tensor.float32(), affine.float32())


def test_what_has_no_groups_stays_as_it_is() -> None:
    for array in (np.ones(64, np.float32), normal(4, 40)):
        tensor = ArrayTensor("w", array)
        assert rounded(tensor, 8) is tensor
