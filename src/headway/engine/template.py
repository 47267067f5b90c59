"""Chat templates: a conversation to the text that the model was trained on, as transformers renders it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes

from headway.engine.sandbox import BoundedEnvironment, RaisedByTemplate, refuse
from headway.engine.template_budget import Budget, TemplateRefused, within
from headway.errors import InvalidRequest, TemplateError
from headway.types import JsonObject, Message

_MAX_SOURCE_CHARS = 262_144
_BASE_OUTPUT_CHARS = 1_000_000
_OUTPUT_PER_INPUT = 8
_MAX_DEPTH = 100
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")

PlainMessage = dict[str, Any]


def plain_messages(messages: Sequence[Message]) -> list[PlainMessage]:
    """Return messages in the shape templates expect: OpenAI's, arguments as objects, null only as content beside calls.

    InvalidRequest names the index of a message whose role is no word (templates write it between control tokens).
    """
    return [_plain(index, message) for index, message in enumerate(messages)]


def _plain(index: int, message: Message) -> PlainMessage:
    if not _ROLE.fullmatch(message.role):
        raise InvalidRequest(
            f"messages[{index}].role is {message.role[:64]!r}; use system, user, assistant or tool.",
            param=f"messages[{index}]",
        )
    plain: PlainMessage = {"role": message.role}
    for key in ("content", "name", "tool_call_id"):
        value = getattr(message, key)
        if value is not None:
            plain[key] = value
    if message.tool_calls:
        plain.setdefault("content", None)  # clients send null beside calls, and some templates ask whether it is
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _parse_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _parse_arguments(arguments: str) -> Any:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string in a JSON-like value, keys too."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            pending.extend(value)
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)


def _refuse_deep(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for part in level
            if isinstance(part, Mapping | list | tuple)
            for item in (part.values() if isinstance(part, Mapping) else part)
        ]
        if not level:
            return
    raise InvalidRequest(f"The tools or tool calls nest deeper than {_MAX_DEPTH} levels; flatten them.", param="tools")


class ChatTemplate:
    """One model's templates by name (``default``, ``tool_use``); safe to call from several threads.

    Compiling raises TemplateError for a template that is wrong; so does a trial rendering for one that breaks its
    bounds, so that a hostile template is found when the model is loaded.
    """

    def __init__(
        self, templates: Mapping[str, str], *, bos_token: str = "", eos_token: str = "", time_limit_s: float = 2.0
    ) -> None:
        self._time_limit_s = time_limit_s
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = BoundedEnvironment()
        literals: list[str] = []
        self._compiled = {name: _compile(environment, name, text, literals) for name, text in templates.items()}
        if not self._compiled:
            raise TemplateError("There is no chat template to compile; give at least one named 'default'.")
        self.literals = "\0".join([*literals, bos_token, eos_token])
        """All text that the templates themselves can write."""
        self._try_out()

    def render(
        self, messages: Sequence[PlainMessage], tools: Sequence[JsonObject] = (), add_generation_prompt: bool = True
    ) -> str:
        """Return the conversation's text; InvalidRequest names the message that the template cannot render."""
        budget = self._budget([list(messages), list(tools)])
        with within(budget):
            try:
                return self._run(messages, tools, add_generation_prompt)
            except _CALLERS_FAULTS as error:
                index = self._find_culprit(messages, tools)
                problem = error
            except _TEMPLATES_FAULTS as error:
                raise refuse(str(error) or type(error).__name__) from None
        where = f"messages[{index}]" if messages else "messages"
        if isinstance(problem, RaisedByTemplate):
            reason = f"The model's chat template refuses the conversation: {problem}"
        else:
            reason = f"The model's chat template cannot render {where}: {problem or type(problem).__name__}"
        raise InvalidRequest(f"{reason.rstrip('.')} (at {where}).", param=where)

    def _run(self, messages: Sequence[PlainMessage], tools: Sequence[JsonObject], add_generation_prompt: bool) -> str:
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        template = self._compiled.get(name) or next(iter(self._compiled.values()))
        return template.render(
            messages=list(messages),
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._tokens,
        )

    def _budget(self, given: Any) -> Budget:
        _refuse_deep(given)
        chars = sum(map(len, strings_in(given)))
        limit = _BASE_OUTPUT_CHARS + _OUTPUT_PER_INPUT * chars
        return Budget(deadline=time.monotonic() + self._time_limit_s, max_chars=limit)

    def _find_culprit(self, messages: Sequence[PlainMessage], tools: Sequence[JsonObject]) -> int:
        """Return the index of the last message of the shortest beginning that cannot be rendered."""
        good, bad = 0, len(messages)
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self._run(messages[:middle], tools, False)
                good = middle
            except _CALLERS_FAULTS:
                bad = middle
            except _TEMPLATES_FAULTS:  # the time is up: name the last message known to be part of it
                break
        return max(0, bad - 1)

    def _try_out(self) -> None:
        for conversation in ([{"role": "user", "content": "Hello"}], []):
            with within(self._budget(conversation)):
                try:
                    self._run(conversation, (), True)
                except _CALLERS_FAULTS:
                    pass  # it may well refuse this conversation; requests will say so
                except _TEMPLATES_FAULTS as error:
                    raise refuse(str(error) or type(error).__name__) from None


# What a template may run into because of the messages it is given; anything else it owes to itself.
_CALLERS_FAULTS = (
    RaisedByTemplate,
    jinja2.UndefinedError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ZeroDivisionError,
)
_TEMPLATES_FAULTS = (TemplateRefused, jinja2.TemplateError, ArithmeticError, RecursionError, MemoryError)


def _compile(environment: BoundedEnvironment, name: str, source: str, literals: list[str]) -> jinja2.Template:
    if len(source) > _MAX_SOURCE_CHARS:
        raise TemplateError(f"The chat template {name!r} has {len(source)} characters, more than {_MAX_SOURCE_CHARS}.")
    try:
        # Before instrumentation: literal texts are still in their own nodes afterwards, as constants.
        tree = environment.parse(source)
        literals += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"The chat template {name!r} is wrong in line {error.lineno}: {error.message}") from None
    except (SyntaxError, *_CALLERS_FAULTS, *_TEMPLATES_FAULTS) as error:
        raise TemplateError(
            f"The chat template {name!r} cannot be compiled: {str(error)[:200] or type(error).__name__}"
        ) from None
