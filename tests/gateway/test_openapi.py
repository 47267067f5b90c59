"""/openapi.json is true: what it allows is answered as it says, what it forbids is a 400, and nothing is a 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headway.config import Config
from headway.gateway.app import create_app
from headway.gateway.openapi import document
from tests.fakes import FakeBackend

APP = create_app(FakeBackend(), Config(model="fake"))
SCHEMA = schemathesis.openapi.from_dict(json.loads(document()))
SCHEMA.app = APP

_bounded = settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)


def call(method: str, path: str, content: bytes | None = None, **headers: str) -> httpx.Response:
    """Ask the app without a socket."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(APP, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(run())


def test_the_document_describes_every_route() -> None:
    described = set(json.loads(document())["paths"])
    assert described >= {"/v1/chat/completions", "/v1/completions", "/v1/models/{id}", "/tokenize", "/health/live", "/"}
    fields = json.loads(document())["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "temperature", "top_k", "min_p", "ignore_eos", "stop_token_ids"} <= set(fields)
    assert {"minimum": 1, "maximum": 128, "type": "integer"} in fields["n"]["anyOf"]


@SCHEMA.parametrize()  # type: ignore[untyped-decorator]
@_bounded
def test_no_request_breaks_the_server_and_answers_conform(case: Any) -> None:
    body = case.body
    if not isinstance(body, bytes):
        body = None if type(body).__name__ == "NotSet" else json.dumps(body).encode()
    answer = call(case.method, case.formatted_path, body)
    assert answer.status_code < 500, answer.text
    if answer.status_code == 200 and answer.headers["content-type"] == "application/json":
        case.operation.validate_response(answer)
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([2**70, -(2**70), "\x00", "😀", 1e308, "fake-1"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
_fields = sorted(set(json.loads(document())["components"]["schemas"]["ChatBody"]["properties"]) | {"prompt", "echo"})


@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]),
    body=st.dictionaries(st.sampled_from(_fields), _json, max_size=4),
)
@settings(_bounded, max_examples=400)
def test_any_value_in_any_field_is_answered(path: str, body: dict[str, Any]) -> None:
    sane = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "tokens": [1]}
    answer = call("POST", path, json.dumps({**sane, **body}).encode())
    assert answer.status_code in (200, 400, 404), answer.text


@given(raw=st.binary(max_size=200))
@settings(_bounded, max_examples=200)
def test_any_bytes_are_refused_politely(raw: bytes) -> None:
    answer = call("POST", "/v1/chat/completions", raw)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
