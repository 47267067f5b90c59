"""Compares our models with transformers' on tiny random weights: whole, in chunks, token by token, in mixed batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.config import EngineConfig
from headway.engine.runner import Runner, load_runner
from headway.engine.work import Work
from headway.kernels.tensor import Float32
from headway.models.checkpoint.config_hf import from_huggingface
from headway.models.config import ModelConfig
from tests.kernels.support import ArrayTensor

BLOCK_TOKENS = 4


@dataclass(frozen=True)
class MemoryCheckpoint:
    """A checkpoint whose weights are arrays under their Hugging Face names."""

    config: ModelConfig
    arrays: Mapping[str, Float32]
    path: Path = Path("memory")

    @property
    def metadata(self) -> Mapping[str, Any]:
        return {}

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def names(self) -> tuple[str, ...]:
        return tuple(self.arrays)

    def tensor(self, name: str) -> ArrayTensor:
        return ArrayTensor(name, self.arrays[name])

    def forget(self) -> None:
        """Nothing was read from a file."""

    def close(self) -> None:
        pass


def randomize(model: Any, seed: int = 0) -> None:
    """Give every parameter a size at which each part of the model shows in the logits."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                parameter.normal_(0.0, gain / parameter.shape[1] ** 0.5)
            elif "norm" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
            else:
                parameter.normal_(0.0, 0.3)


def transformers_logits(model: Any, token_ids: Sequence[int]) -> Float32:
    """Return logits of every position, [len(token_ids), vocabulary], in float32 with eager attention."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([list(token_ids)])).logits[0].float()
    result: Float32 = logits.numpy()
    return result


def checkpoint_of(model: Any) -> MemoryCheckpoint:
    """Return the model's weights and shape as a checkpoint."""
    config = from_huggingface(model.config.to_dict())
    arrays = {name: np.ascontiguousarray(value.float().numpy()) for name, value in model.state_dict().items()}
    return MemoryCheckpoint(config, arrays)


def runner_of(model: Any, *, n_blocks: int = 64, block_tokens: int = BLOCK_TOKENS, threads: int = 2) -> Runner:
    """Return our runner for a transformers model, on the reference kernels."""
    settings = EngineConfig(kernels="reference", threads=threads, block_tokens=block_tokens)
    return load_runner(checkpoint_of(model), settings, n_blocks=n_blocks)


def run_chunks(runner: Runner, token_ids: Sequence[int], chunks: Sequence[int], table: Sequence[int]) -> Float32:
    """Return the logits of all tokens, run in chunks of the given lengths."""
    assert sum(chunks) == len(token_ids)
    parts = []
    start = 0
    for length in chunks:
        parts.append(runner.run([Work(token_ids[start : start + length], start, table, length)]).copy())
        start += length
    return np.concatenate(parts)


def shuffled_table(runner: Runner, tokens: int, seed: int = 0) -> list[int]:
    """Return enough blocks for the tokens, in random order."""
    needed = -(-tokens // runner.block_tokens)
    return [int(block) for block in np.random.default_rng(seed).permutation(runner.n_blocks)[:needed]]


def random_tokens(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Return token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocabulary, count)]


def check(model: Any, *, tokens: int = 45, tolerance: float = 1e-4) -> None:
    """Assert that prefill, chunks, decode and a mixed batch give transformers' logits."""
    randomize(model)
    model.eval()
    vocabulary = model.config.vocab_size
    token_ids = random_tokens(tokens, vocabulary)
    expected = transformers_logits(model, token_ids)
    assert float(np.abs(expected).max()) > 0.5, "logits too small to tell anything"
    runner = runner_of(model)
    table = shuffled_table(runner, tokens)
    half = tokens // 2
    ways: dict[str, Callable[[], NDArray[np.float32]]] = {
        "prefill": lambda: run_chunks(runner, token_ids, [tokens], table),
        "chunks": lambda: run_chunks(runner, token_ids, [7, 13, tokens - 20], table),
        "decode": lambda: run_chunks(runner, token_ids, [half] + [1] * (tokens - half), table),
    }
    for way, logits in ways.items():
        np.testing.assert_allclose(logits(), expected, atol=tolerance, rtol=tolerance, err_msg=way)
    _check_mixed(model, runner, token_ids, expected, tolerance)


def _check_mixed(model: Any, runner: Runner, token_ids: list[int], expected: Float32, tolerance: float) -> None:
    """Decodes of different lengths and a prefill in one batch, each as if it ran alone."""
    other = random_tokens(11, model.config.vocab_size, seed=1)
    others = transformers_logits(model, other)
    blocks = shuffled_table(runner, runner.n_blocks * runner.block_tokens, seed=2)
    per_sequence = -(-len(token_ids) // runner.block_tokens)
    tables = [blocks[i * per_sequence : (i + 1) * per_sequence] for i in range(4)]
    lengths = (5, 17, len(token_ids) - 1)
    for table, length in zip(tables, lengths, strict=False):
        runner.run([Work(token_ids[:length], 0, table, 0)])
    work = [Work([token_ids[length]], length, table, 1) for table, length in zip(tables, lengths, strict=False)]
    logits = runner.run([work[0], work[1], Work(other, 0, tables[3], 2), work[2]])
    wanted = np.stack([expected[5], expected[17], others[-2], others[-1], expected[-1]])
    np.testing.assert_allclose(logits, wanted, atol=tolerance, rtol=tolerance, err_msg="mixed batch")
