"""A bounded Jinja environment: a chat template is untrusted code, so its time, its memory and its reach have limits.

Jinja's sandbox keeps a template from Python's internals, but not from ``'a' * 10**10`` or nested loops. Here, whatever
can make a value larger than its parts is checked before it runs, every loop turn and call is counted against a budget
and a deadline, everything printed is counted, and nothing is evaluated while a template is compiled.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

from headway.engine.template_budget import MAX_INT_BITS, MAX_PARTS, Budget, TemplateRefused, current
from headway.errors import TemplateError

_MAX_FILL = 10_000
_DIGITS = re.compile(r"\d{5,}")


class RaisedByTemplate(jinja2.TemplateError):
    """The template called ``raise_exception``: its own verdict on the messages."""


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; it prints what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@pass_context
def _finalize(_context: Any, value: Any) -> str:
    # Needing the context also keeps Jinja from printing constants at compile time.
    budget = current()
    text = value if isinstance(value, str) else _to_text(value)
    budget.print(len(text))
    return text


def _to_text(value: Any) -> str:
    if isinstance(value, str | Undefined):
        return str(value)
    if value is None or isinstance(value, bool | int | float | Mapping | list | tuple | Macro):
        return str(current().check(value))
    raise TemplateRefused(f"it prints a {type(value).__name__}")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders chat templates as transformers does (same options, filters and globals), within a Budget."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # the optimizer would run 'a' * 10**10 while compiling
            finalize=_finalize,
            cache_size=0,
        )
        for name in ("urlize", "pprint", "xmlattr", "filesizeformat", "random"):
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters["string"] = _to_text
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _new_dict,
            "namespace": _new_namespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        transformed: nodes.Template = _instrument(tree)
        return transformed

    def headway_tick(self) -> str:
        """Count one turn of a loop."""
        current().tick()
        return ""

    def headway_check(self, value: Any) -> Any:
        """Check a literal or joined text."""
        return current().check(value)

    def headway_concat(self, *values: Any) -> str:
        """Join the texts of a ``~`` expression."""
        texts = [_to_text(value) for value in values]
        current().check_chars(sum(map(len, texts)))
        return "".join(texts)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call on behalf of a template."""
        budget = current()
        budget.tick()
        # The sandbox wraps str.format in a plain function, which knows the method that it stands for.
        bound = getattr(__obj, "__wrapped__", __obj)
        owner, method = getattr(bound, "__self__", None), getattr(bound, "__name__", "")
        if isinstance(owner, int | float | bytes):
            raise TemplateRefused(f"it calls {type(owner).__name__}.{method}()")
        if isinstance(owner, str):
            if method == "join" and args:
                args = (_drained(args[0]), *args[1:])
            _check_growth(method, owner, args, kwargs)
        return budget.check(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Run an operator on behalf of a template."""
        budget = current()
        if operator == "*":
            _check_product(budget, left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INT_BITS:
                raise TemplateRefused(f"it raises a number to the power of {right}")
        elif operator == "%" and isinstance(left, str):
            _check_percent_format(left)
            _check_parts([right], times=1 + left.count("%"))
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.check_chars(len(left) + len(right))
        return budget.check(super().call_binop(context, operator, left, right))

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse at once: jinja2 would go on with an undefined value that only complains when it is used."""
        raise TemplateRefused(f"it reaches for {attribute!r} of {type(obj).__name__}, which is unsafe")


def _instrument(tree: Any) -> Any:
    """Put a check wherever a template can loop, print or build a value."""
    for node in list(tree.find_all(nodes.For)):
        node.body.insert(0, nodes.ExprStmt(_call("headway_tick", []), lineno=node.lineno))
    _replace(tree)
    return tree.set_environment(tree.environment)


def _call(method: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


def _replace(node: nodes.Node) -> None:
    """Rewrite a node's children, innermost first (a template nested too deep ends in RecursionError)."""
    for field, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _replace(value)
            setattr(node, field, _rewritten(value))
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, nodes.Node):
                    _replace(item)
            setattr(node, field, [_rewritten(item) if isinstance(item, nodes.Node) else item for item in value])


def _rewritten(node: nodes.Node) -> nodes.Node:
    new: nodes.Node = node
    if isinstance(node, nodes.TemplateData):
        new = nodes.Const(node.data)  # so that it passes through finalize, and is counted
    elif isinstance(node, nodes.Concat):
        new = _call("headway_concat", node.nodes)
    elif isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        new = _call("headway_check", [node])
    return new if new is node else new.set_lineno(node.lineno)


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise TemplateRefused("it multiplies numbers without end")
        return
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(value, str | bytes):
            budget.check_chars(len(value) * max(times, 0))
        elif isinstance(times, int) and isinstance(value, list | tuple) and len(value) * times > MAX_PARTS:
            raise TemplateRefused(f"it makes a list of {len(value) * times} parts, more than {MAX_PARTS}")


def _check_percent_format(pattern: str) -> None:
    """Refuse what can widen a text: a width of many digits, or one that is itself an argument."""
    named = "%(" in pattern and _DIGITS.search(pattern)
    if named or re.search(r"%[-+ #.0-9]*(\*|[0-9]{5})", pattern):
        raise TemplateRefused(f"it formats with {pattern[:40]!r}, whose width has no bound")


def _check_brace_format(pattern: str) -> None:
    fields = pattern.replace("{{", "").replace("}}", "")
    if re.search(r"\{[^{}]*\d{5}", fields) or re.search(r"\{[^{}]+\{", fields):
        raise TemplateRefused(f"it formats with {pattern[:40]!r}, whose width has no bound")


def _check_growth(method: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    budget = current()
    if method in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        width = next((value for value in (*args, *kwargs.values()) if isinstance(value, int)), 8)
        budget.check_chars(width * (1 + text.count("\t")) if method == "expandtabs" else width)
    elif method == "replace":
        _check_replace(text, args)
    elif method == "join":
        _check_join(text, args[0] if args else ())
    elif method in ("format", "format_map"):
        _check_brace_format(text)
        _check_parts([*args, *kwargs.values()], times=1 + text.count("{"))
    elif method in ("encode", "translate", "maketrans"):
        raise TemplateRefused(f"it calls str.{method}()")


def _check_replace(text: str, args: tuple[Any, ...]) -> None:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        times = text.count(args[0])
        current().check_chars(len(text) + times * max(0, len(args[1]) - len(args[0])))


def _check_join(separator: str, parts: Any) -> None:
    if isinstance(parts, list | tuple | Mapping | str):
        budget = current()
        texts = len(parts) if isinstance(parts, str) else budget.weigh(parts)
        budget.check_chars(texts + len(separator) * len(parts))


def _drained(parts: Any) -> Any:
    """Return the parts of a generator as a list: each could be the same long text, so they are weighed one by one."""
    if not isinstance(parts, Iterator):
        return parts
    budget = current()
    drained: list[Any] = []
    chars = 0
    for part in parts:
        chars += budget.weigh(part)
        budget.check_chars(chars)
        drained.append(part)
    return drained


def _check_parts(parts: list[Any], times: int) -> None:
    """Refuse a format that is too long if each of its fields is the longest part."""
    budget = current()
    budget.check_chars(times * max(map(budget.weigh, parts), default=0))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.tick()
        operands = args[skip:]
        value, rest = (operands[0], operands[1:]) if operands else (None, ())
        if name == "join":
            value = _drained(value)
            args = (*args[:skip], value, *rest)
        _check_filter(name, value, [*rest, *kwargs.values()])
        return budget.check(function(*args, **kwargs))

    return bounded


def _check_filter(name: str, value: Any, rest: list[Any]) -> None:
    budget = current()
    numbers = [number for number in rest if isinstance(number, int)]
    if name in ("center", "wordwrap", "truncate", "round", "batch", "slice", "int"):
        if any(abs(number) > _MAX_FILL for number in numbers):
            raise TemplateRefused(f"it calls the filter {name} with {max(numbers, key=abs)}, more than {_MAX_FILL}")
        if name == "wordwrap" and isinstance(value, str):
            texts = [text for text in rest if isinstance(text, str)]
            budget.check_chars(len(value) * (1 + max(map(len, texts), default=0)))
    elif name in ("indent", "tojson"):
        widths = [*numbers, *(len(text) for text in rest if isinstance(text, str))]
        if any(width > 64 for width in widths):
            raise TemplateRefused(f"it calls the filter {name} with a width of {max(widths)}, more than 64")
        budget.check(value)
    elif name == "replace" and isinstance(value, str):
        _check_replace(value, tuple(rest))
    elif name == "join":
        _check_join(rest[0] if rest and isinstance(rest[0], str) else "", value)
    elif name == "format" and isinstance(value, str):
        _check_percent_format(value)
        _check_parts(rest, times=1 + value.count("%"))
    elif name == "sum" and any(not isinstance(item, int | float | str) for item in rest):
        raise TemplateRefused("it sums lists")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does: not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise RaisedByTemplate(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"%[^a-zA-Z%]*\d", pattern):
        raise TemplateRefused(f"it formats the time with {pattern[:40]!r}")
    return datetime.now().strftime(pattern)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class _SafeNamespace(Namespace):
    """A namespace without names that begin with an underscore: they could reach Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _new_namespace(*args: Any, **kwargs: Any) -> Namespace:
    for name in dict(*args, **kwargs):
        _check_name(name)
    return _SafeNamespace(*args, **kwargs)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise TemplateRefused(f"it stores {name!r} on a namespace")


def refuse(message: str) -> TemplateError:
    """Return the error that says why a template is not run."""
    return TemplateError(
        f"The model's chat template was refused: {message.rstrip('.')}. Use a template from a source you trust, "
        "or send prompts to /v1/completions."
    )
