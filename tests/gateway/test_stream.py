"""What a stream does while it waits, when its reader is slow, and what it costs per token."""

from __future__ import annotations

import json
import socket
import time

from headway.config import Config
from headway.errors import EngineDied
from headway.gateway.events import events_for
from headway.gateway.parse import parse_chat
from headway.types import Chunk, Finish, Request, Usage
from tests.fakes import CARD, FakeBackend, Step
from tests.gateway.conftest import Serve, chat, events, wait_until


def test_headers_of_a_stream(serve: Serve) -> None:
    answer = serve().post(chat(stream=True))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache, no-transform"
    assert answer.headers["x-accel-buffering"] == "no"
    stages = [part.partition(";")[0] for part in answer.headers["server-timing"].split(", ")]
    assert stages == ["accept", "parse", "admit", "queue", "prefill", "first_token"]


def test_case_stream_long_prefill(serve: Serve) -> None:
    server = serve(FakeBackend(prefill_s=0.5), ping_s=0.1)
    with server.connect() as raw:
        raw.sendall(_request(chat(stream=True), "x-include-timing: 1\r\n"))
        began = time.monotonic()
        seen = b""
        while b": ping" not in seen:
            seen += raw.recv(65536)
        assert time.monotonic() - began < 0.45
        assert seen.startswith(b"HTTP/1.1 200 OK")
        while b"[DONE]" not in seen:
            seen += raw.recv(65536)
    assert 2 <= seen.count(b": ping\n\n") <= 5
    assert seen.index(b": ping") < seen.index(b'"role"')
    timing = json.loads(seen.split(b": timing ")[1].split(b"\n\n")[0])
    assert timing["ttft_ms"] >= 490  # the loop's timers may fire a little early


def test_pings_between_tokens_too(serve: Serve) -> None:
    text = serve(FakeBackend(("a", "b"), between_s=0.35), ping_s=0.1).post(chat(stream=True)).text
    assert 1 <= text.count(": ping\n\n") <= 4
    assert text.index('"a"') < text.index(": ping") < text.index('"b"')


def test_no_ping_before_its_time(serve: Serve) -> None:
    assert ": ping" not in serve(FakeBackend(between_s=0.02), ping_s=0.5).post(chat(stream=True)).text


def test_a_failure_after_a_ping_is_an_event(serve: Serve) -> None:
    backend = FakeBackend(script=lambda request: [0.25, EngineDied("gone")])
    answer = serve(backend, ping_s=0.1).post(chat(stream=True))
    assert answer.status_code == 200
    assert [e if e == "[DONE]" else e["error"]["code"] for e in events(answer.text)] == ["engine_died", "[DONE]"]


def test_case_ttft_role_chunk_over_http(serve: Serve) -> None:
    def script(request: Request) -> list[Step]:
        last = Chunk(text="text", token_ids=(2,), finish=Finish.STOP, usage=Usage())
        return [Chunk(), 0.01, Chunk(token_ids=(1,)), 0.08, last]

    answer = serve(FakeBackend(script=script)).post(chat(stream=True), headers={"x-include-timing": "1"})
    timing = events(answer.text)[-2]["timing"]
    assert 90 <= timing["ttft_ms"] < 1000


def test_timing_on_a_stream_comes_as_comment_and_in_the_last_event(serve: Serve) -> None:
    server = serve(FakeBackend(prefill_s=0.1))
    answer = server.post(chat(stream=True), headers={"x-include-timing": "1", "x-request-id": "r-1"})
    got = events(answer.text)
    assert got[-2]["choices"] == []
    assert got[-2]["usage"]["completion_tokens"] == 4
    assert all("usage" not in event for event in got[:-2])
    timing = got[-2]["timing"]
    assert json.loads(answer.text.split(": timing ")[1].split("\n\n")[0]) == timing
    assert [s["stage"] for s in timing["stages"]] == [
        "accept", "parse", "admit", "queue", "prefill", "first_token", "decode",
    ]  # fmt: skip
    assert timing["cached_tokens"] == 1
    before = sum(s["ms"] for s in timing["stages"][:6])
    assert abs(before + timing["unattributed_ms"] - timing["ttft_ms"]) < 0.02
    wait_until(lambda: server.gateway.running == 0)
    later = server.get("/v1/requests/r-1/timing").json()
    assert later["id"] == "r-1"
    assert later["stages"][:6] == timing["stages"][:6]
    assert later["stages"][-1]["stage"] == "flush"
    assert server.get("/v1/requests/chatcmpl-r-1/timing").json() == later


