from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.kernels import has_native, machine, pick_kernels

MIB = 2**20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


V2 = {"sys/fs/cgroup/cgroup.controllers": "cpu memory\n"}


def test_cgroup_cpu_a_quota_of_one_cpu_on_64_gives_one_thread_and_says_why(tmp_path: Path) -> None:
    root = tree(tmp_path, {**V2, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"})
    found = machine.usable_threads(root, affinity=64)
    assert found.value == 1
    assert found.reason == "a cgroup quota of 1 CPUs (/sys/fs/cgroup) on 64 CPUs"


@pytest.mark.parametrize(
    ("quota", "threads"), [("max 100000", 8), ("150000 100000", 2), ("10000 100000", 1), ("6400000 100000", 8), ("", 8)]
)
def test_a_v2_quota_is_rounded_up_and_max_is_none(tmp_path: Path, quota: str, threads: int) -> None:
    root = tree(tmp_path, {**V2, "proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": quota})
    assert machine.usable_threads(root, affinity=8).value == threads


def test_the_tightest_of_nested_groups_limits(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            **V2,
            "proc/self/cgroup": "0::/outer/middle/inner\n",
            "sys/fs/cgroup/outer/cpu.max": "300000 100000",
            "sys/fs/cgroup/outer/middle/cpu.max": "200000 100000",
            "sys/fs/cgroup/outer/middle/inner/cpu.max": "max 100000",
        },
    )
    found = machine.usable_threads(root, affinity=16)
    assert found.value == 2
    assert "/sys/fs/cgroup/outer/middle" in found.reason


def test_a_container_that_sees_the_hosts_path_reads_its_mounted_root(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {**V2, "proc/self/cgroup": "0::/kubepods/pod1/abc\n", "sys/fs/cgroup/cpu.max": "250000 100000"},
    )
    assert machine.usable_threads(root, affinity=16).value == 3


@pytest.mark.parametrize(("quota", "threads"), [("150000", 2), ("-1", 8)])
def test_cgroup_v1_quota(tmp_path: Path, quota: str, threads: int) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n2:memory:/docker/x\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000",
        },
    )
    assert machine.usable_threads(root, affinity=8).value == threads


def test_without_cgroups_the_affinity_mask_counts(tmp_path: Path) -> None:
    assert machine.usable_threads(tmp_path, affinity=3) == machine.Finding(3, "3 CPUs in the affinity mask")
    assert machine.usable_threads().value >= 1


MEMINFO = {"proc/meminfo": "MemTotal: 9999999 kB\nMemAvailable: 4096000 kB\n"}


def test_available_memory_is_the_machines_without_a_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, {**V2, **MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max"})
    assert machine.available_memory(root) == machine.Finding(4096000 * 1024, "MemAvailable of the machine")


def test_a_cgroups_file_cache_counts_as_available(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            **V2,
            **MEMINFO,
            "proc/self/cgroup": "0::/pod\n",
            "sys/fs/cgroup/pod/memory.max": str(1000 * MIB),
            "sys/fs/cgroup/pod/memory.current": str(900 * MIB),
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\nactive_file {100 * MIB}\ninactive_file {300 * MIB}\n",
        },
    )
    found = machine.available_memory(root)
    assert found.value == 500 * MIB
    assert "1,000 MiB" in found.reason
    assert "/sys/fs/cgroup/pod" in found.reason


def test_cgroup_v1_memory_limit(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/x"
    files = {
        **MEMINFO,
        "proc/self/cgroup": "2:memory:/docker/x\n",
        f"{group}/memory.limit_in_bytes": str(1000 * MIB),
        f"{group}/memory.usage_in_bytes": str(400 * MIB),
        f"{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {100 * MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
    }
    assert machine.available_memory(tree(tmp_path, files)).value == 700 * MIB


def test_processor_name_and_instruction_sets(tmp_path: Path) -> None:
    root = tree(
        tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name : Xeon 9\nflags : fpu avx2 amx_int8 avx512_vnni\n"}
    )
    assert machine.cpu_model(root) == "Xeon 9"
    assert machine.instruction_sets(root) == ("avx2", "avx512_vnni", "amx_int8")
    assert machine.cpu_model(root / "nowhere") == "unknown"
    assert machine.instruction_sets(root / "nowhere") == ()


def test_threads_of_the_loaded_openblas_are_set() -> None:
    config = np.show_config(mode="dicts")
    assert isinstance(config, dict)
    if "openblas" not in config["Build Dependencies"]["blas"]["name"]:
        pytest.skip("this NumPy has no OpenBLAS")
    assert machine.set_threads(1)


def test_kernels_are_picked_by_name() -> None:
    assert pick_kernels("auto", 1).name == ("cpu" if has_native() else "reference")
    assert pick_kernels("reference").name == "reference"
    for name, message in (("cuda", "no CUDA kernels"), ("gpu", "unknown .* 'gpu'")):
        with pytest.raises(ConfigError, match=message):
            pick_kernels(name)
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        pick_kernels("auto", 0)
    with pytest.raises(ConfigError, match="'int8', but the reference kernels keep K and V in float32"):
        pick_kernels("reference", 1, kv_dtype="int8")


def test_without_the_native_library_auto_is_the_reference_and_cpu_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "headway.kernels.cpu", raising=False)
    monkeypatch.setitem(sys.modules, "headway.kernels.cpu._native", None)
    assert not has_native()
    assert pick_kernels("auto", 1).name == "reference"
    with pytest.raises(ConfigError, match=r"no native library .*HEADWAY_NATIVE=0.* C\+\+ compiler"):
        pick_kernels("cpu")


def test_a_native_library_that_does_not_load_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headway.kernels.cpu", raising=False)
    monkeypatch.setitem(sys.modules, "headway.kernels.arrange", None)
    with pytest.raises(ModuleNotFoundError, match="arrange"):
        pick_kernels("auto", 1)
