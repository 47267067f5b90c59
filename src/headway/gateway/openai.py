"""The request bodies of the OpenAI wire (with vLLM's extra sampling fields).

The same definitions validate and make /openapi.json. A field that is null means its default; fields that are not named
here are tolerated, because newer clients send them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

NonEmpty = Annotated[str, Meta(min_length=1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
Json = dict[str, Any]


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries beside the answer."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]


class SamplingBody(msgspec.Struct, kw_only=True):
    """What chat and plain completions have in common."""

    model: NonEmpty | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Meta(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    prompt_logprobs: Alternatives | None = None
    priority: Int32 | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


UNSUPPORTED: Final = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields that change the answer and are not honoured yet: refused rather than ignored."""


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only text can be read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """The function that an assistant called, with its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class ToolCallBody(msgspec.Struct, kw_only=True):
    """A call that an earlier assistant message holds."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class MessageBody(msgspec.Struct, kw_only=True):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None


class ToolBody(msgspec.Struct, kw_only=True):
    """A function that the model may call; handed to the chat template as it is."""

    type: Literal["function"]
    function: Json


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | Json | None = None
    functions: list[Any] | None = None
    add_generation_prompt: bool | None = None


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: Alternatives | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: one of ``prompt`` and ``messages``."""

    model: NonEmpty | None = None
    prompt: str | None = None
    messages: Annotated[list[MessageBody], Meta(min_length=1)] | None = None
    tools: list[ToolBody] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: NonEmpty | None = None
