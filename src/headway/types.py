"""The nouns that cross borders: what a caller asked, what comes back, and who answers.

Every value here is frozen. Times are seconds on the machine-wide monotonic clock (``telemetry.clock``), so that the
API process and the engine process speak of the same instant.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, Protocol

import msgspec

JsonObject = Mapping[str, Any]


class Finish(StrEnum):
    """Why a sequence ended; the wire values of ``finish_reason``."""

    STOP = "stop"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


class Params(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample one request; values are validated at the border (``gateway.openai``, ``llm``)."""

    max_tokens: int | None = None
    """Upper bound on generated tokens; None means up to the end of the context, 0 only reads the prompt."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    """Number of alternatives reported per generated token (0: only the chosen one); None reports nothing."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function call that an assistant message of the conversation holds."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation; content parts are already joined to one string."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller was promised: by its own headers, or by its class's defaults."""

    ttft_s: float | None = None
    """From arrival to the first token."""
    itl_s: float | None = None
    """Between two tokens."""
    ttft_asked: bool = False
    """The caller asked for it. A default is given to short prompts; long ones get what they take, twice, on top."""
    itl_asked: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asked. Exactly one of ``text``, ``token_ids`` and ``messages`` is set."""

    id: str
    model: str
    params: Params = Params()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    tools: tuple[JsonObject, ...] = ()
    add_generation_prompt: bool = True
    priority: int = 0
    """Lower runs first."""
    tenant: str = ""
    """Salts the prefix cache: tenants share no blocks."""
    deadline: float | None = None
    """Instant after which the answer is worthless; None waits for ever."""
    slo: Slo = Slo()
    arrived: float = 0.0


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probability of one token under the model (before penalties, bias and truncation), with alternatives."""

    token_id: int
    logprob: float
    text: str = ""
    raw: bytes = b""
    """The token's own bytes, which need not be whole characters."""
    top: tuple[TokenLogprob, ...] = ()
    """Best first; alternatives have no alternatives of their own."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens counted for one request, over all of its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class EngineTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Instants that the engine measured for one request (its first choice); 0.0 means not reached."""

    received: float = 0.0
    """The engine took the request over."""
    scheduled: float = 0.0
    """Its first token ran in a Batch."""
    prefilled: float = 0.0
    """The step that computed the prompt's last token ended."""
    first_token: float = 0.0
    """The first token was sampled."""
    finished: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of the answer. Each choice ends with one ``finish``; the request's last Chunk carries ``usage``."""

    index: int = 0
    """Which of the n choices."""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    """Set on the first Chunk of each choice."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """Set on the first Chunk of a choice when asked for; the first prompt token has none."""
    finish: Finish | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice."""
    usage: Usage | None = None
    timing: EngineTiming | None = None
    """Set with the first token and again, complete, with ``usage``."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a Backend says about a model that it serves."""

    name: str
    context_tokens: int
    vocabulary: int
    has_chat_template: bool
    created: int = 0
    architecture: str = ""
    kernels: str = ""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a Backend is now."""

    running: int = 0
    waiting: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    block_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prefix_miss_tokens: int = 0
    capacity_tokens: int = 0
    """Tokens that all blocks hold."""
    backlog_tokens: int = 0
    """Of prompts, waiting to be computed."""
    wait_s: float = 0.0
    """Predicted seconds until all that is queued has its first token."""
    step_error: float = 0.0
    """Running mean of how far predicted step times are off, as a share."""
    integrity: str = ""
    """Empty while the block pool's invariants hold; else the first one that broke (checked when idle)."""


Ran = tuple[tuple[str, int, int], ...]
"""(request, choice, tokens) of the parts of a step."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one step did."""

    started: float
    seconds: float
    predicted: float
    """Seconds that the cost model had said."""
    decode_rows: int
    prefill_tokens: int
    context_tokens: int
    """Tokens that the decodes read back."""
    prefill_pairs: int
    """Pairs of a prompt's token and one before it."""
    sampled: int
    ran: Ran = ()
    """What ran, when a trace was asked for."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Three honest answers; ``reason`` says why one is no."""

    live: bool
    """The engine's steps advance, or it is idle and answers."""
    ready: bool
    """A request sent now would be run."""
    reason: str = ""


class Backend(Protocol):
    """Answers Requests with Chunks: the only thing that the gateway knows of an engine or an upstream server."""

    def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield the answer's Chunks.

        Refusals raise ``HeadwayError`` from the first ``anext``; failures raise it later. Closing the generator (or
        cancelling the task that reads it) cancels the request from any phase and frees what it held.
        """
        ...

    async def cancel(self, request_id: str, cause: str) -> None:
        """End a request from outside; unknown ids are ignored."""
        ...

    async def tokenize(
        self,
        *,
        text: str | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[JsonObject] = (),
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """Return the ids of a text, or of a conversation rendered by the chat template."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens included."""
        ...

    def models(self) -> tuple[ModelCard, ...]:
        """Return the models served; the first is the default."""
        ...

    def load(self) -> Load:
        """Return the newest load figures; never waits."""
        ...

    def health(self) -> Health:
        """Return the newest health; never waits."""
        ...

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, end waiting ones with ``Overloaded``, let running ones finish up to the limit."""
        ...

    async def close(self) -> None:
        """Stop at once and give everything back."""
        ...


Phase = Literal["queued", "prefill", "decode"]
