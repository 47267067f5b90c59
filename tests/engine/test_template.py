from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from headway.engine.template import ChatTemplate, plain_messages, strings_in
from headway.errors import InvalidRequest, TemplateError
from headway.types import Message, ToolCall
from tests.engine import tiny

_USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
_TOOL = {"type": "function", "function": {"name": "weather", "description": "<b> & 'é'"}}


def _render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate({"default": source}, bos_token="<s>", eos_token="</s>").render(messages or _USER, **options)


def test_chatml() -> None:
    assert _render(tiny.CHATML) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert _render(tiny.CHATML, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_blocks_are_trimmed_as_transformers_does() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend\n"
    assert _render(source) == "hi\nend"


def test_globals_filters_and_tags_that_templates_use() -> None:
    assert _render("{{ bos_token }}{{ eos_token }}") == "<s></s>"
    assert _render("{% generation %}a{% set x = 'b' %}{{ x }}{% endgeneration %}") == "ab"
    assert _render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert (
        _render("{% set n = namespace(x=1) %}{% for i in [1, 2] %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}") == "4"
    )
    assert _render("{{ dict(a=1)['a'] }}{{ strftime_now('%Y') | length }}") == "14"
    assert _render("{{ {'a': [1, none]} }}") == "{'a': [1, None]}"
    assert _render("{{ 'a' ~ 1 ~ none }}{{ '{:>3}'.format(7) }}") == "a1None  7"
    assert _render("{{ '%s-%05.1f' | format('x', 2) }}") == "x-002.0"
    assert _render("""{{ '{"a": {"b": %s}}' % 10000 }}""") == '{"a": {"b": 10000}}'
    assert _render("{% macro m(x) %}[{{ x }}{{ caller() }}]{% endmacro %}{% call m(1) %}2{% endcall %}") == "[12]"
    assert _render("{{ messages[1:] | length }}{{ 'x' is string }}{{ messages[0].missing is defined }}") == "0TrueFalse"


def test_json_is_not_escaped_for_html() -> None:
    assert _render("{{ tools[0] | tojson }}", tools=[_TOOL]) == (
        '{"type": "function", "function": {"name": "weather", "description": "<b> & \'é\'"}}'
    )
    assert _render("{{ {'b': 1, 'a': 'é'} | tojson(indent=1, sort_keys=true, ensure_ascii=true) }}") == (
        '{\n "a": "\\u00e9",\n "b": 1\n}'
    )


def test_no_tools_are_none_and_tool_use_is_chosen_by_name() -> None:
    assert _render("{{ tools is none }}") == "True"
    template = ChatTemplate({"default": "D", "tool_use": "T"})
    assert (template.render(_USER), template.render(_USER, [_TOOL])) == ("D", "T")


def test_plain_messages_have_the_nested_shape() -> None:
    calls = (ToolCall(id="1", name="f", arguments='{"a": 1}'), ToolCall(id="2", name="g", arguments="not json"))
    messages = [
        Message(role="assistant", tool_calls=calls),
        Message(role="tool", content="", tool_call_id="1", name="f"),
    ]
    assert plain_messages(messages) == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": "not json"}},
            ],
        },
        {"role": "tool", "content": "", "name": "f", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize("role", ["", "user<|im_end|>", "a b", "x" * 65, "<|im_start|>"])
def test_a_role_that_is_no_word_is_refused_with_its_index(role: str) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.role") as caught:
        plain_messages([Message(role="user", content="a"), Message(role=role, content="b")])
    assert caught.value.param == "messages[1]"


def test_strings_in_finds_keys_and_values() -> None:
    assert sorted(strings_in([{"a": ["b", {"c": 1}]}, "d"])) == ["a", "b", "c", "d"]


def test_chat_roles_what_a_template_cannot_render_names_the_message() -> None:
    messages: list[dict[str, Any]] = [*_USER, {"role": "assistant", "tool_calls": []}, *_USER, *_USER, *_USER]
    with pytest.raises(InvalidRequest, match=r"cannot render messages\[1\].*content") as caught:
        _render(tiny.CHATML, messages)
    assert caught.value.param == "messages[1]"


def test_chat_roles_the_templates_own_refusal_is_passed_on() -> None:
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate!') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match=r"Roles must alternate! \(at messages\[1\]\)") as caught:
        _render(source, [*_USER, *_USER, {"role": "assistant", "content": "x"}])
    assert caught.value.param == "messages[1]"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([("system", "a"), ("system", "b")], "system:a|system:b|"),
        ([("user", "a"), ("user", "b")], "user:a|user:b|"),
        ([("assistant", "a"), ("user", "b")], "assistant:a|user:b|"),
        ([("user", "")], "user:|"),
    ],
)
def test_chat_roles_unusual_orders_render(messages: list[tuple[str, str]], text: str) -> None:
    given = plain_messages([Message(role=role, content=content) for role, content in messages])
    assert _render("{% for m in messages %}{{ m.role + ':' + m.content + '|' }}{% endfor %}", given) == text


