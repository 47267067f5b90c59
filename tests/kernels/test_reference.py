from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import CheckpointError
from headway.kernels.ops import KVLayout, Ops, Rope, Value
from headway.kernels.reference import ReferenceKernels
from headway.kernels.tensor import Float32
from tests.kernels.support import batch_of, compile_model, dense_attention, run_op

KERNELS = ReferenceKernels(threads=2)
QUICK = settings(max_examples=25, deadline=None)


def normal(*shape: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@QUICK
@given(rows=st.integers(1, 9), heads=st.integers(1, 4), width=st.integers(1, 40), offset=st.sampled_from([0.0, 1.0]))
def test_rms_norm_divides_each_head_by_its_root_mean_square(rows: int, heads: int, width: int, offset: float) -> None:
    x, weight = normal(rows, heads * width) * 5, normal(width, seed=1)
    found = run_op(
        KERNELS,
        lambda ops, v: ops.rms_norm(v, "w", eps=1e-5, weight_offset=offset, head_width=width),
        x,
        {"w": weight},
    )
    wide = x.astype(np.float64).reshape(rows, heads, width)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * (weight + offset)
    np.testing.assert_allclose(found, expected.reshape(rows, -1), rtol=1e-5, atol=1e-6)


@QUICK
@given(rows=st.integers(1, 40), width=st.integers(1, 60), out=st.integers(1, 300), bias=st.booleans())
def test_linear_is_a_matrix_product_plus_bias(rows: int, width: int, out: int, bias: bool) -> None:
    x, weight, b = normal(rows, width), normal(out, width, seed=1), normal(out, seed=2)
    found = run_op(
        KERNELS,
        lambda ops, v: ops.linear(v, "w", width=out, bias="b" if bias else None),
        x,
        {"w": weight, "b": b},
    )
    expected = x.astype(np.float64) @ weight.T.astype(np.float64) + (b if bias else 0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_products_over_the_same_rows_are_joined_with_the_same_result() -> None:
    x = normal(5, 24)
    weights = {name: normal(width, 24, seed=width) for name, width in (("a", 40), ("b", 16), ("c", 16))}

    def model(ops: Ops, v: Value) -> Value:
        a, b, c = (ops.linear(v, name, width=len(weights[name])) for name in "abc")
        back = ops.linear(a, "d", width=16)
        return ops.add(ops.add(b, c), back)

    d = normal(16, 40, seed=9)
    expected = x @ weights["b"].T + x @ weights["c"].T + x @ weights["a"].T @ d.T
    np.testing.assert_allclose(run_op(KERNELS, model, x, {**weights, "d": d}), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_rope_turns_each_pair_of_halves_by_position_times_frequency(factor: float) -> None:
    frequencies = (1.0, 0.3, 0.01)
    x = normal(7, 12)
    found = run_op(KERNELS, lambda ops, v: ops.rope(v, Rope(frequencies, factor), head_width=6), x)
    expected = np.zeros((7, 12))
    for row in range(7):
        for head in range(2):
            for i, frequency in enumerate(frequencies):
                a, b = float(x[row, head * 6 + i]), float(x[row, head * 6 + 3 + i])
                cos, sin = math.cos(row * frequency) * factor, math.sin(row * frequency) * factor
                expected[row, head * 6 + i] = a * cos - b * sin
                expected[row, head * 6 + 3 + i] = b * cos + a * sin
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_multiplies_the_activation_and_survives_extreme_values(activation: str) -> None:
    x = np.concatenate([normal(3, 8), np.array([[-1e4, -200, -90, -1, 0, 1, 200, 1e4]], np.float32)])
    up = normal(8, 8, seed=1)
    name = "silu" if activation == "silu" else "gelu_tanh"
    found = run_op(
        KERNELS,
        lambda ops, v: ops.gate(v, ops.linear(v, "up", width=8), activation=name),  # type: ignore[arg-type]
        x,
        {"up": up},
    )
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        silu = wide / (1 + np.exp(-wide))
    gelu = 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    expected = (silu if activation == "silu" else gelu) * (wide @ up.T)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_gate_of_many_rows_is_shared_between_threads_with_the_same_result() -> None:
    x = normal(300, 500) * 100
    found = run_op(KERNELS, lambda ops, v: ops.gate(v, v, activation="silu"), x)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float64) ** 2 / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_embed_looks_up_and_scales() -> None:
    x = normal(4, 6)
    found = run_op(KERNELS, lambda ops, v: ops.add(v, ops.embed("x", width=6, scale=3.0)), x)
    np.testing.assert_allclose(found, 4 * x, rtol=1e-6)


@QUICK
@given(rows=st.sampled_from([1, 3, 63, 64, 70]), softcap=st.sampled_from([None, 2.0]), data=st.data())
def test_head_gives_logits_of_the_chosen_rows_only(rows: int, softcap: float | None, data: st.DataObject) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1)))
    x, weight = normal(rows, 8), normal(50, 8, seed=1)

    def model(ops: Ops) -> Value:
        v = ops.embed("x", width=8)
        v = ops.add(v, ops.attend(*[ops.linear(v, "zero", width=8)] * 3, **ATTEND))  # type: ignore[arg-type]
        return ops.head(v, "w", width=50, softcap=softcap)

    weights = {"x": x, "w": weight, "zero": np.zeros((8, 8), np.float32)}
    program = compile_model(KERNELS, model, weights, n_blocks=20)
    batch = batch_of([(rows, 0, list(range(20)))], 4)
    batch = type(batch)(
        batch.token_ids, batch.positions, batch.starts, batch.lengths, batch.tables, np.array(chosen, np.int32)
    )
    expected = x[chosen].astype(np.float64) @ weight.T.astype(np.float64)
    if softcap:
        expected = softcap * np.tanh(expected / softcap)
    np.testing.assert_allclose(program.run(batch), expected, rtol=1e-4, atol=1e-5)


