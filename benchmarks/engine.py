"""The engine without HTTP: decode by batch size, prefill by length, time to ready, memory.

usage: python -m benchmarks.engine [--model smollm2-135m] [--repeats 5] [--kernels auto] [--weights file]
Against peers: benchmarks/peers.py.
"""

from __future__ import annotations

import argparse

from benchmarks.common import head, row
from headway.llm import LLM
from headway.workload import EngineWorkload

DECODE = [(1, 64), (1, 512), (4, 64), (8, 64), (16, 64), (32, 64), (16, 512)]
PREFILL = [128, 512, 2048]


def main() -> None:
    """Print tokens/s of every case, and their share of what the machine reads or multiplies at most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--weights", default="file", choices=("file", "int8", "int4"))
    arguments = parser.parse_args()
    with LLM(
        arguments.model, kernels=arguments.kernels, weights=arguments.weights, kv_memory="2GiB", prefix_cache=False
    ) as llm:
        workload = EngineWorkload(llm)
        facts = workload.facts()
        head(f"benchmarks.engine --model {arguments.model} --weights {arguments.weights}")
        row(f"ready ({facts.kernels}, {facts.isa}, {facts.threads} threads)", [facts.ready_s], "s", digits=2)
        row("resident after loading", [facts.rss_mb], "MB")
        row("weights that a step reads", [facts.weight_read_bytes / 1e6], "MB")
        limits = [workload.limits() for _ in range(arguments.repeats)]
        row("read bandwidth", [read / 1e9 for read, _ in limits], "GB/s", digits=1)
        read, products = (sorted(values)[len(values) // 2] for values in zip(*limits, strict=True))
        for batch, context in DECODE:
            steps = [workload.decode_step_s(batch, context) for _ in range(arguments.repeats)]
            row(f"decode, batch {batch}, context {context}", [batch / step for step in steps], "tokens/s", digits=1)
            if batch == 1:
                moved = facts.weight_read_bytes + context * facts.kv_token_bytes
                row("- of the bandwidth", [100 * moved / step / read for step in steps], "%")
        for tokens in PREFILL:
            seconds = [workload.prefill_s(tokens) for _ in range(arguments.repeats)]
            row(f"prefill {tokens}", [tokens / one for one in seconds], "tokens/s", digits=1)
            row("- of the products", [100 * facts.flops_per_token * tokens / one / products for one in seconds], "%")
        row("resident at the end", [workload.facts().rss_mb], "MB")


if __name__ == "__main__":
    main()
