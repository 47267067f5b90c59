"""Each native Op against the reference or float64, on every instruction set that this machine runs."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.errors import ConfigError
from headway.kernels import has_native, pick_kernels
from headway.kernels.ops import Batch, Kernels, KVLayout, Ops, Rope, Value
from headway.kernels.reference import ReferenceKernels
from headway.kernels.tensor import Affine, Float32, Tensor
from headway.models.checkpoint.gguf import GGUFTensor
from headway.models.checkpoint.gguf_types import TYPES
from headway.models.checkpoint.rounded import rounded
from tests.kernels.support import AffineTensor, ArrayTensor, batch_of, compile_model, dense_attention, run_op
from tests.models.checkpoint.test_gguf_types import QUANTIZED, quantized

if not has_native():
    pytest.skip("built with HEADWAY_NATIVE=0", allow_module_level=True)

import headway.kernels.cpu._native as _native
from headway.kernels.cpu import NativeKernels, available
from headway.kernels.cpu.weights import Weights

Float64 = NDArray[np.float64]
ISAS = ("avx512", "avx2_vnni", "avx2", "neon", "scalar")
REFERENCE = ReferenceKernels()
QUICK = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module", params=ISAS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    if request.param not in available():
        pytest.skip(f"this processor has no {request.param}")
    return NativeKernels(2, request.param)


def normal(*shape: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def bfloat16(values: Float32) -> Float32:
    """Round to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + (bits >> 16 & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


def int8(values: Float32, width: int) -> Float32:
    """Round to 127 steps either way, of a scale per row and head."""
    heads = values.reshape(len(values), -1, width)
    largest = np.abs(heads).max(-1, keepdims=True)
    codes = np.rint(heads * (np.float32(127) / np.maximum(largest, np.float32(1e-36))))
    return np.asarray(codes * (largest / np.float32(127)), np.float32).reshape(values.shape)


def spread(values: Float32, width: int) -> Float32:
    """Turn each head by a Hadamard matrix, in blocks of the largest power of two in the width."""
    block = width & -width
    out = values.reshape(-1, block) * np.float32(1 / np.sqrt(np.float32(block)))
    half = 1
    while half < block:
        pairs = out.reshape(-1, 2, half)
        out = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        half *= 2
    return np.asarray(out, np.float32).reshape(values.shape)


# ---- rows


@QUICK
@given(rows=st.integers(1, 9), heads=st.integers(1, 4), width=st.integers(1, 70), offset=st.sampled_from([0.0, 1.0]))
def test_rms_norm(kernels: Kernels, rows: int, heads: int, width: int, offset: float) -> None:
    x, weight = normal(rows, heads * width) * 5, normal(width, seed=1)

    def op(ops: Ops, v: Value) -> Value:
        return ops.rms_norm(v, "w", eps=1e-5, weight_offset=offset, head_width=width)

    expected = run_op(REFERENCE, op, x, {"w": weight})
    np.testing.assert_allclose(run_op(kernels, op, x, {"w": weight}), expected, rtol=1e-5, atol=1e-6)


@QUICK
@given(rows=st.integers(1, 20), heads=st.integers(1, 3), half=st.integers(1, 40), factor=st.sampled_from([1.0, 1.25]))
def test_rope(kernels: Kernels, rows: int, heads: int, half: int, factor: float) -> None:
    frequencies = tuple(float(np.float32(10000.0 ** (-i / half))) for i in range(half))
    x = normal(rows, heads * 2 * half)

    def op(ops: Ops, v: Value) -> Value:
        return ops.rope(v, Rope(frequencies, factor), head_width=2 * half)

    np.testing.assert_allclose(run_op(kernels, op, x), run_op(REFERENCE, op, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 70])
def test_gate_survives_extreme_values(kernels: Kernels, activation: Any, rows: int) -> None:
    x = normal(rows, 40) * np.float32(30)
    x[0, :8] = [-1e4, -200, -90, -1, 0, 1, 200, 1e4]
    found = run_op(kernels, lambda ops, v: ops.gate(v, v, activation=activation), x)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        silu = wide / (1 + np.exp(-wide))
    gelu = 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    expected = (silu if activation == "silu" else gelu) * wide
    # 1 + tanh cancels for large negative values: what is left is small beside the value itself.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4 if activation == "gelu_tanh" else 1e-6)


@QUICK
@given(rows=st.integers(1, 40), width=st.integers(1, 70), scale=st.sampled_from([1.0, 3.0]))
def test_embed_and_add(kernels: Kernels, rows: int, width: int, scale: float) -> None:
    x = normal(rows, width)
    found = run_op(kernels, lambda ops, v: ops.add(v, ops.embed("x", width=width, scale=scale)), x)
    np.testing.assert_allclose(found, (1 + scale) * x, rtol=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("words", [1, 15, 16, 50])
def test_head_gives_logits_of_the_chosen_rows_only(kernels: Kernels, softcap: float | None, words: int) -> None:
    rows, chosen = 70, np.array([0, 3, 68, 69], np.int32)
    x, weight = normal(rows, 16), normal(words, 16, seed=1)

    def model(ops: Ops) -> Value:
        v = ops.embed("x", width=16)
        zero = ops.linear(v, "zero", width=16)
        v = ops.add(v, ops.attend(zero, zero, zero, layer=0, heads=1, kv_heads=1, head_width=16, scale=1.0))
        return ops.head(v, "w", width=words, softcap=softcap)

    weights = {"x": x, "w": weight, "zero": np.zeros((16, 16), np.float32)}
    program = compile_model(kernels, model, weights, n_blocks=5, block_tokens=16)
    b = batch_of([(rows, 0, list(range(5)))], 16)
    expected = x[chosen].astype(np.float64) @ weight.T.astype(np.float64)
    if softcap:
        expected = softcap * np.tanh(expected / softcap)
    found = program.run(Batch(b.token_ids, b.positions, b.starts, b.lengths, b.tables, chosen))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    none = program.run(Batch(b.token_ids, b.positions, b.starts, b.lengths, b.tables, chosen[:0]))
    assert none.shape == (0, words)


# ---- products


@QUICK
@given(
    rows=st.integers(1, 20),
    width=st.integers(1, 70),
    out=st.integers(1, 70),
    bias=st.booleans(),
    kind=st.sampled_from(["f32", "bf16", "f16"]),
)
def test_dense_linear(kernels: Kernels, rows: int, width: int, out: int, bias: bool, kind: str) -> None:
    x, weight, b = normal(rows, width), normal(out, width, seed=1), normal(out, seed=2)
    if kind == "bf16":
        weight = bfloat16(weight)
    elif kind == "f16":
        weight = weight.astype(np.float16).astype(np.float32)

    def op(ops: Ops, v: Value) -> Value:
        return ops.linear(v, "w", width=out, bias="b" if bias else None)

    found = run_op(kernels, op, x, {"w": weight, "b": b})
    expected = x.astype(np.float64) @ weight.T.astype(np.float64) + (b if bias else 0)
    # Float32 sums: an error of one unit in the last place of the whole for each of the width additions.
    size = np.abs(x) @ np.abs(weight).T + np.abs(b)
    assert (np.abs(found - expected) <= (width + 2) * 2.0**-24 * size).all()


def random_affine(rows: int, columns: int, *, bits: int, group: int, zero: int, offset: bool, seed: int = 0) -> Affine:
    rng = np.random.default_rng(seed)
    groups = columns // group
    scale = np.exp(rng.standard_normal((rows, groups)) - 4).astype(np.float32)
    return Affine(
        codes=rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint8),
        scale=scale,
        zero=zero,
        offset=(-scale * rng.uniform(0, 1 << bits, scale.shape)).astype(np.float32) if offset else None,
        group=group,
        bits=bits,
    )


def weight_of(name: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return a random weight of a GGUF kind (``q4_k``) or of our own (``int4-g128-zero``, ``int8-g64-min``)."""
    if name.startswith("int"):
        bits, group, form = name[3:].split("-")
        size = columns if group == "channel" else int(group[1:])
        zero = {"sym": 1 << int(bits) - 1, "zero": 5, "min": 0}[form]
        affine = random_affine(rows, columns, bits=int(bits), group=size, zero=zero, offset=form == "min", seed=seed)
        return AffineTensor("w", affine)
    block = next(block for block in TYPES.values() if block.kind == name)
    return GGUFTensor("w", (rows, columns), block, quantized(block, rows, columns, seed).reshape(-1))


GGUF_KINDS = [TYPES[number].kind for number in QUANTIZED]
OWN_KINDS = ["int8-channel-sym", "int8-g32-sym", "int8-g64-min", "int8-g128-zero"]
OWN_KINDS += [f"int4-{group}-{form}" for group in ("g16", "g32", "g64", "g128") for form in ("sym", "zero", "min")]


def by_group(values: NDArray[Any], group: int) -> NDArray[Any]:
    return values.reshape(len(values), -1, group)


def quantized_rows(x: Float32, group: int) -> tuple[Float64, Float64]:
    """Return codes [rows, groups, group] and scales [rows, groups, 1] of activations, as decision 5 fixes them."""
    parts = by_group(x, group)
    most = np.abs(parts).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    return np.rint(parts * inverse).astype(np.float64), (most / np.float32(127)).astype(np.float64)


@pytest.mark.parametrize("name", GGUF_KINDS + OWN_KINDS)
@pytest.mark.parametrize(("rows", "out"), [(1, 1), (2, 33), (7, 16), (21, 70)])
def test_quantized_linear_is_the_arithmetic_of_decision_5(kernels: Kernels, name: str, rows: int, out: int) -> None:
    columns = 512
    tensor = weight_of(name, out, columns, seed=rows)
    affine = tensor.affine()
    assert affine is not None
    x = normal(rows, columns, seed=3) * np.exp(normal(1, columns, seed=4))
    x[:, 32:64] = 0  # a group without a value
    found = run_op(kernels, lambda ops, v: ops.linear(v, "w", width=out), x, {"w": tensor})

    codes, scales = quantized_rows(x, affine.group)
    centred = by_group(affine.codes.astype(np.float64) - affine.zero, affine.group)
    low = np.zeros_like(affine.scale) if affine.offset is None else affine.offset
    dots = np.einsum("rgk,ngk->rng", codes, centred)
    parts = dots * affine.scale * scales[:, None, :, 0] + low * (scales * codes.sum(-1, keepdims=True))[:, None, :, 0]
    size = np.abs(dots * affine.scale * scales[:, None, :, 0]) + np.abs(
        low * (scales * codes.sum(-1, keepdims=True))[:, None, :, 0]
    )
    # Scales and minima are kept in half precision (exact for kinds that store it), sums are float32.
    exact = name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
    bound = (2.0**-20 if exact else 2.0**-11) * size.sum(-1)
    assert (np.abs(found - parts.sum(-1)) <= bound + 1e-30).all()

    # And the arithmetic is near the true product: activations move by half a step of their group at most.
    true = x.astype(np.float64) @ tensor.float32().astype(np.float64).T
    weight = by_group(np.abs(tensor.float32()).astype(np.float64), affine.group)
    half_steps = np.einsum("rg,ngk->rn", scales[:, :, 0] * 0.5001, weight)
    assert (np.abs(found - true) <= half_steps + bound + 1e-30).all()


@pytest.mark.parametrize("name", GGUF_KINDS + OWN_KINDS)
def test_rows_of_a_quantized_table(kernels: Kernels, name: str) -> None:
    tensor = weight_of(name, 37, 512)
    ids = np.array([0, 36, 15, 16, 17, 5, 5], np.int32)

    def model(ops: Ops) -> Value:
        v = ops.embed("table", width=512)
        zero = ops.linear(v, "zero", width=16)
        nothing = ops.attend(zero, zero, zero, layer=0, heads=1, kv_heads=1, head_width=16, scale=1.0)
        v = ops.add(v, ops.linear(nothing, "back", width=512))
        return ops.head(v, "identity", width=512)

    weights: dict[str, Any] = {
        "table": tensor,
        "zero": np.zeros((16, 512), np.float32),
        "back": np.zeros((512, 16), np.float32),
        "identity": np.eye(512, dtype=np.float32),
    }
    program = compile_model(kernels, model, weights, n_blocks=1, block_tokens=16)
    batch = batch_of([(len(ids), 0, [0])], 16)
    batch.token_ids[:] = ids
    expected = tensor.float32()[ids]
    np.testing.assert_allclose(program.run(batch), expected, rtol=2.0**-9, atol=2.0**-10 * np.abs(expected).max())


def test_joined_products_equal_each_alone_and_kinds_may_differ(kernels: Kernels) -> None:
    x = normal(5, 256)
    weights = {"a": weight_of("q4_k", 40, 256), "b": weight_of("q6_k", 16, 256), "c": weight_of("q4_k", 16, 256)}

    def one(name: str) -> Float32:
        return run_op(kernels, lambda ops, v: ops.linear(v, name, width=weights[name].shape[0]), x, weights)

    def pair(ops: Ops, v: Value, first: str, second: str) -> Value:
        values = {name: ops.linear(v, name, width=weights[name].shape[0]) for name in (first, second)}
        return ops.add(values["b"], values["c"]) if first == "b" else values["c"]

    np.testing.assert_array_equal(run_op(kernels, lambda ops, v: pair(ops, v, "a", "c"), x, weights), one("c"))
    np.testing.assert_array_equal(
        run_op(kernels, lambda ops, v: pair(ops, v, "b", "c"), x, weights), one("b") + one("c")
    )


def test_no_number_stays_none_and_touches_no_other_row(kernels: Kernels) -> None:
    weights = {"w": weight_of("q4_1", 40, 64)}

    def op(ops: Ops, v: Value) -> Value:
        return ops.linear(v, "w", width=40)

    x = normal(6, 64)
    plain = run_op(kernels, op, x, weights, apart=True)
    x[1, 3], x[2, 40], x[4, 0] = np.nan, np.inf, -np.inf
    x[5] = np.float32(1e-40)
    found = run_op(kernels, op, x, weights, apart=True)
    assert np.isnan(found[[1, 2, 4]]).all()
    np.testing.assert_array_equal(found[[0, 3]], plain[[0, 3]])
    np.testing.assert_allclose(found[5], 0, atol=1e-36)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_scale_shows_in_its_channel_only(kernels: NativeKernels, bad: float) -> None:
    affine = random_affine(20, 64, bits=4, group=32, zero=8, offset=False)
    native = _native.Program(kernels.isa, 1, 1, 1, 16, 1, 16)
    x, out = normal(2, 64), np.empty((2, 2, 20), np.float32)
    native.linear(native.add_quantized(affine.codes, affine.scale, None, 32, 4, 8), x, out[0])
    affine.scale[7, 1] = bad
    native.linear(native.add_quantized(affine.codes, affine.scale, None, 32, 4, 8), x, out[1])
    assert not np.isfinite(out[1][:, 7]).any()
    others = np.arange(20) != 7
    np.testing.assert_array_equal(out[1][:, others], out[0][:, others])


# ---- attention


@settings(max_examples=40, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    width=st.sampled_from([16, 48, 64]),
    block_tokens=st.sampled_from([16, 32, 128]),
    window=st.sampled_from([None, 1, 3, 40, 130]),
    softcap=st.sampled_from([None, 1.5]),
    kv_dtype=st.sampled_from(["bf16", "int8"]),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_paged_attention_equals_dense_attention_for_any_cutting(
    kernels: Kernels,
    kv_heads: int,
    group: int,
    width: int,
    block_tokens: int,
    window: int | None,
    softcap: float | None,
    kv_dtype: Literal["bf16", "int8"],
    lengths: list[int],
    seed: int,
) -> None:
    """Sequences run in random chunks, mixed in random order, over random blocks; contexts cross spans of 128."""
    rng = np.random.default_rng(seed)
    kernels = NativeKernels(2, kernels.isa, kv_dtype)
    heads = kv_heads * group
    total = sum(lengths)
    q, k, v = (normal(total, count * width, seed=seed + i) for i, count in enumerate((heads, kv_heads, kv_heads)))

    def model(ops: Ops) -> Value:
        values = [
            ops.embed(name, width=count * width) for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        ]
        attended = ops.attend(
            *values,
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
    weights = {"q": q, "k": k, "v": v, "identity": np.eye(heads * width, dtype=np.float32)}
    program = compile_model(kernels, model, weights, n_blocks=sum(needed) + 3, block_tokens=block_tokens)
    first_token = [sum(lengths[:i]) for i in range(len(lengths))]
    done = [0] * len(lengths)
    found = np.zeros((total, heads * width), np.float32)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        steps = []
        for i in rng.permutation(len(lengths)):
            chunk = min(int(rng.choice([0, 1, 5, 40, 200])), lengths[i] - done[i])
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
        stored = (
            (q[part], bfloat16(k[part]), bfloat16(v[part]))
            if kv_dtype == "bf16"
            else (spread(q[part], width), int8(spread(k[part], width), width), int8(v[part], width))
        )
        expected = dense_attention(
            *stored,
            heads=heads,
            kv_heads=kv_heads,
            scale=0.3,
            window=window,
            softcap=softcap,
        )
        np.testing.assert_allclose(found[part], expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_key_is_seen_by_later_rows_of_its_sequence_only(
    kernels: Kernels, kv_dtype: Literal["bf16", "int8"], bad: float
) -> None:
    """And not by a sequence that gets the same block afterwards."""

    def model(ops: Ops) -> Value:
        value = ops.embed("x", width=32)
        attended = ops.attend(value, value, value, layer=0, heads=2, kv_heads=2, head_width=16, scale=0.3)
        return ops.head(attended, "identity", width=32)

    x = normal(40, 32)
    x[20, 3] = bad
    weights = {"x": x, "identity": np.eye(32, dtype=np.float32)}
    program = compile_model(NativeKernels(2, kernels.isa, kv_dtype), model, weights, n_blocks=4, block_tokens=16)
    found = program.run(batch_of([(40, 0, [0, 1, 2])], 16)).copy()
    assert np.isfinite(found[:20]).all()
    assert not np.isfinite(found[20:]).any()
    again = batch_of([(18, 0, [2, 1])], 16)
    again.token_ids[:] = np.arange(18)
    np.testing.assert_array_equal(program.run(again), found[:18])


@pytest.mark.parametrize(("kv_dtype", "bytes_"), [("bf16", 2 * 64 * 2), ("int8", 2 * 64 + 2 * 4)])
def test_memory_of_a_block(kv_dtype: Literal["bf16", "int8"], bytes_: int) -> None:
    kv = KVLayout(layers=3, kv_heads=2, head_width=64)
    assert NativeKernels(1, "scalar", kv_dtype).block_bytes(kv, 32) == 3 * 2 * 32 * bytes_


# ---- loading


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", *GGUF_KINDS])
def test_memory_of_a_weight_is_what_was_predicted(name: str) -> None:
    tensor: Any
    if name in ("f32", "f16", "bf16"):
        values = normal(33, 512)
        values = {"f32": values, "f16": values.astype(np.float16).astype(np.float32), "bf16": bfloat16(values)}[name]
        tensor = AffineTensor("w", random_affine(33, 512, bits=4, group=32, zero=8, offset=False), name)
        tensor.float32, tensor.affine = (lambda: values), (lambda: None)
    else:
        tensor = weight_of(name, 33, 512)
    native = _native.Program("", 1, 1, 1, 16, 1, 16)
    Weights(native, {"w": tensor}).load([("w",)], [])
    assert native.weight_bytes == NativeKernels(1).weight_bytes([tensor])


def test_what_cannot_run_is_refused_with_the_reason() -> None:
    def model(width: int, ops: Ops) -> Value:
        v = ops.embed("x", width=width)
        return ops.head(ops.attend(v, v, v, layer=0, heads=1, kv_heads=1, head_width=width, scale=1.0), "x", width=4)

    kernels = NativeKernels(1)
    for width, block_tokens, message in (
        (24, 16, "heads of a multiple of 16 up to 256, this model has 24"),
        (512, 16, "this model has 512"),
        (32, 8, "engine.block_tokens is 8; the native kernels take 16, 32, 64, 128"),
    ):
        with pytest.raises(ConfigError, match=message):
            compile_model(kernels, lambda ops, w=width: model(w, ops), {}, block_tokens=block_tokens)  # type: ignore[misc]


def test_an_unknown_instruction_set_names_those_that_run_here() -> None:
    with pytest.raises(ConfigError, match=r"HEADWAY_ISA is 'sse9'; this machine runs .*scalar"):
        pick_kernels("auto", 1, "sse9")
    assert pick_kernels("cpu", 1, "scalar").isa == "scalar"
    assert pick_kernels("auto", 1).isa == available()[0]


@pytest.mark.parametrize("name", GGUF_KINDS)
@pytest.mark.parametrize("shapes", [(1,), (16,), (37,), (20, 4, 13)])
def test_a_files_blocks_become_the_weight_that_their_codes_and_scales_make(name: str, shapes: tuple[int, ...]) -> None:
    """Unpacked by the library, in one pass, or by NumPy first: the same bits; parts lie one after another."""
    import headway.kernels.cpu._native as _native

    columns, rows = 512, sum(shapes)
    parts = [weight_of(name, count, columns, seed=count) for count in shapes]
    affine = [part.affine() for part in parts]
    blocks = [part.blocks() for part in parts]
    program = _native.Program("", 2, 1, 1, 16, 1, 16)
    x = normal(9, columns, seed=5)
    found, wanted = np.empty((2, 9, rows), np.float32), np.empty((rows, columns), np.float32)
    first = program.add_blocks(name, columns, [one for one in blocks if one is not None])
    whole = [one for one in affine if one is not None]
    offsets = [one.offset for one in whole if one.offset is not None]
    second = program.add_quantized(
        np.concatenate([one.codes for one in whole]),
        np.concatenate([one.scale for one in whole]),
        np.concatenate(offsets) if offsets else None,
        whole[0].group,
        4 if whole[0].bits <= 4 else 8,
        whole[0].zero,
    )
    ids = np.arange(rows, dtype=np.int32)
    rebuilt = np.empty_like(wanted)
    program.linear(first, x, found[0])
    program.linear(second, x, found[1])
    program.embed(first, ids, rebuilt)
    program.embed(second, ids, wanted)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(rebuilt, wanted)
    assert np.isfinite(wanted).all()
    assert wanted.std() > 0


def test_a_fast_prefill_is_said_to_be_exact_where_no_kernel_is_faster(caplog: pytest.LogCaptureFixture) -> None:
    weights = {"table": normal(20, 16), "w": normal(16, 16)}

    def model(ops: Ops) -> Value:
        x = ops.embed("table", width=16)
        x = ops.attend(x, x, x, layer=0, heads=1, kv_heads=1, head_width=16, scale=1.0)
        return ops.head(ops.linear(x, "w", width=16), "table", width=20)

    for prefill, warned in (("exact", False), ("fast", True)):
        kernels = NativeKernels(1, "scalar", prefill=cast("Any", prefill))
        compile_model(kernels, model, weights, n_blocks=2, block_tokens=16)
        assert ("on scalar prefill is exact" in caplog.text) == warned


@pytest.mark.parametrize("kind", ["int4-g128", "int4-g32", "int8-g64"])
def test_memory_of_rounded_weights_is_what_they_take(kind: str) -> None:
    bits, group = kind[3:].split("-g")
    tensor = rounded(ArrayTensor("w", normal(50, int(group) * 3)), cast("Any", int(bits)))
    weights: dict[str, Any] = {"table": tensor, "w": normal(16, tensor.shape[1])}

    def model(ops: Ops) -> Value:
        x = ops.linear(ops.embed("table", width=tensor.shape[1]), "w", width=16)
        return ops.head(ops.attend(x, x, x, layer=0, heads=1, kv_heads=1, head_width=16, scale=1.0), "h", width=20)

    weights["h"] = normal(20, 16)
    kernels = NativeKernels(1, "scalar")
    program = compile_model(kernels, model, weights, n_blocks=2, block_tokens=16)
    assert tensor.kind == kind
    rest = kernels.weight_bytes([ArrayTensor("", cast("Any", weights[name])) for name in ("w", "h")])
    assert cast("Any", program).native.weight_bytes == kernels.weight_bytes([tensor]) + rest
