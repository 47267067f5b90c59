"""A GGUF model as a Hugging Face directory, dequantised: for peers that read no such file. usage: convert.py IN OUT"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Write weights in bfloat16, config and tokenizer."""
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The weights are plain by now, but transformers would not write what it calls a quantized model.
    model.hf_quantizer, model.config.quantization_config = None, None
    del model.config.quantization_config
    model.is_quantized = False
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)


if __name__ == "__main__":
    main()
