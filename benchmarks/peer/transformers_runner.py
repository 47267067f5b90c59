"""transformers in float32 on PyTorch. usage: transformers_runner.py MODEL.gguf|DIR THREADS"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from answer import answer


class Runner:
    """One model for all cases."""

    def __init__(self, path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        place = Path(path)
        source: dict[str, Any] = {"gguf_file": place.name} if place.is_file() else {}
        folder = place.parent if place.is_file() else place
        # Processors without AMX have no fast bfloat16.
        dtype = torch.bfloat16 if "amx_bf16" in Path("/proc/cpuinfo").read_text() else torch.float32
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **source)
        self._model = loaded.eval()

    def prefill(self, tokens: int) -> float:
        """Return the seconds of one prompt."""
        ids = torch.randint(0, 1000, (1, tokens))
        with torch.inference_mode():
            began = time.perf_counter()
            self._model(ids, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - began

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Return the seconds of a step, the mean of some."""
        ids = torch.randint(0, 1000, (batch, context - 1))
        with torch.inference_mode():
            out = self._model(ids, use_cache=True, logits_to_keep=1)
            last = out.logits[:, -1:].argmax(-1)
            began = time.perf_counter()
            for _ in range(steps):
                out = self._model(last, past_key_values=out.past_key_values, use_cache=True)
                last = out.logits[:, -1:].argmax(-1)
            return (time.perf_counter() - began) / steps


if __name__ == "__main__":
    answer(Runner, f"{transformers.__version__}, torch {torch.__version__}")
