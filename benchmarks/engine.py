"""The engine without HTTP against transformers (float32, PyTorch) on the same weights, interleaved in one run.

usage: pip install -e '.[bench]'; python -m benchmarks.engine [--model smollm2-135m] [--repeats 5] [--no-peer]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.common import head, row
from headway.config import environment
from headway.llm import LLM
from headway.models.pull import obtain
from headway.workload import EngineWorkload

DECODE = [(1, 64), (1, 512), (4, 64), (16, 64), (16, 512)]
PREFILL = [128, 512]
STEPS = 8


class Peer:
    """transformers on the weights that a GGUF file dequantises to."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        path = obtain(model, environment())
        self._torch = torch
        began = time.perf_counter()
        if path.is_file():
            loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model: Any = loaded.eval()
        self.load_s = time.perf_counter() - began

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds of one forward pass over a prompt."""
        torch = self._torch
        ids = torch.randint(0, 1000, (1, tokens))
        with torch.inference_mode():
            began = time.perf_counter()
            self._model(ids, use_cache=True, logits_to_keep=1)
            return time.perf_counter() - began

    def decode_step_s(self, batch: int, context: int) -> float:
        """Return the seconds of a decode step, mean of a few."""
        torch = self._torch
        ids = torch.randint(0, 1000, (batch, context - 1))
        with torch.inference_mode():
            out = self._model(ids, use_cache=True, logits_to_keep=1)
            last = out.logits[:, -1:].argmax(-1)
            began = time.perf_counter()
            for _ in range(STEPS):
                out = self._model(last, past_key_values=out.past_key_values, use_cache=True)
                last = out.logits[:, -1:].argmax(-1)
            return (time.perf_counter() - began) / STEPS


def main() -> None:
    """Print tokens/s of both and the ratio of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true")
    arguments = parser.parse_args()
    with LLM(arguments.model, prefix_cache=False) as llm:
        ours = EngineWorkload(llm)
        peer = None if arguments.no_peer else Peer(arguments.model)
        head(f"benchmarks.engine --model {arguments.model}")
        row("load, headway", [llm.started.seconds], "s", digits=2)
        if peer is not None:
            row("load, transformers", [peer.load_s], "s", digits=2)
        for batch, context in DECODE:
            mine, theirs = [], []
            for _ in range(arguments.repeats):
                mine.append(batch / ours.decode_step_s(batch, context))
                if peer is not None:
                    theirs.append(batch / peer.decode_step_s(batch, context))
            _rows(f"decode, batch {batch}, context {context}", mine, theirs)
        for tokens in PREFILL:
            mine, theirs = [], []
            for _ in range(arguments.repeats):
                mine.append(tokens / ours.prefill_s(tokens))
                if peer is not None:
                    theirs.append(tokens / peer.prefill_s(tokens))
            _rows(f"prefill {tokens}", mine, theirs)


def _rows(name: str, mine: list[float], theirs: list[float]) -> None:
    row(f"{name}: headway, tokens/s", mine, "", digits=1)
    if theirs:
        row(f"{name}: transformers float32, tokens/s", theirs, "", digits=1)
        row(f"{name}: ratio", [a / b for a, b in zip(mine, theirs, strict=True)], "", digits=2)


if __name__ == "__main__":
    main()
