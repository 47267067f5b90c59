"""A validated body to a Call: what is asked of the backend, and how the answer is to be written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from headway.errors import ContextExceeded, InvalidRequest, ModelNotFound
from headway.gateway.decode import decode
from headway.gateway.openai import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    ContentPart,
    MessageBody,
    SamplingBody,
    ToolBody,
)
from headway.types import JsonObject, Message, ModelCard, Params, Request, ToolCall

MAX_PROMPTS: Final = 1024
"""Prompts in one completion body."""
MAX_PROMPT_LOGPROBS: Final = 1 << 20
"""Log-probabilities of prompt tokens in one answer, over all of its choices: they are held whole, as objects."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request for tokens: one Request per prompt, and the wire's options."""

    requests: tuple[Request, ...]
    model: str
    chat: bool
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    echo: bool = False
    """The gateway writes the prompt in front of each choice; the backend is not asked to."""

    @property
    def params(self) -> Params:
        """The sampling parameters that all prompts share."""
        return self.requests[0].params


def find_model(name: str | None, cards: Sequence[ModelCard], aliases: Sequence[str]) -> ModelCard:
    """Return the card of a served model; ``aliases`` name the first one too. Raises ModelNotFound."""
    if name is None or name in aliases:
        return cards[0]
    for card in cards:
        if card.name == name:
            return card
    served = ", ".join(repr(card.name) for card in cards)
    raise ModelNotFound(f"the model {name[:200]!r} is not served here; served: {served}", param="model")


def parse_chat(
    raw: bytes, cards: Sequence[ModelCard], aliases: Sequence[str], *, request_id: str, arrived: float
) -> Call:
    """Return the Call of a chat body; raises InvalidRequest or ModelNotFound."""
    body = decode(raw, ChatBody)
    card = find_model(body.model, cards, aliases)
    if body.functions:
        raise InvalidRequest("functions is not supported; use tools", param="functions")
    if body.tool_choice == "required" or isinstance(body.tool_choice, dict):
        raise InvalidRequest("tool_choice other than 'none' and 'auto' is not supported yet", param="tool_choice")
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest(f"top_logprobs={body.top_logprobs} needs logprobs=true", param="top_logprobs")
    if body.max_completion_tokens is not None:
        limit: int | None = body.max_completion_tokens
        field = "max_completion_tokens"
    else:
        limit, field = body.max_tokens, "max_tokens"
    params = _params(body, card, max_tokens=limit, field=field)
    if body.logprobs:
        params = msgspec.structs.replace(params, logprobs=body.top_logprobs or 0)
    talk = messages(body.messages)
    _check_prompt_logprobs([sum(len(message.content or "") for message in talk)], 1, params, card)
    request = Request(
        id=request_id,
        model=card.name,
        params=params,
        messages=talk,
        tools=() if body.tool_choice == "none" else tools(body.tools),
        add_generation_prompt=body.add_generation_prompt is not False,
        priority=body.priority or 0,
        arrived=arrived,
    )
    return _call(body, card, (request,), chat=True)


def parse_completion(
    raw: bytes, cards: Sequence[ModelCard], aliases: Sequence[str], *, request_id: str, arrived: float
) -> Call:
    """Return the Call of a completion body; raises InvalidRequest or ModelNotFound."""
    body = decode(raw, CompletionBody)
    card = find_model(body.model, cards, aliases)
    echo = bool(body.echo)
    if body.suffix:
        raise InvalidRequest("suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(f"best_of={body.best_of} is not supported other than equal to n", param="best_of")
    if body.max_tokens == 0 and not echo:
        raise InvalidRequest("max_tokens=0 is allowed with echo=true only; it must be >= 1", param="max_tokens")
    # OpenAI's default for this endpoint is 16, not the rest of the context.
    limit = 16 if body.max_tokens is None else body.max_tokens
    params = _params(body, card, max_tokens=limit, field="max_tokens")
    params = msgspec.structs.replace(params, logprobs=body.logprobs)
    if echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
    prompts = _prompts(body.prompt, card)
    if len(prompts) * params.n > MAX_PROMPTS:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={params.n} are more than {MAX_PROMPTS} choices", param="prompt"
        )
    _check_prompt_logprobs([len(prompt) for prompt in prompts], params.n, params, card)
    requests = tuple(
        Request(
            id=request_id if len(prompts) == 1 else f"{request_id}:{i}",
            model=card.name,
            params=params,
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
            priority=body.priority or 0,
            arrived=arrived,
        )
        for i, prompt in enumerate(prompts)
    )
    return _call(body, card, requests, chat=False, echo=echo)


def _call(
    body: SamplingBody, card: ModelCard, requests: tuple[Request, ...], *, chat: bool, echo: bool = False
) -> Call:
    options = body.stream_options
    return Call(
        requests=requests,
        model=body.model or card.name,
        chat=chat,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        return_token_ids=bool(body.return_token_ids),
        echo=echo,
    )


