"""What this machine offers, what headway chose, and why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from importlib.util import find_spec

import msgspec

from headway import __version__
from headway.config import EngineConfig, Environment
from headway.errors import PullError
from headway.kernels import pick_kernels
from headway.kernels.machine import available_memory, cpu_model, instruction_sets, usable_threads
from headway.models.pull import listing

PACKAGES = ("numpy", "tokenizers", "jinja2", "uvicorn", "uvloop", "httptools", "msgspec")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One fact, and the reason behind it."""

    topic: str
    value: str
    why: str = ""
    ok: bool = True


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """All that was looked at."""

    version: str
    machine: str
    isa: list[str]
    threads: int
    threads_why: str
    memory_bytes: int
    memory_why: str
    kernels: str
    kernels_isa: str
    findings: list[Finding]


def examine(environment: Environment) -> Findings:
    """Look at the machine; changes nothing."""
    threads = usable_threads()
    memory = available_memory()
    isa = list(instruction_sets())
    config = EngineConfig()
    kernels = pick_kernels(config.kernels, threads.value, environment.isa)
    return Findings(
        version=__version__,
        machine=cpu_model(),
        isa=isa,
        threads=threads.value,
        threads_why=threads.reason,
        memory_bytes=memory.value,
        memory_why=memory.reason,
        kernels=kernels.name,
        kernels_isa=kernels.isa,
        findings=[
            Finding(topic="python", value=platform.python_version(), why=sys.executable),
            _compiler(),
            _packages(),
            _cache(environment),
            _hub(environment),
        ],
    )


def _compiler() -> Finding:
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    why = "only needed to build native kernels from source" if found is None else ""
    return Finding(topic="C++ compiler", value=found or "none", why=why)


def _packages() -> Finding:
    versions, missing = [], []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    why = f"missing: {', '.join(missing)}; run `pip install headway` again" if missing else ""
    return Finding(topic="packages", value=", ".join(versions), why=why, ok=not missing)


def _cache(environment: Environment) -> Finding:
    place = environment.cache
    try:
        cached = [row.alias.name for row in listing(environment) if row.path]
    except PullError as error:
        return Finding(topic="cache", value=str(place), why=error.message, ok=False)
    parent = next((p for p in (place, *place.parents) if p.exists()), place)
    writable = os.access(parent, os.W_OK)
    why = f"cached: {', '.join(cached) or 'nothing'}"
    if not writable:
        why = f"{parent} cannot be written to; set HEADWAY_CACHE"
    return Finding(topic="cache", value=str(place), why=why, ok=writable)


def _hub(environment: Environment) -> Finding:
    if find_spec("huggingface_hub") is None:
        return Finding(topic="hub", value="not available", why="huggingface_hub is not installed")
    if environment.hub_offline:
        return Finding(topic="hub", value="off", why="HF_HUB_OFFLINE is set")
    return Finding(topic="hub", value="tried first by `headway pull`", why="the package index is the fallback")


def render(found: Findings) -> str:
    """Return the findings for a person."""
    lines = [
        f"headway {found.version}",
        f"machine        {found.machine}",
        f"isa            {' '.join(found.isa) or 'scalar'}",
        f"threads        {found.threads}  ({found.threads_why})",
        f"memory         {found.memory_bytes / 2**30:.1f} GiB available  ({found.memory_why})",
        f"kernels        {found.kernels} ({found.kernels_isa})",
    ]
    for finding in found.findings:
        mark = "" if finding.ok else "  <- mend this"
        lines.append(f"{finding.topic:14} {finding.value}{f'  ({finding.why})' if finding.why else ''}{mark}")
    return "\n".join(lines)
