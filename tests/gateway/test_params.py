"""Bad values are named, unknown fields are tolerated, hostile bodies cost little."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from headway.errors import HeadwayError, InvalidRequest, ModelNotFound
from headway.gateway.parse import parse_chat, parse_completion
from tests.fakes import CARD
from tests.gateway.conftest import Serve, chat

BAD = [
    ("temperature", "-1", "-1", "0"),
    ("temperature", "3", "3", "2"),
    ("temperature", "NaN", "NaN", ""),
    ("temperature", "-Infinity", "-Infinity", ""),
    ("temperature", '"0.5"', "0.5", "float"),
    ("top_p", "0", "0", "> 0"),
    ("top_p", "1.5", "1.5", "<= 1"),
    ("n", "0", "0", ">= 1"),
    ("n", "129", "129", "<= 128"),
    ("n", "1.5", "1.5", "int"),
    ("n", "true", "true", "int"),
    ("max_tokens", "0", "0", ">= 1"),
    ("max_tokens", "-1", "-1", ">= 1"),
    ("max_tokens", "1000000000", "1000000000", "2048"),
    ("max_completion_tokens", "2049", "2049", "2048"),
    ("stop", '["a","b","c","d","e"]', '["a","b","c","d","e"]', "<= 4"),
    ("stop", '""', '""', ">= 1"),
    ("stop", '["a",""]', '""', ">= 1"),
    ("logit_bias", '{"1000000000":1}', "1000000000", "49999"),
    ("logit_bias", '{"-1":1}', "-1", "49999"),
    ("logit_bias", '{"1":101}', "101", "<= 100"),
    ("logit_bias", json.dumps({str(i): 1 for i in range(4097)}), "", "<= 4096"),
    ("seed", "1180591620717411303424", "1180591620717411303424", "9223372036854775807"),
    ("stream", '"yes"', "yes", "bool"),
    ("messages", "[]", "[]", ">= 1"),
    ("messages", "null", "null", "array"),
    ("model", '""', '""', ">= 1"),
    ("top_k", "-2", "-2", ">= -1"),
    ("min_p", "1.1", "1.1", "<= 1"),
    ("repetition_penalty", "0", "0", "> 0"),
    ("presence_penalty", "2.1", "2.1", "<= 2"),
    ("frequency_penalty", "-2.1", "-2.1", ">= -2"),
    ("min_tokens", "3000", "3000", "2048"),
    ("stop_token_ids", "[50000]", "50000", "49999"),
    ("prompt_logprobs", "21", "21", "<= 20"),
    ("priority", "1e400", "", "range"),
    ("response_format", '{"type":"json_object"}', "json_object", "not supported"),
    ("tool_choice", '"required"', "", "not supported"),
    ("top_logprobs", "3", "3", "logprobs"),
    ("guided_regex", '"a+"', "", "not supported"),
]


@pytest.mark.parametrize(("field", "value", "named", "rule"), BAD, ids=[f"{f}={v[:40]}" for f, v, _, _ in BAD])
def test_case_bad_params(field: str, value: str, named: str, rule: str) -> None:
    body = json.dumps(chat())[1:-1]
    raw = f'{{{body}, "{field}": {value}}}'.encode()
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(raw, (CARD,), ("fake",), request_id="r", arrived=0.0)
    error = caught.value
    assert error.status == 400
    assert error.kind == "invalid_request_error"
    assert error.param is not None
    assert error.param.partition("[")[0] == field
    assert field in error.message
    assert named in error.message
    assert rule in error.message


def test_case_bad_params_over_http(serve: Serve) -> None:
    server = serve()
    for field, value, named, _ in BAD:
        raw = f'{{{json.dumps(chat())[1:-1]}, "{field}": {value}}}'.encode()
        answer = server.post(raw)
        assert answer.status_code == 400, (field, value)
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert named in error["message"]
    assert server.backend.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], 1]}, "prompt"),
        ({"prompt": [1, 50_000]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a"] * 600, "n": 2}, "prompt"),
        ({"prompt": [1] * 2049}, "prompt"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": ["x" * 2048] * 50, "prompt_logprobs": 10}, "prompt_logprobs"),
        ({"prompt": [[1] * 2048], "n": 50, "echo": True, "logprobs": 10}, "logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({}, "prompt"),
    ],
)
def test_bad_completions(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(json.dumps(fields).encode(), (CARD,), (), request_id="r", arrived=0.0)
    assert caught.value.param == param


def test_prompt_logprobs_of_as_much_as_one_context_and_of_many_short_prompts_are_allowed() -> None:
    for fields in ({"prompt": "x" * 100_000, "prompt_logprobs": 20}, {"prompt": ["a" * 200] * 500, "logprobs": 1}):
        raw = json.dumps({"echo": True, "max_tokens": 0, **fields}).encode()
        assert parse_completion(raw, (CARD,), (), request_id="r", arrived=0.0).echo


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ("not an object", "messages[0]"),
    ],
)
def test_bad_messages_are_named_by_place(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(json.dumps({"messages": [message]}).encode(), (CARD,), (), request_id="r", arrived=0.0)
    assert caught.value.param == param


def test_case_unknown_fields(serve: Serve) -> None:
    newer: dict[str, Any] = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "reasoning_effort": "low",
        "parallel_tool_calls": False,
        "user": "u",
        "verbosity": "low",
        "prompt_cache_key": "k",
        "something_of_2031": [[1]],
    }
    server = serve()
    assert server.post(chat(**newer)).status_code == 200
    assert server.post({"model": "fake-1", "prompt": "x", **newer}, "/v1/completions").status_code == 200


def test_models_are_found_by_name_and_by_the_configured_alias() -> None:
    for name in ("fake-1", "fake", None):
        call = parse_chat(json.dumps(chat(model=name)).encode(), (CARD,), ("fake",), request_id="r", arrived=0.0)
        assert call.requests[0].model == "fake-1"
    with pytest.raises(ModelNotFound, match="'gpt-x' is not served here; served: 'fake-1'"):
        parse_chat(json.dumps(chat(model="gpt-x")).encode(), (CARD,), ("fake",), request_id="r", arrived=0.0)


HOSTILE = {
    "nested arrays": b"[" * 100_000,
    "nested arrays in a field": b'{"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested objects": b'{"a":' * 100_000,
    "nested in a tool": b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"a":'
    + b"[" * 50_000
    + b"]" * 50_000
    + b"}}]}",
    "empty": b"",
    "spaces": b" " * 1_000_000,
    "lone surrogate": b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    "lone surrogate in a key": b'{"\\udfff":1,"messages":[{"role":"user","content":"x"}]}',
    "invalid UTF-8": b'{"messages":[{"role":"user","content":"\xff\xfe"}]}',
    "overlong UTF-8": b'{"messages":[{"role":"user","content":"\xc0\x80"}]}',
    "trailing garbage": b'{"messages":[{"role":"user","content":"x"}]}}',
    "truncated": b'{"messages":[{"role":"us',
    "a number": b"1e999",
    "a string": b'"' + b"x" * 1_000_000 + b'"',
    "byte order mark": b"\xef\xbb\xbf{}",
    "null": b"null",
    "NaN nested deeply": b'{"a":' * 50_000 + b"NaN",
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_case_json_depth(raw: bytes) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRequest):
        parse_chat(raw, (CARD,), (), request_id="r", arrived=0.0)
    assert time.monotonic() - started < 1.0


def test_case_json_depth_over_http(serve: Serve) -> None:
    server = serve()
    for name, raw in HOSTILE.items():
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            answer = server.post(raw, path)
            assert answer.status_code == 400, (name, path)
            assert answer.json()["error"]["type"] == "invalid_request_error"
    assert server.post(chat()).status_code == 200


def test_a_syntax_error_says_where() -> None:
    with pytest.raises(HeadwayError, match="byte 7"):
        parse_chat(b'{"a":1,}', (CARD,), (), request_id="r", arrived=0.0)
