"""What the native kernels' arithmetic costs: next-token distributions against float32 on the same dequantized weights.

usage: python -m benchmarks.accuracy [--models smollm2-135m,...] [--kv-dtype bf16,int8] [--tokens 512] [--weights int4]
HEADWAY_ISA picks another instruction set than the best one.
The texts are this project's own prose and code and a chat, teacher-forced. Also measured: what repacking loses of each
kind of weight (scales become half precision). Prints tables for docs/performance.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import headway.kernels.cpu._native as _native
from benchmarks.common import ROOT, head
from headway.bench.divergence import divergence, summary
from headway.config import EngineConfig, environment
from headway.engine.runner import Runner, load_runner
from headway.engine.tokenizer import load_tokenizer
from headway.engine.work import Work
from headway.kernels.cpu import available
from headway.kernels.cpu.weights import Weights
from headway.kernels.tensor import Float32, Tensor
from headway.models.checkpoint import Checkpoint, open_checkpoint
from headway.models.pull import obtain

MODELS = "smollm2-135m,qwen2.5-coder-0.5b,gemma3-270m"
CHUNK = 128
"""Positions whose logits are held at a time: a vocabulary of 262,144 takes a megabyte each."""


def texts(tokens: int) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of prose, code and a conversation, each some characters per token long."""
    yield "prose", (ROOT / "README.md").read_text(encoding="utf-8")[: 5 * tokens]
    yield "code", (ROOT / "src/headway/engine/scheduler.py").read_text(encoding="utf-8")[: 5 * tokens]
    questions = [
        "What is a KV cache?",
        "Write a haiku about the sea.",
        "Explain recursion to a child.",
        "Sum 17 and 25.",
    ]
    yield "chat", "\n".join(f"User: {question}\nAssistant: Of course. {question}" for question in questions)


def runner(checkpoint: Checkpoint, kernels: str, kv_dtype: str, tokens: int, weights: str = "file") -> Runner:
    """Load the model; HEADWAY_ISA picks the instruction set. The reference always runs what the file holds."""
    native = "reference" if kernels == "reference" else "cpu"
    settings = EngineConfig(kernels=native, kv_dtype=kv_dtype, weights=weights)  # type: ignore[arg-type]
    return load_runner(checkpoint, settings, n_blocks=-(-tokens // settings.block_tokens))


def logits(run: Runner, token_ids: Sequence[int], start: int) -> Float32:
    """Return the logits of a chunk of positions; those before have run."""
    table = range(run.n_blocks)
    part = token_ids[start : start + CHUNK]
    return run.run([Work(part, start, table, len(part))]).copy()


def weight_loss(isa: str, tensor: Tensor) -> float | None:
    """Return the relative error (root mean square) of a matrix after repacking; None for vectors."""
    if len(tensor.shape) != 2:
        return None
    native = _native.Program(isa, 2, 1, 1, 16, 1, 16)
    weights = Weights(native, {tensor.name: tensor})
    weights.load([], [tensor.name])
    wanted = tensor.float32()
    found = np.empty_like(wanted)
    native.embed(weights.alone(tensor.name), np.arange(len(wanted), dtype=np.int32), found)
    return float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)))


def measure(name: str, kv_dtypes: Sequence[str], tokens: int, weights: str) -> None:
    """Print one model's rows."""
    checkpoint = open_checkpoint(obtain(name, environment()))
    tokenizer = load_tokenizer(checkpoint)
    inputs = [(kind, tokenizer.encode(text)[:tokens]) for kind, text in texts(tokens)]
    reference = runner(checkpoint, "reference", "bf16", tokens)
    natives = {kv: runner(checkpoint, "cpu", kv, tokens, weights) for kv in kv_dtypes}
    parts: dict[str, list[Any]] = {kv: [] for kv in natives}
    for _, token_ids in inputs:
        for start in range(0, len(token_ids), CHUNK):
            wanted = logits(reference, token_ids, start)
            for kv, run in natives.items():
                part = token_ids[start : start + CHUNK]
                parts[kv].append(divergence(logits(run, token_ids, start), wanted, part))
    for kv, run in natives.items():
        found = summary(parts[kv])
        print(
            f"| {name}, {run.kernels.isa}, KV {kv}, weights {weights} | {found.positions:,}"
            f" | {found.mean_kl:.5f} | {found.p99_kl:.4f}"
            f" | {100 * found.top1:.1f} % | {100 * (found.perplexity_ratio - 1):+.2f} % |",
            flush=True,
        )
    lost: dict[str, list[float]] = {}
    for tensor in map(checkpoint.tensor, checkpoint.names()):
        loss = weight_loss(available()[0], tensor)
        if loss is not None:
            lost.setdefault(tensor.kind, []).append(loss)
    kinds = ", ".join(f"{kind} {max(values):.1e}" for kind, values in sorted(lost.items()))
    print(f"| {name}: largest loss of repacking by kind | {kinds} | | | | |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--kv-dtype", default="bf16,int8")
    parser.add_argument("--tokens", type=int, default=512, help="of each text at most")
    parser.add_argument("--weights", default="file", choices=("file", "int8", "int4"))
    arguments = parser.parse_args()
    columns = ("model", "positions", "mean KL", "p99 KL", "same top token", "perplexity")
    head(f"benchmarks.accuracy --models {arguments.models} --weights {arguments.weights}", columns)
    for name in arguments.models.split(","):
        measure(name, arguments.kv_dtype.split(","), arguments.tokens, arguments.weights)


if __name__ == "__main__":
    main()
