"""Deadlines: nonsense is refused, expired work never runs, running work is cut."""

from __future__ import annotations

import threading

import httpx
import openai
import pytest

from headway.errors import DeadlineExceeded, InvalidRequest
from headway.gateway.admit import Admit
from headway.gateway.deadline import read_patience
from headway.telemetry.budget import Ledger, Ledgers
from headway.telemetry.clock import FakeClock
from headway.types import Request, Slo
from tests.fakes import FakeBackend
from tests.gateway.conftest import Serve, chat, events, wait_until

HEADERS = ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-request-timeout-ms")


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("value", ["0", "-5", "abc", "", "nan", "inf", "1e99"])
def test_case_deadline_zero(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        read_patience({name: value}, stream=True, limit_s=None)
    assert caught.value.param == name
    assert repr(value) in caught.value.message


def test_case_deadline_zero_over_http(serve: Serve) -> None:
    server = serve()
    for name in HEADERS:
        answer = server.post(chat(), headers={name: "0"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name
    assert server.backend.requests == []


def test_case_deadline_zero_expired_while_queued(serve: Serve) -> None:
    backend = FakeBackend(["t"] * 60, between_s=0.01, slots=1)
    server = serve(backend)
    first = threading.Thread(target=lambda: server.post(chat()))
    first.start()
    wait_until(lambda: backend.running == 1)
    for stream in (False, True):
        answer = server.post(chat(stream=stream), headers={"x-request-timeout-ms": "100"})
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert answer.headers["x-should-retry"] == "false"
    first.join()
    assert len(backend.ran) == 1
    assert server.metric("headway_refused_total", reason="deadline_exceeded") == 2


def test_an_expired_deadline_is_refused_at_admission() -> None:
    import asyncio

    clock = FakeClock()
    backend, ledgers = FakeBackend(clock=clock), Ledgers(4)
    admit = Admit(backend, clock, ledgers, max_running=4, max_waiting=4)
    ledgers.open("r", Ledger(clock))

    async def run() -> None:
        request = Request(id="r", model="m", text="x", deadline=clock.now())
        await anext(admit(request, backend.generate))

    with pytest.raises(DeadlineExceeded):
        asyncio.run(run())
    assert backend.requests == []
    assert admit.admitted == 0


@pytest.mark.parametrize("prefill_s", [0.0, 30.0], ids=["in decode", "in prefill"])
def test_expiry_while_running_is_504_for_a_plain_answer(serve: Serve, prefill_s: float) -> None:
    backend = FakeBackend(["t"] * 500, prefill_s=prefill_s, between_s=0.01)
    server = serve(backend)
    answer = server.post(chat(), headers={"x-request-timeout-ms": "150"})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "request_timeout"
    assert len(backend.cancelled) == 1
    phase = "prefill" if prefill_s else "decode"
    assert server.metric("headway_cancelled_total", phase=phase, cause="deadline") == 1


def test_expiry_while_streaming_is_an_error_event(serve: Serve) -> None:
    backend = FakeBackend(["t"] * 500, between_s=0.01)
    server = serve(backend)
    got = events(server.post(chat(stream=True), headers={"x-request-timeout-ms": "150"}).text)
    assert got[-1] == "[DONE]"
    assert got[-2]["error"]["code"] == "request_timeout"
    assert len(got) > 4
    assert len(backend.cancelled) == 1


def test_the_servers_own_limit_holds_without_a_header(serve: Serve) -> None:
    assert serve(FakeBackend(prefill_s=30.0), request_s=0.1).post(chat()).status_code == 504


def test_case_health_hung_streams_end_at_their_deadline(serve: Serve) -> None:
    backend = FakeBackend(hang_after=2)
    got = events(serve(backend).post(chat(stream=True), headers={"x-request-timeout-ms": "200"}).text)
    assert got[-2]["error"]["code"] == "request_timeout"
    assert list(backend.cancelled.values()) == ["decode"]


def test_whose_limit_counts() -> None:
    def total(headers: dict[str, str], *, stream: bool = False, limit_s: float | None = None) -> float | None:
        return read_patience(headers, stream=stream, limit_s=limit_s).total_s

    assert total({}) is None
    assert total({"x-request-timeout-ms": "1500"}) == 1.5
    assert total({"x-request-timeout-ms": "1500"}, limit_s=1.0) == 1.0
    assert total({"x-request-timeout-ms": "9000", "x-stainless-read-timeout": "5"}) == 5.0
    assert total({"x-stainless-read-timeout": "600"}) == 600.0
    # On a stream the client's read timeout is the time between two reads, not the whole.
    assert total({"x-stainless-read-timeout": "5"}, stream=True) is None
    assert total({"x-stainless-read-timeout": "None"}) is None


def test_hopes_are_carried_to_the_backend(serve: Serve) -> None:
    server = serve()
    server.post(chat(), headers={"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "40.5"})
    request = server.backend.requests[0]
    assert request.slo == Slo(ttft_s=0.25, itl_s=0.0405, ttft_asked=True, itl_asked=True)
    assert request.deadline is None


def test_the_official_clients_timeout_reaches_the_backend(serve: Serve) -> None:
    backend = FakeBackend(prefill_s=30.0)
    server = serve(backend)
    with server.client(timeout=httpx.Timeout(0.2).read) as client, pytest.raises(openai.APIError):
        client.chat.completions.create(model="fake-1", messages=[{"role": "user", "content": "x"}])
    wait_until(lambda: backend.cancelled)
    assert backend.requests[0].deadline is not None
