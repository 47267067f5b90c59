"""Every Op's signature and its implementations; ``pick_kernels`` chooses one by name."""

from __future__ import annotations

from headway.errors import ConfigError
from headway.kernels import machine
from headway.kernels.ops import Kernels


def pick_kernels(name: str, threads: int | None = None) -> Kernels:
    """Return an implementation: ``auto`` is the fastest here; raises ConfigError when the named one is missing.

    ``threads`` None takes what the affinity mask and the cgroup allow.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"engine.threads must be at least 1, not {threads}")
    if threads is None:
        threads = machine.usable_threads().value
    match name:
        case "auto" | "reference":
            from headway.kernels.reference import ReferenceKernels

            # Our threads share each product; where NumPy's BLAS cannot be told to use one, it does the sharing.
            return ReferenceKernels(threads if machine.set_threads(1) else 1)
        case "cpu":
            raise ConfigError(
                "engine.kernels is 'cpu', but this build has no native library; use 'auto' or 'reference' (NumPy)"
            )
        case "cuda":
            raise ConfigError(
                "engine.kernels is 'cuda', but this build has no CUDA kernels; use 'auto' or 'reference' (NumPy)"
            )
        case _:
            raise ConfigError(f"unknown engine.kernels {name!r}: auto, cpu, cuda or reference")
