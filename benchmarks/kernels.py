"""Each native Op alone: time, GB/s and GOPS, and the share of what the machine does at most, measured in the same run.

usage: python -m benchmarks.kernels [--shape 896x4864] [--repeats 7] [--threads 2] [--isa avx2]
Products run on random weights larger than any cache (rows of the weight are repeated as needed), rows of attention on a
context of random K and V. "of reads" is bytes a second over the read bandwidth, "of products" operations a second over
what registers alone reach: the larger of the two says which limit is near.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

import headway.kernels.cpu._native as _native
from benchmarks.common import head
from headway.kernels import machine
from headway.kernels.cpu import NativeKernels
from headway.kernels.draws import Draws
from headway.kernels.ops import Ops, Value
from headway.kernels.plan import record

ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
MEMORY = 160 << 20
"""Bytes of weights that one pass reads at least."""
F32 = np.float32


class Formats:
    """Weights of all kinds, of one shape."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self._rng = np.random.default_rng(0)

    def _quantized(self, program: _native.Program, bits: int, group: int, minimum: bool) -> int:
        codes = self._rng.integers(0, 1 << bits, (self.n, self.k), dtype=np.uint8)
        scale = np.full((self.n, self.k // group), 0.01, F32)
        zero = 0 if minimum else 1 << (bits - 1)
        return program.add_quantized(codes, scale, scale if minimum else None, group, bits, zero)

    def all(self) -> dict[str, Callable[[_native.Program], int]]:
        """Return what adds each kind to a program."""
        w = self._rng.standard_normal((self.n, self.k), dtype=F32)
        return {
            "int4, groups of 32 with minimum": lambda p: self._quantized(p, 4, 32, True),
            "int4, groups of 32": lambda p: self._quantized(p, 4, 32, False),
            "int4, groups of 128": lambda p: self._quantized(p, 4, 128, False),
            "int8, groups of 32": lambda p: self._quantized(p, 8, 32, False),
            "int8, groups of 128": lambda p: self._quantized(p, 8, 128, False),
            "bfloat16": lambda p: p.add_bf16((w.view(np.uint32) >> 16).astype(np.uint16)),
            "float32": lambda p: p.add_f32(w),
        }


def median_s(run: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Return median, least and greatest seconds."""
    run()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), min(seconds), max(seconds)


class Table:
    """Rows of figures against the limits."""

    def __init__(self, read: float, products: float, repeats: int) -> None:
        self.read, self.products, self.repeats = read, products, repeats

    def row(self, name: str, run: Callable[[], object], moved: float, operations: float) -> None:
        """Time and print one Op."""
        middle, low, high = median_s(run, self.repeats)
        print(
            f"| {name} | {middle * 1e6:,.0f} us ({low * 1e6:,.0f} to {high * 1e6:,.0f}) | {moved / middle / 1e9:,.1f}"
            f" | {moved / middle / self.read:.0%} | {operations / middle / 1e9:,.1f}"
            f" | {operations / middle / self.products:.0%} |",
            flush=True,
        )


def products(kernels: NativeKernels, table: Table, n: int, k: int) -> None:
    """All kinds of weights by all numbers of rows."""
    rng = np.random.default_rng(1)
    for name, add in Formats(n, k).all().items():
        program = _native.Program(kernels.isa, kernels.threads, 1, 1, 32, 1, 64)
        first = add(program)
        size = program.weight_bytes
        copies = [first] + [add(program) for _ in range(min(-(-MEMORY // size), 400) - 1)]
        for rows in ROWS:
            x, out = rng.standard_normal((rows, k), dtype=F32), np.empty((rows, n), F32)
            some = copies if rows <= 32 else copies[:2]

            run = partial(_multiply, program, some, x, out)
            many = len(some)
            table.row(f"{name}, {n} x {k}, rows {rows}, x {many}", run, size * many, 2.0 * n * k * rows * many)


def _multiply(program: _native.Program, weights: list[int], x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    for weight in weights:
        program.linear(weight, x, out)


def attention(kernels: NativeKernels, table: Table, heads: int, kv_heads: int, width: int) -> None:
    """Decodes and chunks over contexts of several lengths."""
    layers = 8

    def model(ops: Ops) -> Value:
        x = ops.embed("table", width=heads * width)
        for layer in range(layers):
            k = ops.linear(x, "k", width=kv_heads * width)
            shape = {"heads": heads, "kv_heads": kv_heads, "head_width": width}
            x = ops.add(x, ops.attend(x, k, k, layer=layer, scale=width**-0.5, **shape))
        return ops.head(x, "head", width=16)

    from tests.kernels.support import ArrayTensor

    from headway.engine.runner import pack
    from headway.engine.work import Work
    from headway.kernels.cpu import _Program

    rng = np.random.default_rng(2)
    shapes = {"table": (64, heads * width), "k": (kv_heads * width, heads * width), "head": (16, heads * width)}
    weights = {name: ArrayTensor(name, rng.standard_normal(shape, dtype=F32)) for name, shape in shapes.items()}
    blocks = 32 * 20
    program = kernels.compile(record(model), weights.__getitem__, n_blocks=blocks, block_tokens=32)
    assert isinstance(program, _Program)
    bytes_of = kernels.block_bytes(record(model).kv, 32) / 32
    for batch, context, chunk in (
        (1, 512, 1),
        (16, 512, 1),
        (1, 4096, 1),
        (1, 512, 512),
        (1, 2048, 256),
        (1, 4096, 256),
    ):
        per = -(-context // 32)
        work = [
            Work([1] * chunk, context - chunk, range(i * per, (i + 1) * per), 0)
            for i in range(min(batch, blocks // per))
        ]
        packed = pack(work, 32)
        program.set_profile(True)
        for _ in range(table.repeats):
            program.run(packed)
        seconds, calls = program.profile()["attend"]
        program.set_profile(False)
        seen = context if chunk == 1 else context - chunk / 2
        moved = len(work) * context * bytes_of / layers
        operations = 4.0 * len(work) * chunk * seen * heads * width
        mean = seconds / calls
        print(
            f"| attention, {heads} heads on {kv_heads} of {width}, {len(work)} x {chunk} rows at {context}"
            f" | {mean * 1e6:,.0f} us | {moved / mean / 1e9:,.1f} | {moved / mean / table.read:.0%}"
            f" | {operations / mean / 1e9:,.1f} | |",
            flush=True,
        )


def draws(kernels: NativeKernels, table: Table) -> None:
    """Sixteen rows of 151,936 logits: greedy and with everything on."""
    program = _native.Program(kernels.isa, kernels.threads, 1, 1, 32, 1, 64)
    logits = np.random.default_rng(3).standard_normal((16, 151_936), dtype=F32) * 3
    tokens = np.empty(16, np.int32)

    def draw(temperature: float, top_k: int, top_p: float) -> Draws:
        return Draws(
            np.arange(16, dtype=np.int32),
            np.full(16, temperature, F32),
            np.full(16, top_k, np.int32),
            np.full(16, top_p, F32),
            np.zeros(16, F32),
            np.full(16, 0.5),
        )

    for name, d in {
        "greedy": draw(0, 0, 1),
        "temperature": draw(0.8, 0, 1),
        "top_p 0.95": draw(0.8, 0, 0.95),
        "top_k 50, top_p 0.95": draw(0.8, 50, 0.95),
    }.items():
        run = partial(program.draw, logits, d.rows, d.temperature, d.top_k, d.top_p, d.min_p, d.u, tokens)
        table.row(f"draw 16 of 151,936, {name}", run, logits.nbytes, 0.0)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="896x4864", help="k x n of the products")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--isa", default="")
    arguments = parser.parse_args()
    kernels = NativeKernels(arguments.threads or machine.usable_threads().value, arguments.isa)
    program = _native.Program(kernels.isa, kernels.threads, 1, 1, 32, 1, 64)
    read = statistics.median(program.read_rate() for _ in range(5))
    rate = statistics.median(program.product_rate() for _ in range(5))
    k, n = map(int, arguments.shape.split("x"))
    columns = ("Op", "time", "GB/s", "of reads", "GOPS", "of products")
    head(f"benchmarks.kernels --shape {arguments.shape}", columns)
    print(f"| limits ({kernels.isa}, {kernels.threads} threads) | | {read / 1e9:.1f} | | {rate / 1e9:,.0f} | |")
    table = Table(read, rate, arguments.repeats)
    products(kernels, table, n, k)
    attention(kernels, table, 9, 3, 64)
    attention(kernels, table, 14, 2, 64)
    draws(kernels, table)


if __name__ == "__main__":
    main()
