"""Every setting, one frozen model per part; unknown keys are refused, the environment is read here only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from headway.errors import ConfigError

Positive = Annotated[int, msgspec.Meta(ge=1)]
MOST_THREADS = 1024
"""Far above any use; a mistyped number is refused before the machine runs out of threads."""
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine: kernels, KV cache, scheduler."""

    kernels: Literal["auto", "cpu", "cuda", "reference"] = "auto"
    """Which implementation of the Ops runs the model."""
    threads: Annotated[int, msgspec.Meta(ge=1, le=MOST_THREADS)] | None = None
    """Compute threads; by default what the affinity mask and the cgroup quota allow."""
    kv_memory: str | None = None
    """Memory for the KV cache, such as "2GiB"; by default a share of what the cgroup leaves available."""
    kv_dtype: Literal["bf16", "int8"] = "bf16"
    """How the native kernels keep K and V; int8 halves the memory, at a loss that depends on the model
    (docs/performance.md)."""
    weights: Literal["file", "int8", "int4"] = "file"
    """Rounds the weights to nearest as they are loaded, in groups of 128 where they divide; int4 leaves the embedding
    and the head in int8. By default they stay as the file has them."""
    prefill: Literal["exact", "fast"] = "exact"
    """How prompts are read. Fast rounds the weights again where that saves time (AMX only): results then depend on how
    a prompt is cut, and on what of it was cached."""
    block_tokens: Positive = 32
    """Tokens in a KV block."""
    context_tokens: Positive | None = None
    """Shortens the model's context."""
    max_running: Positive = 64
    """Sequences that decode at the same time."""
    max_waiting: Positive = 1024
    """Requests that may queue; more are refused with 503."""
    step_tokens: Positive = 256
    """Token budget of a step: decodes first, then prefill chunks."""
    longest_step_s: Seconds = 0.1
    """What a step with prefill in it should take at most: prompts are cut to fit, down to 32 tokens."""
    prefix_cache: bool = True
    """Reuse the KV blocks of equal prefixes."""
    aging_s: Seconds = 5.0
    """Waiting this long raises a request by one priority level."""
    heartbeat_s: Seconds = 0.5
    """How often the engine process reports."""
    hang_s: Seconds = 3.0
    """Silence after which the engine counts as hung (live fails)."""
    kill_s: Seconds = 20.0
    """Silence after which a hung engine is killed and started again."""
    step_limit_s: Seconds = 60.0
    """A single step that takes longer counts as hung."""


class ClassConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What requests of a class are promised when their callers ask for nothing else."""

    ttft_s: Seconds | None = None
    """First token of a short prompt after this long; a long one gets twice what it takes alone on top. A request that
    would miss it is refused on arrival. None promises nothing."""
    itl_s: Seconds | None = None
    """Longest pause between two tokens that prompts beside the stream may cause. None promises nothing."""
    priority: int = 0
    """Added to the request's own; lower runs first."""


class SloConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Classes of service; the header x-slo-class picks one."""

    default: Literal["interactive", "standard", "batch"] = "standard"
    """Class of requests that name none."""
    interactive: ClassConfig = ClassConfig(ttft_s=2.0, itl_s=0.1, priority=-1)
    """Somebody is waiting and reading along."""
    standard: ClassConfig = ClassConfig(ttft_s=30.0, itl_s=0.25)
    """Somebody will read it."""
    batch: ClassConfig = ClassConfig(priority=10)
    """Nobody is waiting: runs in what the others leave, after ``engine.aging_s`` for each level at the latest."""

    def of(self, name: str) -> ClassConfig:
        """Return a class by its name."""
        found: ClassConfig = getattr(self, name)
        return found


SLO_CLASSES = ("interactive", "standard", "batch")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    body_bytes: Positive = 8 * 1024 * 1024
    """Largest request body."""
    head_bytes: Positive = 64 * 1024
    """Largest request line with its headers."""
    body_s: Seconds = 30.0
    """Time for a request's head to arrive, and again for its body."""
    ping_s: Seconds = 10.0
    """Idle time after which a stream gets a keep-alive comment."""
    write_s: Seconds = 30.0
    """A client that reads nothing for this long is cut off."""
    drain_s: Seconds = 30.0
    """Time for running streams to finish after SIGTERM."""
    request_s: Seconds | None = None
    """Server-side limit on a whole request; a caller may ask for less (``x-request-timeout-ms``)."""
    recent_requests: Positive = 1000
    """Ledgers kept for ``/v1/requests/{id}/timing``."""
    tenant_header: str = ""
    """Header whose value names the tenant (x-tenant, say), where a proxy in front sets it for every request; tenants
    share no cached prefixes, and get equal shares of the engine. Empty: all are one tenant."""
    access_log: bool = False
    """One JSON line per request on stderr."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole deployment: ``headway.yaml`` has this shape."""

    model: str = "smollm2-135m"
    """Alias, directory in Hugging Face layout, .gguf file or hub id."""
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    slo: SloConfig = SloConfig()


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment may set."""

    cache: Path
    """HEADWAY_CACHE: where pulled models are kept; by default headway in XDG_CACHE_HOME or ~/.cache."""
    hub_offline: bool
    """HF_HUB_OFFLINE: never ask a hub."""
    isa: str = ""
    """HEADWAY_ISA: native kernels' instruction set (amx, avx512, avx2_vnni, avx2, neon_i8mm, neon, scalar); by default
    the best here."""
    openai_api_key: str = ""
    """OPENAI_API_KEY: the key that `headway bench serve` shows to the server that it measures."""


def environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read the environment; every variable that headway knows is here."""
    env = os.environ if environ is None else environ
    base = env.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = env.get("HEADWAY_CACHE") or str(Path(base) / "headway")
    offline = env.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}
    return Environment(
        cache=Path(cache).expanduser(),
        hub_offline=offline,
        isa=env.get("HEADWAY_ISA", ""),
        openai_api_key=env.get("OPENAI_API_KEY", ""),
    )


def load_config(path: Path | None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return the settings of a YAML file with the command line's overrides on top.

    ``overrides`` maps dotted names ("engine.threads") to values; None values do not count. Raises ConfigError with the
    key and the reason.
    """
    import yaml

    raw: Any = {}
    if path is not None:
        try:
            raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise ConfigError(f"cannot read config {str(path)!r}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"config {str(path)!r} is not YAML: {_yaml_fault(error)}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"config {str(path)!r} must be a mapping of settings, not {type(raw).__name__}")
    for name, value in (overrides or {}).items():
        if value is None:
            continue
        place = raw
        *parents, leaf = name.split(".")
        for parent in parents:
            inner = place.get(parent)
            place[parent] = dict(inner) if isinstance(inner, dict) else {}
            place = place[parent]
        place[leaf] = value
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        where = f"config {str(path)!r}" if path else "settings"
        raise ConfigError(f"{where}: {error}{_found(raw, str(error))}; docs/settings.md lists every setting") from error


def _yaml_fault(error: Exception) -> str:
    """Return what is wrong and where, on one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error).splitlines()[0]
    return f"{getattr(error, 'problem', None) or 'a mistake'}, line {mark.line + 1}, column {mark.column + 1}"


def _found(raw: Any, message: str) -> str:
    """Return ", not VALUE" for the place that a validation message ends with (``- at `$.engine.threads```)."""
    place = message.rpartition("`$.")[2].rstrip("`")
    value: Any = raw
    for part in place.split("."):
        if not isinstance(value, dict) or part not in value:
            return ""
        value = value[part]
    return f", not {value!r}"


_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": 2**10,
    "m": 10**6,
    "mb": 10**6,
    "mib": 2**20,
    "g": 10**9,
    "gb": 10**9,
    "gib": 2**30,
    "t": 10**12,
    "tb": 10**12,
    "tib": 2**40,
}


def parse_bytes(text: str) -> int:
    """Return the bytes that "2GiB", "512MB" or "1000000" mean; raises ConfigError naming the text."""
    stripped = text.strip().lower()
    number = stripped.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = stripped[len(number) :].strip()
    try:
        value = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        raise ConfigError(f"not an amount of memory: {text!r}; write it like 2GiB or 512MB") from None
    if not 0 < value < 2**63:
        raise ConfigError(f"not an amount of memory: {text!r}; it must be above zero")
    return int(value)
