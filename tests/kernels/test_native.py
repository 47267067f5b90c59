"""The native library's border: nothing that Python hands over may crash it, and its threads come and go cleanly."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.kernels import has_native

if not has_native():
    pytest.skip("built with HEADWAY_NATIVE=0", allow_module_level=True)

import headway.kernels.cpu._native as native

Op = native.Op
Before = native.Before
F32, U8, I32 = np.float32, np.uint8, np.int32
WIDTH, WORDS, BLOCKS, BLOCK_TOKENS = 32, 50, 6, 16


def i32(*values: int) -> NDArray[np.int32]:
    return np.array(values, I32)


def start(threads: int = 2, **changes: Any) -> native.Program:
    sizes = {"layers": 1, "n_blocks": BLOCKS, "block_tokens": BLOCK_TOKENS, "kv_heads": 1, "width": WIDTH}
    return native.Program("", threads, **{**sizes, **changes})


def table() -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((WORDS, WIDTH), dtype=F32)


def filled(threads: int = 2) -> native.Program:
    """Return a program: embed, norm, attend over itself, add, gate, rope, head."""
    program = start(threads)
    weight = program.add_f32(table())
    norm = program.add_vector(np.ones(WIDTH, F32))
    rope = program.add_rope(np.ones(WIDTH // 2, F32), 1.0)
    program.set_buffers([WIDTH, WIDTH])
    program.add_node(Op.embed, [], (0, 0), WIDTH, weight=weight, value=1.0)
    program.add_node(Op.rms_norm, [(0, 0)], (1, 0), WIDTH, norm=norm, eps=1e-5)
    program.add_node(Op.attend, [(1, 0)] * 3, (0, 0), WIDTH, shape=[1, 1, WIDTH, 0], scale=0.2)
    program.add_node(Op.add, [(0, 0), (1, 0)], (0, 0), WIDTH)
    program.add_node(Op.gate, [(0, 0), (1, 0)], (1, 0), WIDTH)
    program.add_node(Op.rope, [(1, 0)], (0, 0), WIDTH, ropes=(rope, -1))
    program.add_node(Op.head, [(0, 0)], (0, 0), WORDS, weight=weight)
    return program


def batch(**changes: Any) -> dict[str, Any]:
    """Return a right batch: 3 rows of a sequence of 20, 1 row of a sequence of 1."""
    whole = {
        "token_ids": i32(1, 2, 3, 4),
        "positions": i32(17, 18, 19, 0),
        "starts": i32(0, 3, 4),
        "lengths": i32(20, 1),
        "tables": np.array([[0, 5], [2, 0]], I32),
        "logit_rows": i32(2, 3),
        "logits": np.zeros((2, WORDS), F32),
    }
    return {**whole, **changes}


def test_the_right_batch_runs_and_the_bad_ones_below_differ_from_it_in_one_thing() -> None:
    good = batch()
    filled().run(**good)
    assert np.isfinite(good["logits"]).all()
    assert (good["logits"] != 0).all()


BAD_BATCHES: dict[str, dict[str, Any]] = {
    "token id too large": {"token_ids": i32(1, 2, WORDS, 4)},
    "token id below zero": {"token_ids": i32(1, 2, 3, -1)},
    "token ids of 64 bits": {"token_ids": np.array([1, 2, 3, 4])},
    "token ids in two dimensions": {"token_ids": np.zeros((2, 2), I32)},
    "token ids with gaps": {"token_ids": np.zeros(8, I32)[::2]},
    "too few token ids": {"token_ids": i32(1, 2, 3)},
    "no rows": {
        "token_ids": i32(), "positions": i32(), "starts": i32(0), "lengths": i32(), "tables": np.zeros((0, 2), I32),
        "logit_rows": i32(),
    },
    "position beyond the length": {"positions": i32(17, 18, 20, 0)},
    "position below zero": {"positions": i32(17, 18, 19, -1)},
    "starts that do not begin at 0": {"starts": i32(1, 3, 4)},
    "starts that fall": {"starts": i32(0, 5, 4)},
    "starts that stand still": {"starts": i32(0, 4, 4)},
    "starts below zero": {"starts": i32(0, -3, 4)},
    "starts beyond the rows": {"starts": i32(0, 3, 5)},
    "too few starts": {"starts": i32(0, 4)},
    "length of zero": {"lengths": i32(20, 0)},
    "length below zero": {"lengths": i32(-20, 1)},
    "length beyond the table": {"lengths": i32(40, 1), "positions": i32(37, 38, 39, 0)},
    "a context without end": {"lengths": i32(2**31 - 1, 1), "positions": i32(2**31 - 4, 2**31 - 3, 2**31 - 2, 0)},
    "block too large": {"tables": np.array([[0, BLOCKS], [2, 0]], I32)},
    "block below zero": {"tables": np.array([[0, -1], [2, 0]], I32)},
    "a table too few": {"tables": np.array([[0, 5]], I32)},
    "tables without columns": {"tables": np.zeros((2, 0), I32)},
    "row of logits too large": {"logit_rows": i32(2, 4)},
    "row of logits below zero": {"logit_rows": i32(-1, 3)},
    "more logits than rows": {"logit_rows": i32(0, 1, 2, 3, 3), "logits": np.zeros((5, WORDS), F32)},
    "too few rows for logits": {"logits": np.zeros((1, WORDS), F32)},
    "logits too narrow": {"logits": np.zeros((2, WORDS - 1), F32)},
    "logits of 64 bits": {"logits": np.zeros((2, WORDS))},
    "logits that cannot be written": {"logits": np.broadcast_to(np.zeros((), F32), (2, WORDS))},
    "logits by column": {"logits": np.zeros((WORDS, 2), F32).T},
    "nothing": {"logits": None},
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_a_wrong_batch_is_refused_and_the_next_one_runs(bad: dict[str, Any]) -> None:
    program = filled()
    first, again = batch(), batch()
    program.run(**first)
    with pytest.raises((ValueError, TypeError)):
        program.run(**batch(**bad))
    program.run(**again)
    np.testing.assert_array_equal(again["logits"], first["logits"])


BAD_NODES: dict[str, tuple[Op, list[tuple[int, int]], tuple[int, int], int, dict[str, Any]]] = {
    "unknown weight": (Op.embed, [], (0, 0), WIDTH, {"weight": 7}),
    "no weight": (Op.embed, [], (0, 0), WIDTH, {}),
    "a table of another width": (Op.embed, [], (0, 0), 16, {"weight": 0}),
    "unknown buffer": (Op.embed, [], (3, 0), WIDTH, {"weight": 0}),
    "buffer below zero": (Op.embed, [], (-1, 0), WIDTH, {"weight": 0}),
    "column beyond the buffer": (Op.embed, [], (0, 8), WIDTH, {"weight": 0}),
    "column below zero": (Op.embed, [], (0, -1), WIDTH, {"weight": 0}),
    "no input": (Op.add, [], (0, 0), WIDTH, {}),
    "too many inputs": (Op.add, [(0, 0)] * 4, (0, 0), WIDTH, {}),
    "input beyond its buffer": (Op.add, [(0, 0), (1, 16)], (0, 0), WIDTH, {}),
    "width of zero": (Op.add, [(0, 0)] * 2, (0, 0), 0, {}),
    "width below zero": (Op.add, [(0, 0)] * 2, (0, 0), -16, {}),
    "heads where there are none": (Op.add, [(0, 0)] * 2, (0, 0), 16, {"heads": 2}),
    "a norm of another width": (Op.rms_norm, [(0, 0)], (1, 0), 16, {"norm": 0}),
    "an unknown norm": (Op.rms_norm, [(0, 0)], (1, 0), WIDTH, {"norm": 2}),
    "too many heads": (Op.rms_norm, [(0, 0)], (1, 0), WIDTH, {"norm": 0, "heads": 1 << 30}),
    "a norm before a sum": (Op.add, [(0, 0)] * 2, (0, 0), WIDTH, {"before": Before.norm, "norm": 0}),
    "no norm before a product": (Op.linear, [(0, 0)], (2, 0), WORDS, {"weight": 0, "before": Before.norm}),
    "a wrong norm before a product": (
        Op.linear,
        [(0, 0)],
        (2, 0),
        WORDS,
        {"weight": 0, "before": Before.norm, "norm": 1},
    ),
    "a gate of one": (Op.linear, [(0, 0)], (2, 0), WORDS, {"weight": 0, "before": Before.gate}),
    "a gate before the head": (Op.head, [(0, 0)] * 2, (2, 0), WORDS, {"weight": 0, "before": Before.gate}),
    "a sum without its summand": (Op.linear, [(0, 0)], (2, 0), WORDS, {"weight": 0, "adds": True}),
    "a narrow summand": (Op.linear, [(0, 0)] * 2, (2, 0), WORDS, {"weight": 0, "adds": True}),
    "a head that adds": (Op.head, [(0, 0), (2, 0)], (2, 0), WORDS, {"weight": 0, "adds": True}),
    "a product of another width": (Op.linear, [(0, 0)], (1, 0), WIDTH, {"weight": 0}),
    "a bias of another width": (Op.head, [(0, 0)], (0, 0), WORDS, {"weight": 0, "bias": 0}),
    "an unknown bias": (Op.head, [(0, 0)], (0, 0), WORDS, {"weight": 0, "bias": 9}),
    "a rope of another width": (Op.rope, [(0, 0)], (1, 0), 16, {"ropes": (0, -1)}),
    "an unknown rope": (Op.rope, [(0, 0)], (1, 0), WIDTH, {"ropes": (3, -1)}),
    "an unknown rope of keys": (
        Op.attend,
        [(0, 0)] * 3,
        (1, 0),
        WIDTH,
        {"shape": [1, 1, WIDTH, 0], "ropes": (0, 2)},
    ),
    "a rope of queries of another width": (
        Op.attend,
        [(0, 0)] * 3,
        (1, 0),
        WIDTH,
        {"shape": [1, 1, WIDTH, 0], "ropes": (1, -1)},
    ),
    "an unknown layer": (Op.attend, [(0, 0)] * 3, (1, 0), WIDTH, {"shape": [1, 1, WIDTH, 0], "layer": 1}),
    "other KV heads than the cache": (Op.attend, [(0, 0)] * 3, (1, 0), WIDTH, {"shape": [2, 2, 16, 0]}),
    "no heads": (Op.attend, [(0, 0)] * 3, (1, 0), WIDTH, {"shape": [0, 1, WIDTH, 0]}),
    "a window below zero": (Op.attend, [(0, 0)] * 3, (1, 0), WIDTH, {"shape": [1, 1, WIDTH, -1]}),
    "a shape of one": (Op.attend, [(0, 0)] * 3, (1, 0), WIDTH, {"shape": [1]}),
    "no shape": (Op.attend, [(0, 0)] * 3, (1, 0), WIDTH, {}),
}


@pytest.mark.parametrize("bad", BAD_NODES.values(), ids=BAD_NODES.keys())
def test_a_wrong_op_is_refused_when_it_is_added(bad: Any) -> None:
    program = start()
    program.add_f32(table())
    program.add_vector(np.ones(WIDTH, F32))
    program.add_vector(np.ones(16, F32))
    program.add_rope(np.ones(WIDTH // 2, F32), 1.0)
    program.add_rope(np.ones(WIDTH, F32), 1.0)
    program.set_buffers([WIDTH, WIDTH, WORDS])
    op, inputs, out, width, more = bad
    with pytest.raises((ValueError, TypeError)):
        program.add_node(op, inputs, out, width, **more)
    with pytest.raises(ValueError, match="no head"):
        program.run(**batch())


def codes(n: int = 4, k: int = 64, kind: type = U8) -> NDArray[Any]:
    return np.zeros((n, k), kind)


def scale(n: int = 4, groups: int = 2) -> NDArray[np.float32]:
    return np.ones((n, groups), F32)


BAD_WEIGHTS: dict[str, Callable[[native.Program], object]] = {
    "signed codes": lambda p: p.add_quantized(codes(kind=np.int8), scale(), None, 32, 4, 8),
    "scales of other rows": lambda p: p.add_quantized(codes(), scale(5), None, 32, 4, 8),
    "scales of other groups": lambda p: p.add_quantized(codes(), scale(4, 3), None, 32, 4, 8),
    "minima of other groups": lambda p: p.add_quantized(codes(), scale(), scale(4, 1), 32, 4, 0),
    "minima and a zero point": lambda p: p.add_quantized(codes(), scale(), scale(), 32, 4, 8),
    "a group of 0": lambda p: p.add_quantized(codes(), scale(), None, 0, 4, 8),
    "a group of 8": lambda p: p.add_quantized(codes(), scale(4, 8), None, 8, 4, 8),
    "a group that does not divide": lambda p: p.add_quantized(codes(4, 80), scale(4, 2), None, 32, 4, 8),
    "a group below zero": lambda p: p.add_quantized(codes(), scale(), None, -32, 4, 8),
    "codes of 3 bits": lambda p: p.add_quantized(codes(), scale(), None, 32, 3, 4),
    "a zero point beyond the codes": lambda p: p.add_quantized(codes(), scale(), None, 32, 4, 16),
    "a zero point below zero": lambda p: p.add_quantized(codes(), scale(), None, 32, 4, -1),
    "blocks of no kind": lambda p: p.add_blocks("q3_k", 256, [codes(4, 144)]),
    "blocks that are no rows": lambda p: p.add_blocks("q4_k", 256, [codes(4, 143)]),
    "blocks of other columns": lambda p: p.add_blocks("q4_0", 48, [codes(4, 27)]),
    "blocks without columns": lambda p: p.add_blocks("q4_0", 0, [codes(4, 0)]),
    "blocks below zero": lambda p: p.add_blocks("q4_0", -32, [codes(4, 18)]),
    "no blocks": lambda p: p.add_blocks("q4_0", 32, []),
    "blocks without rows": lambda p: p.add_blocks("q4_0", 32, [codes(0, 18)]),
    "a part of other columns": lambda p: p.add_blocks("q4_0", 32, [codes(4, 18), codes(4, 36)]),
    "signed blocks": lambda p: p.add_blocks("q4_0", 32, [codes(4, 18, np.int8)]),
    "no rows": lambda p: p.add_quantized(codes(0), scale(0), None, 32, 4, 8),
    "no columns": lambda p: p.add_f32(np.zeros((4, 0), F32)),
    "a vector as a matrix": lambda p: p.add_f32(np.zeros(4, F32)),
    "float64": lambda p: p.add_f32(np.zeros((4, 4))),  # type: ignore[arg-type]
    "a transposed matrix": lambda p: p.add_f32(np.zeros((4, 8), F32).T),
    "signed words as bfloat16": lambda p: p.add_bf16(np.zeros((4, 4), np.int16)),
    "an empty vector": lambda p: p.add_vector(np.zeros(0, F32)),
    "no frequencies": lambda p: p.add_rope(np.zeros(0, F32), 1.0),
    "a buffer of width 0": lambda p: p.set_buffers([0]),
    "a buffer of width below zero": lambda p: p.set_buffers([-5]),
    "a product of another width": lambda p: p.linear(0, np.zeros((2, 16), F32), np.zeros((2, WORDS), F32)),
    "a product into other rows": lambda p: p.linear(0, np.zeros((2, WIDTH), F32), np.zeros((1, WORDS), F32)),
    "a product with no weight": lambda p: p.linear(1, np.zeros((2, WIDTH), F32), np.zeros((2, WORDS), F32)),
    "a token id beyond the table": lambda p: p.embed(0, i32(WORDS), np.zeros((1, WIDTH), F32)),
    "a row beyond the result": lambda p: p.embed(0, i32(1, 2), np.zeros((1, WIDTH), F32)),
}


@pytest.mark.parametrize("bad", BAD_WEIGHTS.values(), ids=BAD_WEIGHTS.keys())
def test_a_wrong_weight_is_refused(bad: Callable[[native.Program], object]) -> None:
    program = start()
    program.add_f32(table())
    with pytest.raises((ValueError, TypeError)):
        bad(program)


def draw(**changes: Any) -> NDArray[np.int32]:
    """Draw the largest of two rows of logits, or something wrong."""
    logits = np.zeros((2, 40), F32)
    logits[0, 30] = logits[1, 39] = 1.0
    tokens = np.zeros(2, I32)
    right = {
        "logits": logits, "rows": i32(1, 0), "temperature": np.zeros(2, F32), "top_k": i32(0, 0),
        "top_p": np.ones(2, F32), "min_p": np.zeros(2, F32), "u": np.zeros(2), "tokens": tokens,
    }  # fmt: skip
    start().draw(**{**right, **changes})
    return tokens


BAD_DRAWS: dict[str, dict[str, Any]] = {
    "a row too large": {"rows": i32(1, 2)},
    "a row below zero": {"rows": i32(-1, 0)},
    "too few rows": {"rows": i32(1)},
    "too few temperatures": {"temperature": np.zeros(1, F32)},
    "a temperature below zero": {"temperature": np.array([0, -1], F32)},
    "a temperature that is no number": {"temperature": np.array([0, np.nan], F32)},
    "top_p that is no number": {"top_p": np.array([1, np.nan], F32)},
    "min_p above 1": {"min_p": np.array([0, 2], F32)},
    "u of 1": {"u": np.array([0.0, 1.0])},
    "u below zero": {"u": np.array([-0.1, 0.0])},
    "u of 32 bits": {"u": np.zeros(2, F32)},
    "too few tokens": {"tokens": i32(0)},
    "tokens of 64 bits": {"tokens": np.zeros(2, np.int64)},
    "logits without columns": {"logits": np.zeros((2, 0), F32)},
    "logits of 64 bits": {"logits": np.zeros((2, 40))},
}


@pytest.mark.parametrize("bad", BAD_DRAWS.values(), ids=BAD_DRAWS.keys())
def test_a_wrong_draw_is_refused(bad: dict[str, Any]) -> None:
    assert draw().tolist() == [39, 30]
    with pytest.raises((ValueError, TypeError)):
        draw(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"threads": 0}, {"threads": -1}, {"threads": 10**6}, {"layers": 0}, {"n_blocks": 0}, {"n_blocks": -4},
        {"block_tokens": 0}, {"block_tokens": 24}, {"block_tokens": 8}, {"block_tokens": 256}, {"kv_heads": 0},
        {"width": 0}, {"width": 20}, {"width": -16},
        {"n_blocks": 2**31 - 1, "layers": 2**31 - 1}, {"n_blocks": 2**31},
    ],
    ids=str,
)  # fmt: skip
def test_a_program_of_impossible_size_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises((ValueError, TypeError)):
        start(**bad)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no instruction set sse9 here"):
        native.Program("sse9", 1, 1, 1, 16, 1, 16)


def test_a_kv_pool_that_no_machine_has_is_out_of_memory() -> None:
    with pytest.raises(MemoryError):
        start(n_blocks=2**31 - 1, layers=100)


def test_the_profile_counts_each_op() -> None:
    program = filled()
    program.run(**batch())
    assert all(calls == 0 for _, calls in program.profile().values())
    program.set_profile(True)
    for _ in range(3):
        program.run(**batch())
    found = program.profile()
    assert {name: calls for name, (_, calls) in found.items()} == {
        "embed": 3, "rms_norm": 3, "linear": 0, "rope": 3, "attend": 3, "gate": 3, "add": 3, "head": 3,
    }  # fmt: skip
    assert all(seconds >= 0 for seconds, _ in found.values())


# ---- threads


def logits_of(threads: int, runs: int = 1) -> NDArray[np.float32]:
    program = filled(threads)
    good = batch()
    for _ in range(runs):
        program.run(**good)
    found: NDArray[np.float32] = good["logits"]
    return found


def large(threads: int) -> Callable[[], NDArray[np.float32]]:
    """Return a product that is worth sharing between threads."""
    program = start(threads)
    rng = np.random.default_rng(1)
    weight = program.add_f32(rng.standard_normal((1024, 256), dtype=F32))
    x, out = rng.standard_normal((40, 256), dtype=F32), np.empty((40, 1024), F32)

    def run() -> NDArray[np.float32]:
        program.linear(weight, x, out)
        return out.copy()

    return run


@pytest.mark.parametrize("threads", [2, 3, 4 * (os.cpu_count() or 1)])
def test_any_number_of_threads_gives_the_same_many_times_over(threads: int) -> None:
    expected = large(1)()
    run = large(threads)
    for _ in range(100):
        np.testing.assert_array_equal(run(), expected)


def test_beside_busy_neighbours_on_every_core_results_are_right_and_come() -> None:
    expected = large(1)()
    neighbours = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(len(os.sched_getaffinity(0)))
    ]
    try:
        run = large(len(neighbours))
        for _ in range(30):
            np.testing.assert_array_equal(run(), expected)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_threads_keep_to_a_core_each_where_they_have_all_cores_and_roam_where_not() -> None:
    code = """
