"""OpenVINO on a stateful model, weights in int8 or int4. usage: openvino_runner.py DIR THREADS [int8|int4]

The model is exported once by optimum-intel, beside the directory, and compiled at each start.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from answer import answer

BITS = sys.argv[3] if len(sys.argv) > 3 else "int8"


def export(folder: Path) -> Path:
    """Return the exported model, made if it is not there."""
    out = folder.with_name(f"{folder.name}-openvino-{BITS}")
    if not (out / "openvino_model.xml").exists():
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        hidden = json.loads((folder / "config.json").read_text())["hidden_size"]
        group = 128 if hidden % 128 == 0 else 64
        config = (
            OVWeightQuantizationConfig(bits=8)
            if BITS == "int8"
            else OVWeightQuantizationConfig(bits=4, group_size=group, sym=False)
        )
        OVModelForCausalLM.from_pretrained(
            folder, export=True, quantization_config=config, compile=False
        ).save_pretrained(out)
    return out


class Runner:
    """One compiled model for all cases."""

    def __init__(self, path: str, threads: int) -> None:
        core = ov.Core()
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
        compiled = core.compile_model(core.read_model(export(Path(path)) / "openvino_model.xml"), "CPU", settings)
        self._names = {name for one in compiled.inputs for name in one.get_names()}
        self._request = compiled.create_infer_request()

    def _run(self, ids: Any, past: int) -> Any:
        batch, count = ids.shape
        whole: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": np.ones((batch, past + count), np.int64),
            "position_ids": np.tile(np.arange(past, past + count, dtype=np.int64), (batch, 1)),
            "beam_idx": np.arange(batch, dtype=np.int32),
        }
        self._request.infer({name: value for name, value in whole.items() if name in self._names})
        return self._request.get_tensor("logits").data

    def prefill(self, tokens: int) -> float:
        """Return the seconds of one prompt."""
        self._request.reset_state()
        ids = np.arange(tokens, dtype=np.int64)[None] % 1000
        began = time.perf_counter()
        self._run(ids, 0)
        return time.perf_counter() - began

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Return the seconds of a step, the mean of some."""
        self._request.reset_state()
        ids = np.tile(np.arange(context - 1, dtype=np.int64) % 1000, (batch, 1))
        last = self._run(ids, 0)[:, -1:].argmax(-1).astype(np.int64)
        began = time.perf_counter()
        for step in range(steps):
            last = self._run(last, context - 1 + step)[:, -1:].argmax(-1).astype(np.int64)
        return (time.perf_counter() - began) / steps


if __name__ == "__main__":
    answer(Runner, f"{ov.__version__.split('-')[0]}, {BITS}")