def test_next_to_nothing_is_unattributed(serve: Serve) -> None:
    # The best of three: a neighbour on the machine may take the processor between two stages.
    server = serve(FakeBackend(prefill_s=0.02))
    timings = [server.post(chat(), headers={"x-include-timing": "1"}).json()["timing"] for _ in range(3)]
    assert any(t["unattributed_ms"] <= max(1.0, 0.02 * t["ttft_ms"]) for t in timings)


def test_timing_in_a_plain_body(serve: Serve) -> None:
    server = serve()
    assert "timing" not in server.post(chat()).json()
    timing = server.post(chat(), headers={"x-include-timing": "1"}).json()["timing"]
    assert set(timing) >= {"stages", "ttft_ms", "unattributed_ms", "cached_tokens", "degraded"}


def test_a_slow_reader_is_cut_off(serve: Serve) -> None:
    piece = "x" * 60_000
    backend = FakeBackend(script=lambda request: [Chunk(text=piece)] * 2000)
    server = serve(backend, write_s=0.3)
    with server.connect() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(_request(chat(stream=True)))
        raw.recv(1000)
        wait_until(lambda: backend.cancelled)
        assert list(backend.cancelled.values()) == ["decode"]
        wait_until(lambda: server.metric("headway_cancelled_total", phase="decode", cause="slow_reader") == 1)
    wait_until(lambda: server.gateway.running == 0)


def test_a_reader_that_only_pauses_gets_everything(serve: Serve) -> None:
    backend = FakeBackend(["y" * 60_000] * 200)
    server = serve(backend, write_s=2.0)
    with server.connect() as raw:
        raw.sendall(_request(chat(stream=True), "connection: close\r\n"))
        time.sleep(0.3)
        seen = 0
        tail = b""
        while part := raw.recv(1 << 20):
            seen += len(part)
            tail = (tail + part)[-50:]
    assert seen > 200 * 60_000
    assert b"[DONE]" in tail
    assert not backend.cancelled


def test_metrics_of_a_stream(serve: Serve) -> None:
    server = serve(FakeBackend(between_s=0.03))
    server.post(chat(stream=True))
    wait_until(lambda: server.metric("headway_request_seconds_count") == 1)
    assert server.metric("headway_time_to_first_token_seconds_count") == 1
    assert server.metric("headway_inter_token_latency_seconds_count") == 3
    assert 0.09 <= server.metric("headway_inter_token_latency_seconds_sum") < 1.0
    assert 0.03 <= server.metric("headway_time_per_output_token_seconds_sum") < 0.5
    assert server.metric("headway_unattributed_seconds_count") == 1
    for stage in ("accept", "parse", "admit", "queue", "prefill", "first_token", "decode", "flush"):
        assert server.metric("headway_stage_seconds_count", stage=stage) == 1


def test_an_event_is_cheap() -> None:
    call = parse_chat(json.dumps(chat(stream=True)).encode(), (CARD,), (), request_id="r", arrived=0.0)
    writer = events_for(call, answer_id="chatcmpl-r", created=1)
    chunk = Chunk(text=" token", token_ids=(5,))
    best = 1.0
    for _ in range(5):
        began = time.thread_time()
        for _ in range(2000):
            writer.encode(chunk)
        best = min(best, (time.thread_time() - began) / 2000)
    assert best < 25e-6, f"{best * 1e6:.1f} us per event"


def test_default_settings_ping_before_a_proxy_would_cut() -> None:
    assert Config().server.ping_s <= 15.0


def _request(body: object, headers: str = "", path: str = "/v1/chat/completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(content)}\r\n\r\n"
    return head.encode() + content