import os, sys
from pathlib import Path
import headway.kernels.cpu._native as native
cores = sorted(os.sched_getaffinity(0))
program = native.Program("", int(sys.argv[1]), 1, 1, 16, 1, 16)
import numpy as np
weight = program.add_f32(np.ones((4096, 512), np.float32))
program.linear(weight, np.ones((8, 512), np.float32), np.empty((8, 4096), np.float32))
found = []
for task in Path("/proc/self/task").iterdir():
    if (task / "comm").read_text().strip() == "kernels":
        found.append(sorted(os.sched_getaffinity(int(task.name))))
print(sorted(found) == [[core] for core in cores[1:]], all(one == cores for one in found))
"""
    cores = len(os.sched_getaffinity(0))
    for threads, expected in ((cores, f"True {cores == 1}"), (cores + 1, "False True")):
        done = subprocess.run([sys.executable, "-c", code, str(threads)], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_two_callers_at_a_time_are_refused_not_mixed_up() -> None:
    program = start(1)
    weight = program.add_f32(np.ones((4096, 512), F32))
    x, out = np.ones((64, 512), F32), np.empty((64, 4096), F32)
    stop, refused = threading.Event(), threading.Event()
    wrong: list[Exception] = []

    def call(mine: NDArray[np.float32]) -> None:
        while not stop.is_set():
            try:
                program.linear(weight, x, mine)
            except RuntimeError as error:
                if "in use by another thread" not in str(error):
                    wrong.append(error)
                refused.set()
                stop.set()

    callers = [threading.Thread(target=call, args=(array,)) for array in (out, out.copy())]
    for caller in callers:
        caller.start()
    assert refused.wait(60)
    for caller in callers:
        caller.join(60)
    assert not wrong
    program.linear(weight, x, out)
    assert (out == 512).all()


def test_python_runs_while_a_step_does() -> None:
    """The GIL is released: a thread that counts gets on while the library works on one core."""
    program = start(1)
    weight = program.add_f32(np.ones((8192, 1024), F32))
    x, out = np.ones((256, 1024), F32), np.empty((256, 8192), F32)
    began, ended = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        program.linear(weight, x, out)
        ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    began.wait(60)
    seen = 0
    while not ended.is_set():
        seen += 1
    worker.join(60)
    assert seen > 1
    assert (out == 1024).all()


def tasks() -> int:
    """Count the library's threads by their name, which each takes when it begins."""
    return sum(path.read_text().strip() == "kernels" for path in Path("/proc/self/task").glob("*/comm"))


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_programs_come_and_go_without_leaving_threads_or_memory() -> None:
    logits_of(3)
    gc.collect()
    before, maps = tasks(), mappings()
    for _ in range(20):
        program, run = filled(3), large(3)
        program.run(**batch())
        run()
        assert tasks() <= before + 4
        del program, run
        gc.collect()
        assert tasks() == before
    assert mappings() <= maps + 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_refused_weights_and_programs_leave_no_memory() -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

    big, wrong = codes(4096, 4096), scale(4096, 5)

    def refuse() -> None:
        program = start()
        for _ in range(10):
            with pytest.raises(ValueError, match="scales"):
                program.add_quantized(big, wrong, None, 32, 4, 8)
        program.add_quantized(big, scale(4096, 128), None, 32, 4, 8)

    refuse()
    before = resident()
    for _ in range(10):
        refuse()
    assert resident() < before + 60_000, "ten times 10 MB of weights would show"


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
from tests.kernels.test_native import batch, filled, large
import numpy as np
program, good = filled(3), batch()
program.run(**good)
share = large(3)
expected = share()
children = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        mine = batch()
        program.run(**mine)
        right = np.array_equal(mine["logits"], good["logits"]) and np.array_equal(share(), expected)
        del program, share
        fresh = large(3)  # threads of its own
        right = right and np.array_equal(fresh(), expected)
        del fresh
        sys.exit(0 if right else 1)
    children.append(child)
    np.testing.assert_array_equal(share(), expected)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
"""

EXIT = """
import threading
from tests.kernels.test_native import filled, large
keep = filled(3)
share = large(3)
share()
threading.Thread(target=lambda: [share() for _ in range(10**9)], daemon=True).start()
"""


@pytest.mark.parametrize("script", [FORK, EXIT], ids=["a fork runs on without threads", "exit while a step runs"])
def test_processes_end_cleanly(script: str) -> None:
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert (done.returncode, done.stderr) == (0, "")
