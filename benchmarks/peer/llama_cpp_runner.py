"""llama.cpp through llama-cpp-python's low-level API. usage: llama_cpp_runner.py MODEL.gguf THREADS [q4_0]"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import llama_cpp as lib
from answer import answer

CONTEXT, SEQUENCES, BATCH = 32 * 2112, 32, 2048  # each sequence gets its share of the context


def requantized(path: Path) -> Path:
    """Return the model in Q4_0 (its head in Q6_K), written once, beside this file's peers."""
    out = Path(__file__).parents[1] / ".peers" / "models" / f"{path.stem}-q4_0.gguf"
    if not out.exists():
        params = lib.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = lib.LLAMA_FTYPE_MOSTLY_Q4_0, True
        half = out.with_suffix(".part")
        if lib.llama_model_quantize(str(path).encode(), str(half).encode(), params):
            raise RuntimeError(f"{path} cannot be requantized")
        half.rename(out)
    return out


class Runner:
    """One context for all cases."""

    def __init__(self, path: str, threads: int) -> None:
        self._log = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._log, None)
        lib.llama_backend_init()
        if "q4_0" in sys.argv[3:]:
            path = str(requantized(Path(path)))
        model_params = lib.llama_model_default_params()
        self._model = lib.llama_model_load_from_file(path.encode(), model_params)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = CONTEXT, BATCH, 512, SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, params)
        self._batch = lib.llama_batch_init(BATCH, 0, 1)

    def _clear(self) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Run rows of (token, position, sequence, logits wanted)."""
        for first in range(0, len(rows), BATCH):
            part = rows[first : first + BATCH]
            self._batch.n_tokens = len(part)
            for i, (token, position, sequence, wanted) in enumerate(part):
                self._batch.token[i], self._batch.pos[i], self._batch.n_seq_id[i] = token, position, 1
                self._batch.seq_id[i][0], self._batch.logits[i] = sequence, wanted
            if lib.llama_decode(self._context, self._batch):
                raise RuntimeError("llama_decode failed")

    def prefill(self, tokens: int) -> float:
        """Return the seconds of one prompt."""
        self._clear()
        began = time.perf_counter()
        self._run([(100 + i % 1000, i, 0, i == tokens - 1) for i in range(tokens)])
        lib.llama_get_logits_ith(self._context, -1)
        return time.perf_counter() - began

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Return the seconds of a step, the mean of some."""
        self._clear()
        for sequence in range(batch):
            self._run([(100 + i % 1000, i, sequence, False) for i in range(context - 1)])
        began = time.perf_counter()
        for step in range(steps):
            self._run([(200 + step, context - 1 + step, sequence, True) for sequence in range(batch)])
            lib.llama_get_logits_ith(self._context, -1)
        return (time.perf_counter() - began) / steps


if __name__ == "__main__":
    answer(Runner, lib.__version__)