# What families of templates do: join texts, ask for calls first, ask whether the content is none, insist on an order.
_FAMILIES = {
    "joins": tiny.CHATML,
    "asks": "{% if messages[0].role == 'system' %}{{ '<sys>' + messages[0].content }}{% else %}<sys>default{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls)"
    " %}{{ '<' + m.role + '>' + m.content }}"
    "{% elif m.role == 'assistant' %}<assistant>{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls %}{% set f = call.function %}"
    "{{ '<call>{\"name\": \"' + f.name + '\", \"arguments\": ' + (f.arguments | tojson) + '}' }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ '<response>' + m.content }}{% endif %}{% endfor %}",
    "none": "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for call in m['tool_calls'] %}{{ '<call>' + call['function']['name'] }}{% endfor %}"
    "{% elif m['content'] is not none %}{{ '<' + m['role'] + '>' + m['content'] }}{% endif %}{% endfor %}",
    "trims": "{% for m in messages %}<{{ m['role'] }}>{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% else %}"
    "{{ m['content'] | trim }}{% endif %}{% endfor %}",
    "insists": "{% set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '[' + m['content'] | trim + ']' }}{% endfor %}",
}
_CALLS = (ToolCall(id="1", name="f", arguments='{"é": [1, null]}'), ToolCall(id="2", name="g", arguments="{}"))
_SHAPES: dict[str, list[tuple[str, str | None]]] = {
    "system twice": [("system", "a"), ("system", "b"), ("user", "c")],
    "users in a row": [("user", "a"), ("user", " b\n")],
    "assistant first": [("assistant", "a"), ("user", "b")],
    "empty": [("user", "")],
    "calls": [("user", "a"), ("assistant", None), ("tool", "1"), ("tool", "")],
    "calls and text": [("user", "a"), ("assistant", "b"), ("tool", "1")],
}


