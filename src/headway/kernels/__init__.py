"""Every Op's signature and its implementations; ``pick_kernels`` chooses one by name."""

from __future__ import annotations

from importlib import import_module
from typing import Literal

from headway.errors import ConfigError
from headway.kernels import machine
from headway.kernels.ops import Kernels

KVType = Literal["bf16", "int8"]
Prefill = Literal["exact", "fast"]


def pick_kernels(
    name: str,
    threads: int | None = None,
    isa: str = "",
    kv_dtype: KVType = "bf16",
    prefill: Prefill = "exact",
) -> Kernels:
    """Return an implementation: ``auto`` is the fastest here; raises ConfigError when the named one is missing.

    ``threads`` None takes what the affinity mask and the cgroup allow.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"engine.threads must be at least 1, not {threads}")
    if threads is None:
        threads = machine.usable_threads().value
    match name:
        case "auto":
            return _native(threads, isa, kv_dtype, prefill) if has_native() else _reference(threads, kv_dtype)
        case "reference":
            return _reference(threads, kv_dtype)
        case "cpu":
            if not has_native():
                raise ConfigError(
                    "engine.kernels is 'cpu', but this installation has no native library (it was built with"
                    " HEADWAY_NATIVE=0); install it again with a C++ compiler, or use 'reference' (NumPy)"
                )
            return _native(threads, isa, kv_dtype, prefill)
        case "cuda":
            raise ConfigError(
                "engine.kernels is 'cuda', but this build has no CUDA kernels; use 'auto', 'cpu' or 'reference' (NumPy)"
            )
        case _:
            raise ConfigError(f"unknown engine.kernels {name!r}: auto, cpu, cuda or reference")


def has_native() -> bool:
    """Whether the native library was built; one that is there and does not load is an error of its own."""
    try:
        import_module("headway.kernels.cpu")
    except ModuleNotFoundError as error:
        if error.name != "headway.kernels.cpu._native":
            raise
        return False
    return True


def _native(threads: int, isa: str, kv_dtype: KVType, prefill: Prefill) -> Kernels:
    from headway.kernels.cpu import NativeKernels

    return NativeKernels(threads, isa, kv_dtype, prefill)


def _reference(threads: int, kv_dtype: str) -> Kernels:
    from headway.kernels.reference import ReferenceKernels

    if kv_dtype == "int8":
        raise ConfigError("engine.kv_dtype is 'int8', but the reference kernels keep K and V in float32; use 'cpu'")
    machine.set_threads(threads)
    return ReferenceKernels(threads)
