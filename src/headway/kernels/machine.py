"""What the machine offers this process: cores, memory and instruction sets, within its cgroup's limits."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_UNLIMITED_V1 = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63
_KNOWN_SETS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """A number and where it comes from, for ``doctor`` and for messages."""

    value: int
    reason: str


def cpu_model(root: Path = ROOT) -> str:
    """Return the processor's name, or "unknown"."""
    return _cpuinfo(root, "model name") or _cpuinfo(root, "CPU implementer") or "unknown"


def instruction_sets(root: Path = ROOT) -> tuple[str, ...]:
    """Return the instruction sets that matter to kernels, as /proc/cpuinfo names them."""
    flags = (_cpuinfo(root, "flags") or _cpuinfo(root, "Features") or "").split()
    return tuple(name for name in _KNOWN_SETS if name in flags)


def usable_threads(root: Path = ROOT, affinity: int | None = None) -> Finding:
    """Return how many threads can run at once: the affinity mask or the tightest cgroup quota, rounded up."""
    if affinity is None:
        affinity = _affinity()
    best = Finding(max(1, affinity), f"{affinity} CPUs in the affinity mask")
    for group in _groups(root, "cpu"):
        quota = _quota(group)
        if quota is not None and max(1, math.ceil(quota)) < best.value:
            threads = max(1, math.ceil(quota))
            reason = f"a cgroup quota of {quota:g} CPUs ({_shown(group, root)}) on {affinity} CPUs"
            best = Finding(threads, reason)
    return best


def available_memory(root: Path = ROOT) -> Finding:
    """Return the bytes that can still be taken: MemAvailable or the tightest cgroup's rest.

    A cgroup's file cache counts as available, as the kernel gives it back before it kills.
    """
    best = Finding(_mem_available(root), "MemAvailable of the machine")
    for group in _groups(root, "memory"):
        rest = _memory_rest(group)
        if rest is not None and rest[0] < best.value:
            free, limit = rest
            best = Finding(
                free, f"what is left of the cgroup limit of {limit / 2**20:,.0f} MiB ({_shown(group, root)})"
            )
    return best


def set_threads(threads: int) -> bool:
    """Set the threads of the OpenBLAS that NumPy has loaded; False when there is none to ask.

    Where this is False, set OPENBLAS_NUM_THREADS, MKL_NUM_THREADS and OMP_NUM_THREADS before NumPy is imported.
    """
    found = False
    for path in _loaded_libraries():
        library = ctypes.CDLL(path)
        for name in _openblas_setters():
            function = getattr(library, name, None)
            if function is not None:
                function.argtypes, function.restype = [ctypes.c_int], None
                function(threads)
                found = True
                break
    return found


def _openblas_setters() -> Iterator[str]:
    for prefix in ("scipy_", ""):
        for suffix in ("64_", "_64", ""):
            yield f"{prefix}openblas_set_num_threads{suffix}"


def _loaded_libraries() -> list[str]:
    """Return the paths of the OpenBLAS libraries mapped into this process."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if "openblas" in Path(path).name.lower() and Path(path).exists())


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpuinfo(root: Path, key: str) -> str | None:
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _mem_available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield this process's cgroup directories for a controller, from the innermost outwards: every one limits.

    In a container the path in /proc/self/cgroup may be the host's, of which only the mounted root is seen.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
            if not (mount / "cgroup.controllers").exists() and (mount / "unified").is_dir():
                mount = mount / "unified"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controllers
            if not mount.is_dir():
                mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        for part in (inner, *inner.parents):
            directory = mount / part
            if ".." not in part.parts and directory.is_dir():
                yield directory


def _quota(group: Path) -> float | None:
    """Return a group's quota in CPUs, or None."""
    v2 = _read(group / "cpu.max").split()
    if len(v2) == 2:
        return None if v2[0] == "max" else int(v2[0]) / int(v2[1])
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota is not None and period and quota > 0 else None


def _memory_rest(group: Path) -> tuple[int, int] | None:
    """Return a group's (bytes left, limit), or None without a limit."""
    limit = _number(group / "memory.max")
    used, cache_key = _number(group / "memory.current"), "inactive_file"
    if limit is None and used is None:
        limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
        cache_key = "total_inactive_file"
    if limit is None or used is None or limit >= _UNLIMITED_V1:
        return None
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines() if len(line.split()) == 2)
    cache = int(stat.get(cache_key, 0)) + int(stat.get(cache_key.replace("inactive", "active"), 0))
    return max(0, limit - used + min(cache, used)), limit


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _shown(group: Path, root: Path) -> str:
    return f"/{group.relative_to(root)}"