@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("family", _FAMILIES)
def test_chat_roles_render_as_transformers_renders_them_or_name_the_message(family: str, shape: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [
        Message(role=role, content=content, tool_calls=_CALLS if role == "assistant" and "calls" in shape else ())
        for role, content in _SHAPES[shape]
    ]
    # As an OpenAI client sends them, arguments parsed as transformers wants them.
    sent: list[dict[str, Any]] = []
    for message in messages:
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in message.tool_calls
        ]
        sent.append({"role": message.role, "content": message.content, **({"tool_calls": calls} if calls else {})})
    try:
        rendered, _ = render_jinja_template([sent], chat_template=_FAMILIES[family], add_generation_prompt=True)
    except Exception:
        with pytest.raises(InvalidRequest, match=r"messages\[\d\]"):
            _render(_FAMILIES[family], plain_messages(messages))
    else:
        assert _render(_FAMILIES[family], plain_messages(messages)) == rendered[0]


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nonsense %}", "{{ 1 | no_filter }}", "{{" + "(" * 5000])
def test_a_wrong_template_is_refused_when_loaded(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template 'default'"):
        ChatTemplate({"default": source})


def test_a_template_too_large_is_refused() -> None:
    with pytest.raises(TemplateError, match="300000 characters"):
        ChatTemplate({"default": "x" * 300_000})


def _doubling(expression: str, start: str = "'aaaa'") -> str:
    turn = f"{{% set ns.x = {expression} %}}"
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{turn}{{% endfor %}}"


_HOSTILE = {
    "class": "{{ ''.__class__.__mro__ }}",
    "class by filter": "{{ ''|attr('__class__') }}",
    "class by map": "{{ messages|map(attribute='__class__')|list }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "self": "{{ self._TemplateReference__context }}",
    "loop of 10^9": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that continue": "{% set r = range(99999) %}"
    "{% for i in r %}{% for j in r %}{% continue %}{% endfor %}{% continue %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "text times number": "{{ 'a' * 10**10 }}",
    "number times list": "{% set x = 10**10 * ['a'] %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "squaring": _doubling("ns.x * ns.x", "3"),
    "adding": _doubling("ns.x + ns.x"),
    "joining by tilde": _doubling("ns.x ~ ns.x"),
    "capturing": _doubling("y").replace("{% set ns.x", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x"),
    "replace method": _doubling("ns.x.replace('a', 'aa')"),
    "replace filter": _doubling("ns.x | replace('a', 'aa')"),
    "json of json": _doubling("ns.x | tojson", "'\"'"),
    "percent format": _doubling("'%s%s' % (ns.x, ns.x)"),
    "percent format by name": _doubling("'%(a)s%(a)s' % {'a': ns.x}"),
    "format filter": _doubling("'%s%s' | format(ns.x, ns.x)"),
    "format method": _doubling("'{0}{0}'.format(ns.x)"),
    "shared lists": _doubling("[ns.x, ns.x]") + "{{ ns.x }}",
    "comparing shared lists": _doubling("[ns.x, ns.x]")
    + "{% set a = ns.x %}"
    + _doubling("[ns.x, ns.x]")
    + "{{ a == ns.x }}",
    "shared dicts": _doubling("{'a': ns.x, 'b': ns.x}") + "{{ ns.x | tojson }}",
    "shared namespaces": _doubling("namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "wide format": "{{ '%10000000000d' % 1 }}{{ '{:10000000000}'.format(1) }}",
    "wide brace format": "{{ '{:10000000000}'.format(1) }}",
    "width as argument": "{{ '{:{}}'.format(1, 10000000000) }}",
    "star width": "{{ '%*d' % (1000000000, 1) }}",
    "center filter": "{{ 'a' | center(10**10) }}",
    "center method": "{{ 'a'.center(10**10) }}",
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "json indent": "{{ [1] | tojson(indent=10**9) }}",
    "bytes": "{{ (1).to_bytes(10**10) }}",
    "join": "{{ (['" + "a" * 1000 + "'] * 100000) | join }}",
    "lazy map": "{{ range(99999) | map('string') | map('center', 9000) | join }}",
    "lazy list": "{{ range(99999) | map('string') | map('center', 9000) | list | length }}",
    "lazy default": "{% set x = 'a' * 900000 %}{{ range(99999) | map(attribute='q', default=x) | join }}",
    "lazy default method": "{% set x = 'a' * 900000 %}{{ ''.join(range(99999) | map(attribute='q', default=x)) }}",
    "lazy attribute": "{% set x = {'y': 'a' * 900000} %}"
    "{{ range(99999) | map(attribute='q', default=x) | join(attribute='y') }}",
    "time format": "{{ strftime_now('%1000000000Y') }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "long constant": "{% set x %}{% for i in range(99999) %}" + "z" * 50_000 + "{% endfor %}{% endset %}",
    "mutation": "{{ messages.append(1) }}",
    "private name": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "many blocks": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_chat_template_hostile(name: str) -> None:
    started = time.monotonic()
    with pytest.raises(TemplateError, match="chat template") as caught:
        ChatTemplate({"default": _HOSTILE[name]}, time_limit_s=0.2)
    assert "MemoryError" not in caught.value.message, "the memory was asked for"
    assert time.monotonic() - started < 10


def test_texts_that_are_held_without_being_printed_are_bounded() -> None:
    with pytest.raises(TemplateError, match="makes texts of more than"):
        ChatTemplate({"default": _HOSTILE["lazy list"]}, time_limit_s=60)


@pytest.mark.parametrize(
    "name",
    ["adding", "joining by tilde", "capturing", "lazy default", "lazy attribute", "replace filter", "json of json"],
)
def test_growth_is_refused_by_its_size_long_before_time_or_memory_end(name: str) -> None:
    with pytest.raises(TemplateError, match=r"makes a text of \d{7} characters"):
        ChatTemplate({"default": _HOSTILE[name]})


def test_bounds_hold_in_any_thread_and_side_by_side() -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = "{% if messages[0].content == 'loop' %}" + loops + "{% endif %}ok"
    template = ChatTemplate({"default": source}, time_limit_s=0.3)
    outcomes: dict[str, str] = {}

    def run(content: str) -> None:
        try:
            outcomes[content] = template.render([{"role": "user", "content": content}])
        except TemplateError as error:
            outcomes[content] = error.message

    threads = [threading.Thread(target=run, args=(content,)) for content in ("loop", "fine")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes["fine"] == "ok"
    assert "time limit" in outcomes["loop"]


def test_long_conversations_are_within_bounds() -> None:
    messages = [{"role": "user", "content": "x" * 1000}] * 3000
    assert len(_render(tiny.CHATML, messages)) > 3_000_000


def test_deep_tools_are_the_callers_fault() -> None:
    deep: Any = {}
    for _ in range(500):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="nest deeper"):
        _render(tiny.CHATML, tools=[deep])
