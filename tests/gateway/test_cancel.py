"""A client that goes away ends its request in every phase, streamed or not."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from tests.fakes import FakeBackend
from tests.gateway.conftest import Serve, Server, chat, wait_until


def send(server: Server, *, stream: bool, request_id: str = "") -> socket.socket:
    """Send a chat over a raw connection and return it."""
    content = json.dumps(chat(stream=stream)).encode()
    raw = server.connect()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-id: %b\r\n" % request_id.encode()
    raw.sendall(head + b"content-length: %d\r\n\r\n" % len(content) + content)
    return raw


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_case_cancel_plain(serve: Serve, stream: bool) -> None:
    backend = FakeBackend(["t"] * 500, between_s=0.01)
    server = serve(backend)
    raw = send(server, stream=stream)
    wait_until(lambda: backend.generated > 3)
    raw.close()
    wait_until(lambda: backend.cancelled, limit_s=1.0)
    stopped_at = backend.generated
    time.sleep(0.05)
    assert backend.generated == stopped_at
    assert list(backend.cancelled.values()) == ["decode"]
    wait_until(lambda: server.gateway.running == 0)
    assert backend.running == 0
    assert server.metric("headway_cancelled_total", phase="decode", cause="disconnect") == 1
    # What was generated is counted, though no usage was ever sent.
    assert server.metric("headway_tokens_total", kind="output") == stopped_at


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_disconnect_in_prefill_cancels(serve: Serve, stream: bool) -> None:
    backend = FakeBackend(prefill_s=30.0)
    server = serve(backend)
    raw = send(server, stream=stream)
    wait_until(lambda: backend.running == 1)
    raw.close()
    wait_until(lambda: backend.cancelled, limit_s=1.0)
    assert list(backend.cancelled.values()) == ["prefill"]
    wait_until(lambda: server.metric("headway_cancelled_total", phase="prefill", cause="disconnect") == 1)


def test_case_cancel_queued(serve: Serve) -> None:
    backend = FakeBackend(["t"] * 60, between_s=0.01, slots=1)
    server = serve(backend)
    long_one = send(server, stream=True)
    wait_until(lambda: backend.running == 1)
    queued = [send(server, stream=i % 2 == 0) for i in range(100)]
    wait_until(lambda: backend.waiting == 100)
    for raw in queued[:90]:
        raw.close()
    wait_until(lambda: backend.waiting == 10, limit_s=2.0)
    assert set(backend.cancelled.values()) == {"queued"}
    assert len(backend.cancelled) == 90
    assert server.metric("headway_cancelled_total", phase="queued", cause="disconnect") == 90
    assert backend.ran == [backend.requests[0].id]
    for raw in [long_one, *queued[90:]]:
        raw.close()
    wait_until(lambda: server.gateway.running == 0)
    assert (backend.running, backend.waiting) == (0, 0)
    # Nothing leaked: the next one runs at once.
    backend.pieces = ("ok",)
    assert server.post(chat()).json()["choices"][0]["message"]["content"] == "ok"


def test_a_client_that_goes_away_while_it_sends_its_body(serve: Serve) -> None:
    server = serve()
    raw = server.connect()
    raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    wait_until(lambda: server.gateway.running == 1)
    raw.close()
    wait_until(lambda: server.gateway.running == 0)
    assert server.backend.requests == []


def test_a_half_closed_socket_counts_as_gone_and_leaks_nothing(serve: Serve) -> None:
    backend = FakeBackend(["t"] * 500, between_s=0.01)
    server = serve(backend)
    raw = send(server, stream=True)
    raw.shutdown(socket.SHUT_WR)
    wait_until(lambda: backend.cancelled or backend.finished)
    wait_until(lambda: server.gateway.running == 0)
    raw.close()


def test_several_prompts_of_one_body_are_all_cancelled(serve: Serve) -> None:
    backend = FakeBackend(["t"] * 500, between_s=0.01)
    server = serve(backend)
    content = json.dumps({"prompt": ["a", "b", "c"], "stream": True, "max_tokens": 500}).encode()
    with server.connect() as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
        wait_until(lambda: backend.running == 3)
    wait_until(lambda: len(backend.cancelled) == 3, limit_s=1.0)
    wait_until(lambda: server.gateway.running == 0)


def test_one_failing_prompt_ends_the_others(serve: Serve) -> None:
    backend = FakeBackend(["t"] * 50, between_s=0.005, fail_after=3)
    server = serve(backend)
    answer = server.post({"prompt": ["a", "b"]}, "/v1/completions")
    assert answer.status_code == 500
    assert backend.running == 0


def test_the_same_request_id_twice_at_once(serve: Serve) -> None:
    backend = FakeBackend(["t"] * 20, between_s=0.01)
    server = serve(backend)
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.post(chat(), headers={"x-request-id": "same"})))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [a.status_code for a in answers] == [200] * 3
    assert {a.headers["x-request-id"] for a in answers} == {"same"}
    assert len({request.id for request in backend.requests}) == 3


CUTS: dict[str, tuple[dict[str, Any], str]] = {
    "prefill": ({"prefill_s": 30.0}, "prefill"),
    "decode": ({"hang_after": 2}, "decode"),
    "failure": ({"between_s": 0.1, "fail_after": 3}, "decode"),
    "queued": ({"prefill_s": 30.0, "slots": 1}, "queue"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("name", CUTS)
def test_the_ledger_of_a_request_that_was_cut_short_adds_up(serve: Serve, name: str, stream: bool) -> None:
    settings, stage = CUTS[name]
    backend = FakeBackend(["t"] * 500, **settings)
    server = serve(backend)
    with send(server, stream=True, request_id="first"):
        wait_until(lambda: backend.running == 1)
        # Another one goes on waiting: the queue's length is what tells queued from running.
        with send(server, stream=True, request_id="second"):
            wait_until(lambda: len(backend.requests) == 2)
            with send(server, stream=stream, request_id="cut"):
                wait_until(lambda: len(backend.requests) == 3)
                time.sleep(0.25)
            wait_until(lambda: server.gateway.running <= 2)
        timing = server.get("/v1/requests/cut/timing").json()
    total = sum(span["ms"] for span in timing["stages"]) + timing["unattributed_ms"]
    assert timing["e2e_ms"] > 200
    # What a busy machine does between the cut and the end is nobody's; without the cut's own stage it would be all.
    assert abs(total - timing["e2e_ms"]) < 0.3 * timing["e2e_ms"]
    longest = max(timing["stages"], key=lambda span: span["ms"])
    assert longest["stage"] == stage
    names = [span["stage"] for span in timing["stages"]]
    assert len(names) == len(set(names))