def _params(body: SamplingBody, card: ModelCard, *, max_tokens: int | None, field: str) -> Params:
    """Return the sampling parameters; null fields take the defaults of ``Params``."""
    _refuse_unsupported(body)
    if max_tokens is not None and max_tokens > card.context_tokens:
        raise ContextExceeded(
            f"{field}={max_tokens} exceeds the model's context of {card.context_tokens} tokens", param=field
        )
    min_tokens = body.min_tokens or 0
    if min_tokens > (card.context_tokens if max_tokens is None else max_tokens):
        raise InvalidRequest(
            f"min_tokens={min_tokens} is not allowed: it must be <= {field} "
            f"({card.context_tokens if max_tokens is None else max_tokens})",
            param="min_tokens",
        )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    for i, token_id in enumerate(body.stop_token_ids or ()):
        _check_token_id(token_id, card, f"stop_token_ids[{i}]")
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "ignore_eos": body.ignore_eos,
        "n": body.n,
    }
    return Params(
        max_tokens=max_tokens,
        logit_bias=_logit_bias(body.logit_bias or {}, card),
        seed=body.seed,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        min_tokens=min_tokens,
        prompt_logprobs=body.prompt_logprobs,
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )


def _check_prompt_logprobs(lengths: Sequence[int], copies: int, params: Params, card: ModelCard) -> None:
    """Refuse an answer that would hold too many; of a text, a character counts as a token."""
    if params.prompt_logprobs is None:
        return
    entries = sum(min(length, card.context_tokens) for length in lengths) * copies * (1 + params.prompt_logprobs)
    if entries > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"the answer would hold up to {entries} log-probabilities of prompt tokens, more than "
            f"{MAX_PROMPT_LOGPROBS}; ask for fewer prompts, choices or alternatives at once",
            param="prompt_logprobs" if params.prompt_logprobs != params.logprobs else "logprobs",
        )


def _refuse_unsupported(body: SamplingBody) -> None:
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequest(
            f"response_format.type={body.response_format.type!r} is not supported yet; 'text' is",
            param="response_format",
        )
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not available with stream=true", param="prompt_logprobs")
    for field in UNSUPPORTED:
        if getattr(body, field) is not None:
            raise InvalidRequest(f"{field} is not supported yet", param=field)


def _logit_bias(given: dict[str, float], card: ModelCard) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        # isdecimal() knows digits of other scripts, and int() reads them: both are harmless.
        token_id = int(key) if key.isdecimal() and len(key) <= 12 else -1
        if not 0 <= token_id < card.vocabulary:
            raise InvalidRequest(
                f"logit_bias has the key {key[:40]!r}: it must be a token id from 0 to {card.vocabulary - 1}",
                param="logit_bias",
            )
        biases[token_id] = bias
    return biases


def _check_token_id(token_id: int, card: ModelCard, where: str) -> None:
    if token_id >= card.vocabulary:
        raise InvalidRequest(
            f"{where}={token_id} is not a token id of {card.name!r}: it must be from 0 to {card.vocabulary - 1}",
            param=where.partition("[")[0],
        )


def _prompts(prompt: str | list[str | int | list[int]], card: ModelCard) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts of the four forms: text, texts, ids, lists of ids."""
    if isinstance(prompt, str):
        return (prompt,)
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1:
        raise InvalidRequest("prompt must be text, token ids, or a list of one of them, not a mixture", param="prompt")
    if kinds == {str}:
        return tuple(item for item in prompt if isinstance(item, str))
    lists = [prompt] if kinds == {int} else prompt
    out: list[tuple[int, ...]] = []
    for item in lists:
        ids = tuple(x for x in item if isinstance(x, int)) if isinstance(item, list) else ()
        if not ids:
            raise InvalidRequest("prompt holds an empty list of token ids", param="prompt")
        if len(ids) > card.context_tokens:
            raise ContextExceeded(
                f"prompt has {len(ids)} tokens, the model's context has {card.context_tokens}", param="prompt"
            )
        largest = max(ids)
        if largest >= card.vocabulary:
            _check_token_id(largest, card, f"prompt[{ids.index(largest)}]")
        out.append(ids)
    return tuple(out)


def tools(bodies: Sequence[ToolBody] | None) -> tuple[JsonObject, ...]:
    """Return the tools as the chat template reads them."""
    return tuple({"type": tool.type, "function": tool.function} for tool in bodies or ())


def messages(bodies: Sequence[MessageBody]) -> tuple[Message, ...]:
    """Return the conversation; raises InvalidRequest naming the message and what is wrong with it."""
    return tuple(_message(body, f"messages[{i}]") for i, body in enumerate(bodies))


def _message(body: MessageBody, where: str) -> Message:
    content = body.content
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if content is None and body.role != "assistant":
        raise InvalidRequest(f"{where}.content is required for the role {body.role!r}", param=f"{where}.content")
    calls = tuple(
        ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in body.tool_calls or ()
    )
    return Message(role=body.role, content=content, name=body.name, tool_calls=calls, tool_call_id=body.tool_call_id)


def _part(part: ContentPart, where: str) -> str:
    if part.type in ("text", "input_text") and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in ("text", "input_text", "refusal"):
        raise InvalidRequest(f"{where} has the type {part.type!r} and no text", param=where)
    raise InvalidRequest(
        f"{where}.type={part.type[:40]!r} is not supported: this model reads 'text' only", param=f"{where}.type"
    )
