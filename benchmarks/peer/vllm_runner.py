"""vLLM's CPU build in bfloat16. usage: vllm_runner.py DIR THREADS"""

from __future__ import annotations

import os
import sys
import time

# The engine in this process, so that its steps can be counted; as many threads as asked for.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{int(sys.argv[2]) - 1}"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm
from answer import answer


class Runner:
    """One engine for all cases."""

    def __init__(self, path: str, threads: int) -> None:
        del threads  # set above, before vLLM is imported
        self._llm = vllm.LLM(
            model=path,
            dtype="bfloat16",
            max_model_len=2304,
            max_num_seqs=32,
            max_num_batched_tokens=2304,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._count = 0

    def _add(self, tokens: int, wanted: int) -> None:
        self._count += 1
        prompt = vllm.TokensPrompt(prompt_token_ids=[100 + (self._count + i) % 1000 for i in range(tokens)])
        settings = vllm.SamplingParams(
            temperature=0, max_tokens=wanted, min_tokens=wanted, ignore_eos=True, detokenize=False
        )
        self._llm.llm_engine.add_request(str(self._count), prompt, settings)

    def prefill(self, tokens: int) -> float:
        """Return the seconds of one prompt."""
        engine = self._llm.llm_engine
        began = time.perf_counter()
        self._add(tokens, 1)
        while engine.has_unfinished_requests():
            engine.step()
        return time.perf_counter() - began

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Return the seconds of a step, the mean of some; the prompts are read before."""
        engine = self._llm.llm_engine
        spare = 8 + -(-batch * context // 2304)  # steps until the last prompt is read
        for _ in range(batch):
            self._add(context - 1, spare + steps + 2)
        for _ in range(spare):
            engine.step()
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        seconds = (time.perf_counter() - began) / steps
        while engine.has_unfinished_requests():
            engine.step()
        return seconds


if __name__ == "__main__":
    answer(Runner, f"{vllm.__version__}, bfloat16")
