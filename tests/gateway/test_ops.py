"""Drain, overload, health, ids, the small endpoints, and answers to what does not exist."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

import httpx
import openai
import pytest

from headway.config import Config
from headway.errors import Overloaded
from headway.gateway.admit import Admit
from headway.gateway.app import Gateway, create_app
from headway.telemetry.budget import Ledger, Ledgers
from headway.telemetry.clock import FakeClock
from headway.types import Health, Load, Request
from tests.fakes import FakeBackend
from tests.gateway.conftest import Serve, chat, events, wait_until


def test_case_drain(serve: Serve) -> None:
    backend = FakeBackend(["t"] * 30, between_s=0.01, slots=5)
    server = serve(backend)
    answers: list[httpx.Response] = []

    def stream() -> None:
        answers.append(server.post(chat(stream=True)))

    running = [threading.Thread(target=stream) for _ in range(7)]
    for thread in running[:5]:
        thread.start()
    wait_until(lambda: backend.running == 5)
    for thread in running[5:]:
        thread.start()
    wait_until(lambda: backend.waiting == 2)
    server.gateway.start_drain()
    asyncio.run_coroutine_threadsafe(backend.drain(1.0), server.loop).result(1)
    refused = server.post(chat())
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "server_is_overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    assert server.get("/health/ready").status_code == 503
    assert server.get("/health/ready").json()["reason"] == "draining"
    assert server.get("/health/live").status_code == 200
    for thread in running:
        thread.join()
    assert sorted(a.status_code for a in answers) == [200] * 5 + [503] * 2
    for answer in answers:
        if answer.status_code == 200:
            assert events(answer.text)[-2]["choices"][0]["finish_reason"] == "stop"
        else:
            assert int(answer.headers["retry-after"]) >= 1
    wait_until(lambda: server.gateway.running == 0)


def test_a_full_queue_is_refused_at_once(serve: Serve) -> None:
    backend = FakeBackend(hang_after=1, slots=1)
    server = serve(backend, max_running=1, max_waiting=2)
    content = json.dumps(chat()).encode()
    held = [server.connect() for _ in range(3)]
    for raw in held:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content
        )
    wait_until(lambda: backend.waiting == 2)
    answers = [server.post(chat()) for _ in range(3)]
    answer = answers[0]
    assert [a.status_code for a in answers] == [503] * 3
    assert "2 requests wait, the limit is 2" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after-ms"]) > 0
    assert min(float(a.headers["openai-processing-ms"]) for a in answers) < 50
    assert server.get("/health/load").json()["admitted"] == 3
    assert server.metric("headway_refused_total", reason="server_is_overloaded") == 3
    for raw in held:
        raw.close()
    wait_until(lambda: server.gateway.running == 0)


def test_the_predicted_wait_follows_recent_throughput() -> None:
    clock = FakeClock()
    backend, ledgers = FakeBackend(("x",), clock=clock), Ledgers(100)
    admit = Admit(backend, clock, ledgers, max_running=1, max_waiting=8)

    async def run(name: str) -> None:
        ledgers.open(name, Ledger(clock))
        async for _ in admit(Request(id=name, model="m", text="x"), backend.generate):
            pass
        clock.advance(0.5)

    assert admit.predicted_wait_s() == 1.0
    for i in range(20):
        asyncio.run(run(str(i)))
    backend.load_now = Load(waiting=8)
    assert admit.predicted_wait_s() == pytest.approx(4.0, rel=0.1)
    with pytest.raises(Overloaded) as caught:
        asyncio.run(run("refused"))
    assert caught.value.retry_after_s == pytest.approx(4.0, rel=0.1)


def test_case_health_hung_is_said_honestly(serve: Serve) -> None:
    backend = FakeBackend()
    server = serve(backend)
    assert server.get("/health/live").json() == {"live": True, "reason": ""}
    assert server.get("/health/ready").status_code == 200
    backend.health_now = Health(live=False, ready=False, reason="no step for 3.2 s")
    assert server.get("/health/live").status_code == 503
    assert server.get("/health/live").json() == {"live": False, "reason": "no step for 3.2 s"}
    assert server.get("/health/ready").status_code == 503


def test_models(serve: Serve) -> None:
    server = serve()
    with server.client() as client:
        assert [m.id for m in client.models.list()] == ["fake-1"]
        assert client.models.retrieve("fake-1").object == "model"
        assert client.models.retrieve("fake").id == "fake-1"
        with pytest.raises(openai.NotFoundError, match="served: 'fake-1'") as caught:
            client.models.retrieve("org/nothing")
    assert caught.value.code == "model_not_found"
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 2048
    assert server.post(chat(model="gpt-x")).status_code == 404


def test_tokenize_and_detokenize(serve: Serve) -> None:
    server = serve()
    answer = server.post({"prompt": "ab"}, "/tokenize").json()
    assert answer == {"count": 3, "max_model_len": 2048, "tokens": [0, 98, 99]}
    bare = server.post({"prompt": "ab", "add_special_tokens": False}, "/tokenize").json()
    assert bare["tokens"] == [98, 99]
    assert server.post({"messages": [{"role": "user", "content": "a"}]}, "/tokenize").json()["count"] == 8
    assert server.post({"tokens": [0, 98, 99]}, "/detokenize").json() == {"prompt": "ab"}
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, {"prompt": "a", "model": "x"}):
        assert server.post(body, "/tokenize").status_code in (400, 404)
    assert server.post({"tokens": [50_000]}, "/detokenize").json()["error"]["param"] == "tokens"


def test_request_ids_are_echoed_when_sane(serve: Serve) -> None:
    server = serve()
    assert server.post(chat(), headers={"x-request-id": "Ab.c_d-9"}).headers["x-request-id"] == "Ab.c_d-9"
    for strange in ("a b", "x" * 129, "a/b", "", "é"):
        echoed = server.post(chat(), headers=[(b"x-request-id", strange.encode("latin-1"))])
        assert len(echoed.headers["x-request-id"]) == 24
    assert server.get("/nowhere", headers={"x-request-id": "r"}).headers["x-request-id"] == "r"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/models/fake-1", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "model_not_found"),
        ("POST", "/v1/rerank", 404, "model_not_found"),
        ("POST", "/v1/moderations", 404, "model_not_found"),
        ("GET", "/v1/requests/unknown/timing", 404, "not_found"),
        ("GET", "/v1/requests//timing", 404, "not_found"),
    ],
)
def test_refusals_have_one_shape(serve: Serve, method: str, path: str, status: int, code: str) -> None:
    answer = httpx.request(method, serve().url + path, trust_env=False)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    if status == 405:
        assert answer.headers["allow"]


def test_a_page_and_head_requests(serve: Serve) -> None:
    server = serve()
    assert "<h1>headway</h1>" in server.get("/").text
    head = httpx.head(server.url + "/v1/models", trust_env=False)
    assert head.status_code == 200
    assert int(head.headers["content-length"]) > 10


def test_metrics_are_exposed(serve: Serve) -> None:
    server = serve(FakeBackend())
    server.post(chat())
    text = server.get("/metrics").text
    assert 'headway_tokens_total{kind="output"} 4.0' in text
    assert 'headway_kv_blocks{state="free"} 8.0' in text


def test_the_access_line_says_how_it_ended_and_nothing_of_the_content(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="headway.access")
    server = serve(access_log=True)
    server.post(chat("a secret"), headers={"x-request-id": "r1"})
    wait_until(lambda: any(record.name == "headway.access" for record in caplog.records))
    fields: dict[str, Any] = next(r for r in caplog.records if r.name == "headway.access").__dict__["fields"]
    assert (fields["id"], fields["status"], fields["output_tokens"]) == ("r1", 200, 4)
    assert "secret" not in str(fields)
    assert "Hello" not in str(fields)


def test_lifespan_and_websockets() -> None:
    app = create_app(FakeBackend(), Config())
    sent: list[Any] = []

    async def run() -> None:
        inbox = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

        async def receive() -> Any:
            return next(inbox)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await app({"type": "lifespan"}, receive, send)
        await app({"type": "websocket"}, receive, send)

    asyncio.run(run())
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


def test_two_gateways_do_not_share_metrics() -> None:
    one, two = Gateway(FakeBackend(), Config()), Gateway(FakeBackend(), Config())
    one.metrics.refused("x")
    assert two.metrics.registry.get_sample_value("headway_refused_total", {"reason": "x"}) is None
