"""What crosses the border between the API process and the engine process (msgspec, MessagePack)."""

from __future__ import annotations

import msgspec

from headway.types import EngineTiming, Finish, Load, Params, StepReport


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run this prompt; ``params.n`` choices share it. Stop strings are matched by the API process, not here."""

    id: str
    token_ids: tuple[int, ...]
    params: Params
    """``max_tokens`` is resolved (never None) and fits the context; ``seed`` is None or set."""
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    """Instant after which the answer is worthless."""
    start_by: float | None = None
    """Instant after which it is not worth starting: the first token that was asked for would be late."""
    ttft_by: float | None = None
    """Instant at which the first token should be there."""
    itl_s: float | None = None
    """How long the stream may pause between two tokens; prompts beside it are cut to fit."""
    itl_asked: bool = False
    """The caller asked for it: sequences that would break it beside this one wait."""
    arrived: float = 0.0
    ends: tuple[int, ...] = ()
    """End tokens that the tokenizer knows; they count beside those of the model's own files."""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a request, or one choice of it (``index``), in any phase; unknown ids are ignored."""

    id: str
    index: int | None = None
    cause: str = "disconnect"
    """disconnect, deadline, stop (a stop string was met: a normal end), drain, shutdown, error."""
    since: float | None = None
    """When it was decided on the machine-wide clock; how long the blocks were still held counts from here."""


class AbortWaiting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End every request that no step has run yet; each gets ``Refused`` (drain)."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Leave the loop and end the process."""


class Logprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probability of one token under the raw model, with the best alternatives (best first)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Emitted(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """New tokens of one choice; with ``finish`` the choice is over and holds no blocks any more."""

    id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    """The end-of-sequence or stop token that ended the choice is included (it counts as generated)."""
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs | None, ...] = ()
    """With the first tokens of the first choice to have some, when asked for; they are those of all choices."""
    finish: Finish | None = None
    stop_reason: int | None = None
    """The stop token id, when one of the caller's ended the choice."""
    ended_by_token: bool = False
    """The last token is an end-of-sequence or stop token: its text is not shown."""
    timing: EngineTiming | None = None
    """With the first token and with ``finish``."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request will not be run (any more); ``code`` is that of an error in ``headway.errors``."""

    id: str
    code: str
    message: str
    retry_after_s: float | None = None


class Trace(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Name what runs in the next steps."""

    steps: int


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What predictions in the API process are made from (forecast.py)."""

    terms: tuple[float, ...] = ()
    """The cost model's coefficients."""
    pace: float = 1.0
    error: float = 0.0
    prefilling: tuple[tuple[str, int], ...] = ()
    """Requests that are running without a first token, and the tokens of the prompt that they still need."""
    excess: tuple[tuple[str, float], ...] = ()
    """Tokens that a tenant has had more than the one that has had least, of those that have work."""


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The heartbeat: sent after steps (rate limited) and while idle."""

    load: Load
    outlook: Outlook | None = None
    busy_since: float | None = None
    """Start of the step that is running now, else None."""
    steps: tuple[StepReport, ...] = ()
    """Steps since the last Status."""
    freed: tuple[tuple[str, str, float], ...] = ()
    """(phase, cause, seconds from the decision to end a request to its blocks being free) since the last Status."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine can answer."""

    kernels: str
    isa: str
    threads: int
    n_blocks: int
    block_tokens: int
    context_tokens: int
    vocabulary: int
    weight_bytes: int
    kv_bytes: int
    seconds: float
    calibrated_s: float = 0.0
    """Of these, what the cost model's first measurements took."""
    calibration_kept: bool = False
    """An earlier start's measurements were taken over."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine could not start; ``message`` is for a person."""

    code: str
    message: str


ToEngine = Submit | Abort | AbortWaiting | Trace | Stop
FromEngine = Emitted | Refused | Status | Started | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


def encode(messages: list[ToEngine] | list[FromEngine]) -> bytes:
    """Return the wire form of a batch of messages."""
    return _encoder.encode(messages)


def decode_to_engine(raw: bytes) -> list[ToEngine]:
    """Return the messages that ``encode`` wrote."""
    return _to_engine.decode(raw)


def decode_from_engine(raw: bytes) -> list[FromEngine]:
    """Return the messages that ``encode`` wrote."""
    return _from_engine.decode(raw)