ATTEND = {"layer": 0, "heads": 1, "kv_heads": 1, "head_width": 8, "scale": 1.0}


@settings(max_examples=60, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    window=st.sampled_from([None, 1, 3, 8, 17]),
    softcap=st.sampled_from([None, 1.5]),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_paged_attention_equals_dense_attention_for_any_cutting(
    kv_heads: int, group: int, window: int | None, softcap: float | None, lengths: list[int], seed: int
) -> None:
    """Sequences run in random chunks, mixed in random order, over random blocks."""
    rng = np.random.default_rng(seed)
    width, block_tokens, heads = 6, 4, kv_heads * group
    total = sum(lengths)
    rows = normal(total, heads * width, seed=seed)
    names = {"q": heads, "k": kv_heads, "v": kv_heads}
    weights = {n: normal(h * width, heads * width, seed=h + i) for i, (n, h) in enumerate(names.items())}
    weights = {name: weight / np.float32(weight.shape[1] ** 0.5) for name, weight in weights.items()}
    weights |= {"x": rows, "identity": np.eye(heads * width, dtype=np.float32)}

    def model(ops: Ops) -> Value:
        x = ops.embed("x", width=heads * width)
        q, k, v = (ops.linear(x, name, width=h * width) for name, h in names.items())
        attended = ops.attend(
            q,
            k,
            v,
            layer=0,
            heads=heads,
            kv_heads=kv_heads,
            head_width=width,
            scale=0.3,
            window=window,
            softcap=softcap,
        )
        return ops.head(attended, "identity", width=heads * width)

    needed = [-(-length // block_tokens) for length in lengths]
    blocks = [int(block) for block in rng.permutation(sum(needed) + 3)]
    tables = [blocks[sum(needed[:i]) : sum(needed[: i + 1])] for i in range(len(lengths))]
    program = compile_model(KERNELS, model, weights, n_blocks=sum(needed) + 3, block_tokens=block_tokens)
    first_token = [sum(lengths[:i]) for i in range(len(lengths))]
    done = [0] * len(lengths)
    found = np.zeros((total, heads * width), np.float32)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        steps = []
        for i in rng.permutation(len(lengths)):
            chunk = min(int(rng.choice([0, 1, 1, 5, 40])), lengths[i] - done[i])
            if chunk:
                steps.append((int(i), chunk))
        if not steps:
            continue
        batch = batch_of([(chunk, done[i], tables[i]) for i, chunk in steps], block_tokens)
        places = np.concatenate([first_token[i] + done[i] + np.arange(chunk) for i, chunk in steps])
        batch.token_ids[:] = places
        found[places] = program.run(batch)
        for i, chunk in steps:
            done[i] += chunk
    for i, length in enumerate(lengths):
        part = slice(first_token[i], first_token[i] + length)
        q, k, v = (rows[part] @ weights[name].T for name in names)
        expected = dense_attention(q, k, v, heads=heads, kv_heads=kv_heads, scale=0.3, window=window, softcap=softcap)
        np.testing.assert_allclose(found[part], expected, rtol=1e-3, atol=1e-4)


def test_a_decode_row_is_the_same_alone_and_among_others_and_with_one_thread() -> None:
    """Close, not bitwise: OpenBLAS sums in another order for one row than for many."""
    results = []
    for threads, sequences in ((1, 1), (2, 1), (1, 6), (2, 6)):
        rows = normal(6, 12)

        def model(ops: Ops) -> Value:
            x = ops.embed("x", width=12)
            q, k, v = (ops.linear(x, name, width=12) for name in "qkv")
            a = ops.attend(q, k, v, layer=0, heads=2, kv_heads=2, head_width=6, scale=0.3)
            return ops.head(a, "q", width=12)

        weights = {"x": rows} | {name: normal(12, 12, seed=i) for i, name in enumerate("qkv")}
        program = compile_model(ReferenceKernels(threads), model, weights, n_blocks=6)
        results.append(program.run(batch_of([(1, 0, [i]) for i in range(sequences)], 4))[0].copy())
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-5, atol=1e-6)


def test_a_weight_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="weight 'w' is 3 x 6, but the config asks for 4 x 6"):
        run_op(KERNELS, lambda ops, v: ops.linear(v, "w", width=4), normal(2, 6), {"w": normal(3, 6)})


def test_block_bytes_counts_k_and_v_of_all_layers() -> None:
    assert KERNELS.block_bytes(KVLayout(layers=30, kv_heads=3, head_width=64), 32) == 30 * 3 * 64 * 32 * 2 * 4
