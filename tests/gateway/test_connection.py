"""One connection's bounds: each is broken here once; and what an honest client does slowly, or oddly, is served."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psutil
import pytest

from headway.gateway import connection
from headway.gateway.connection import AHEAD_BYTES
from tests.fakes import FakeBackend
from tests.gateway.conftest import Serve, chat, wait_until

GET = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


def post(body: object, *lines: bytes, version: bytes = b"1.1") -> bytes:
    """Return a request as bytes."""
    content = json.dumps(body).encode()
    head = POST.replace(b"1.1", version) + b"".join(line + b"\r\n" for line in lines)
    return head + b"content-length: %d\r\n\r\n" % len(content) + content


def until_closed(raw: socket.socket) -> bytes:
    """Return everything that comes until the server closes."""
    seen = b""
    try:
        while part := raw.recv(65536):
            seen += part
    except ConnectionResetError:
        pass
    return seen


def answer(raw: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Read one answer that has a content-length: status, headers, body."""
    seen = b""
    while b"\r\n\r\n" not in seen:
        part = raw.recv(65536)
        assert part, seen
        seen += part
    head, _, body = seen.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += raw.recv(65536)
    return int(first.split()[1]), headers, body


def code(body: bytes) -> str:
    """Return the error's code, of a body in our shape."""
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


def flood(raw: socket.socket, block: bytes, most: int) -> int:
    """Send a block again and again until the server has enough; return the bytes that it let through."""
    raw.settimeout(5.0)
    sent = 0
    try:
        while sent < most:
            sent += raw.send(block)
    except OSError:
        pass
    return sent


# The size of what is not body


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        GET[:-2] + b"x-long: " + b"a" * 5000 + b"\r\n\r\n",
        GET[:-2] + b"x: y\r\n" * 1000 + b"\r\n",
    ],
    ids=["url", "header", "many headers"],
)
def test_a_head_over_the_limit_is_refused_in_our_shape_though_it_came_in_one_piece(serve: Serve, head: bytes) -> None:
    server = serve(head_bytes=4096)
    with server.connect() as raw:
        raw.sendall(head)
        status, headers, body = answer(raw)
    assert status == 431
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert code(body) == "headers_too_large"


def test_a_head_just_below_the_limit_is_served(serve: Serve) -> None:
    server = serve(head_bytes=4096)
    with server.connect() as raw:
        raw.sendall(GET[:-2] + b"x-long: " + b"a" * 4000 + b"\r\n\r\n")
        assert answer(raw)[0] == 200


ENDLESS = {
    "url": (b"GET /", b"a" * 65536),
    "header": (GET[:-2] + b"x: ", b"a" * 65536),
    "name": (GET[:-2], b"a" * 65536),
    "headers": (GET[:-2], b"a: b\r\n" * 10_000),
    "trailer": (CHUNKED + b"1\r\n{\r\n0\r\nx: ", b"a" * 65536),
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", b"a: b\r\n" * 10_000),
    "chunk extension": (CHUNKED + b"1;x=", b"a" * 65536),
    "empty lines": (b"", b"\r\n" * 32768),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_whatever_has_no_end_and_is_no_body_is_cut_off(serve: Serve, name: str) -> None:
    server = serve()
    first, block = ENDLESS[name]
    with server.connect() as raw:
        raw.sendall(first)
        # What the kernel's buffers take on both sides comes on top of the limit.
        assert flood(raw, block, 128 << 20) < 32 << 20
    wait_until(lambda: server.gateway.running == 0)
    assert server.get("/health/live").status_code == 200


def test_a_trailer_is_no_header(serve: Serve) -> None:
    server = serve()
    body = json.dumps(chat()).encode()
    with server.connect() as raw:
        raw.sendall(
            CHUNKED + b"%x\r\n%b\r\n0\r\nx-request-id: smuggled\r\nx-include-timing: 1\r\n\r\n" % (len(body), body)
        )
        status, headers, content = answer(raw)
    assert status == 200
    assert headers["x-request-id"] != "smuggled"
    assert "timing" not in json.loads(content)


def test_a_body_of_many_small_chunks_is_no_head(serve: Serve) -> None:
    server = serve(head_bytes=1024)
    body = json.dumps(chat("x" * 2000)).encode()
    with server.connect() as raw:
        raw.sendall(CHUNKED)
        for place in range(0, len(body), 100):
            raw.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body[place : place + 100]))
            time.sleep(0.005)
        raw.sendall(b"0\r\n\r\n")
        assert answer(raw)[0] == 200


def test_a_large_body_and_the_next_head_in_one_piece(serve: Serve) -> None:
    """The end of a body does not count as part of the head behind it."""
    server = serve(head_bytes=1024)
    with server.connect() as raw:
        raw.sendall(post(chat("x" * 50_000)) + GET[:20])
        assert answer(raw)[0] == 200
        raw.sendall(GET[20:])
        assert answer(raw)[0] == 200


# Time


def test_a_head_that_never_ends_is_timed_in_our_shape(serve: Serve) -> None:
    server = serve(body_s=0.3)
    with server.connect() as raw:
        raw.sendall(GET[:-4])
        status, headers, body = answer(raw)
        assert raw.recv(1) == b""
    assert status == 408
    assert headers["connection"] == "close"
    assert code(body) == "request_timeout"


def test_a_head_that_drips_is_timed_all_the_same(serve: Serve) -> None:
    server = serve(body_s=0.4)
    with server.connect() as raw:
        raw.settimeout(0.05)
        seen = b""
        for number in count():
            assert number < 200, "the connection is held"
            try:
                raw.sendall(GET[number : number + 1] if number < 20 else b"a")
                seen = raw.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            break
    assert b" 408 " in seen


def test_a_connection_that_says_nothing_is_closed(serve: Serve) -> None:
    server = serve(body_s=0.3)
    with server.connect() as raw:
        assert raw.recv(1) == b""


def test_the_second_head_of_a_connection_is_timed_too(serve: Serve) -> None:
    server = serve(body_s=0.3, keep_alive_s=60)
    with server.connect() as raw:
        raw.sendall(GET)
        assert answer(raw)[0] == 200
        time.sleep(0.5)  # idle between requests: that is not a head
        raw.sendall(GET[:10])
        assert answer(raw)[0] == 408


def test_a_body_that_nobody_waits_for_is_timed(serve: Serve) -> None:
    """The answer is known before the body has come; the rest may not drip for ever."""
    server = serve(body_s=0.3, keep_alive_s=60)
    with server.connect() as raw:
        raw.sendall(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        assert answer(raw)[0] == 404
        raw.settimeout(0.05)
        for number in count():
            assert number < 200, "the connection is held"
            try:
                raw.sendall(b" ")
                if raw.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break


def test_an_answer_that_takes_longer_than_every_limit_arrives(serve: Serve) -> None:
    server = serve(FakeBackend(prefill_s=1.5), body_s=0.2, write_s=0.2, keep_alive_s=1)
    with server.connect() as raw:
        raw.sendall(post(chat()))
        assert answer(raw)[0] == 200


def test_a_slow_upload_within_its_time_is_served(serve: Serve) -> None:
    server = serve(body_s=20.0)
    sent = post(chat("slow"))
    with server.connect() as raw:
        for place in range(0, len(sent), 8):
            raw.sendall(sent[place : place + 8])
            time.sleep(0.01)
        assert answer(raw)[0] == 200


def test_a_kept_connection_serves_many_requests_and_ends_when_idle(serve: Serve) -> None:
    server = serve(keep_alive_s=1)
    with server.connect() as raw:
        for _ in range(20):
            raw.sendall(GET)
            assert answer(raw)[0] == 200
        assert raw.recv(1) == b""


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_that_reads_nothing_is_cut_off(serve: Serve, stream: bool) -> None:
    server = serve(FakeBackend(["x" * 100_000] * 60), write_s=0.5)
    held = psutil.Process()
    with server.connect() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(post(chat(stream=stream)))
        wait_until(lambda: server.backend.requests and server.gateway.running == 0)
        port = raw.getsockname()[1]
        wait_until(lambda: not _established(held, server.port, port))
    assert server.get("/health/live").status_code == 200


def test_a_stream_that_the_kernel_could_hold_whole_is_cut_off_too(serve: Serve) -> None:
    """Megabytes fit its buffers: that nobody reads would show after a thousand tokens, or never."""
    backend = FakeBackend(["x" * 10_000] * 100)
    server = serve(backend, write_s=0.5)
    with server.connect() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(post(chat(stream=True)))
        wait_until(lambda: backend.requests and server.gateway.running == 0)
    assert server.metric("headway_cancelled_total", phase="decode", cause="slow_reader") == 1


def _established(process: psutil.Process, ours: int, theirs: int) -> bool:
    return any(
        each.laddr.port == ours and each.raddr and each.raddr.port == theirs and each.status == psutil.CONN_ESTABLISHED
        for each in process.net_connections("tcp")
    )


# More than one request


def test_pipelined_requests_behind_a_stream_are_answered_after_it(serve: Serve) -> None:
    server = serve(FakeBackend(["t"] * 20, between_s=0.005))
    with server.connect() as raw:
        raw.sendall(post(chat(stream=True)) + GET * 3 + GET[:-2] + b"connection: close\r\n\r\n")
        seen = until_closed(raw)
    assert seen.count(b'{"live":true') == 4
    assert seen.index(b"data: [DONE]") < seen.index(b'{"live"')


def test_what_is_sent_ahead_is_bounded(serve: Serve) -> None:
    backend = FakeBackend(["t"] * 2000, between_s=0.01)
    server = serve(backend)
    with server.connect() as raw:
        raw.sendall(post(chat(stream=True)))
        wait_until(lambda: backend.running == 1)
        raw.sendall(GET * (AHEAD_BYTES // len(GET) // 2))
        time.sleep(0.1)
        assert backend.running == 1
        flood(raw, GET * 100, 128 << 20)
        wait_until(lambda: backend.cancelled)
    wait_until(lambda: server.gateway.running == 0)


def test_a_client_that_goes_away_with_requests_waiting_behind_another_ends_them_all(serve: Serve) -> None:
    backend = FakeBackend(prefill_s=30.0)
    server = serve(backend)
    with server.connect() as raw:
        raw.sendall(post(chat()) + post(chat("second")) + GET * 5)
        wait_until(lambda: backend.running == 1)
    wait_until(lambda: backend.cancelled, limit_s=2.0)
    wait_until(lambda: server.gateway.running == 0)
    assert len(backend.requests) == 1


def test_garbage_behind_a_running_request_is_refused_and_ends_it(serve: Serve) -> None:
    backend = FakeBackend(prefill_s=30.0)
    server = serve(backend)
    with server.connect() as raw:
        raw.sendall(post(chat()))
        wait_until(lambda: backend.running == 1)
        raw.sendall(b"\x00garbage\r\n\r\n")
        status, _, body = answer(raw)
    assert (status, code(body)) == (400, "invalid_request_error")
    wait_until(lambda: backend.cancelled)
    wait_until(lambda: server.gateway.running == 0)


def test_garbage_behind_a_stream_ends_it_and_writes_nothing_into_it(serve: Serve) -> None:
    backend = FakeBackend(["t"] * 2000, between_s=0.01)
    server = serve(backend)
    with server.connect() as raw:
        raw.sendall(post(chat(stream=True)))
        seen = raw.recv(65536)
        raw.sendall(b"\x00garbage\r\n\r\n")
        seen += until_closed(raw)
    assert seen.count(b"HTTP/1.1") == 1
    wait_until(lambda: server.gateway.running == 0)


def test_what_was_sent_ahead_and_answered_does_not_count_for_ever(serve: Serve) -> None:
    server = serve()
    head = GET[:-2] + b"x: " + b"a" * 20_000 + b"\r\n\r\n"
    with server.connect() as raw:
        raw.settimeout(5.0)
        for _ in range(2 * AHEAD_BYTES // len(head)):
            raw.sendall(head * 2)
            seen = b""
            while seen.count(b'{"live":true') < 2:
                part = raw.recv(65536)
                assert part
                seen += part


# Odd, but honest


UPGRADES = {
    "h2c": [b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAEAAEAAAAIAAAABAAMAAABk"],
    "websocket": [b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-key: x", b"sec-websocket-version: 13"],
}


@pytest.mark.parametrize("offer", UPGRADES)
@pytest.mark.parametrize("pieces", [1, 7], ids=["whole", "in pieces"])
def test_a_request_that_offers_another_protocol_is_answered_in_this_one(serve: Serve, offer: str, pieces: int) -> None:
    """Java's client does so, with a body; the connection then serves its further requests."""
    server = serve()
    sent = post(chat("from Java"), *UPGRADES[offer])
    size = -(-len(sent) // pieces)
    with server.connect() as raw:
        for place in range(0, len(sent), size):
            raw.sendall(sent[place : place + size])
            time.sleep(0.01 if pieces > 1 else 0.0)
        assert answer(raw)[0] == 200
        raw.sendall(post(chat("again"), *UPGRADES[offer]))
        assert answer(raw)[0] == 200
        raw.sendall(GET)
        assert answer(raw)[0] == 200
    sent_texts = [request.messages[0].content for request in server.backend.requests if request.messages]
    assert sent_texts == ["from Java", "again"]


def test_a_chunked_body_with_an_offer_is_read(serve: Serve) -> None:
    server = serve()
    body = json.dumps(chat()).encode()
    lines = b"\r\n".join(UPGRADES["h2c"])
    with server.connect() as raw:
        raw.sendall(CHUNKED[:-2] + lines + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert answer(raw)[0] == 200


def test_connect_is_refused(serve: Serve) -> None:
    server = serve()
    with server.connect() as raw:
        raw.sendall(b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n")
        status, _, body = answer(raw)
    assert (status, code(body)) == (400, "invalid_request_error")


def test_http_1_0_gets_an_answer_without_chunks_that_ends_with_the_connection(serve: Serve) -> None:
    server = serve()
    with server.connect() as raw:
        raw.sendall(post(chat(stream=True), version=b"1.0"))
        head, _, body = until_closed(raw).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"data: ")
    assert body.endswith(b"data: [DONE]\n\n")
    with server.connect() as raw:
        raw.sendall(b"GET /health/live HTTP/1.0\r\n\r\n")
        assert answer(raw)[0] == 200
        assert raw.recv(1) == b""


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(serve: Serve) -> None:
    server = serve()
    head, _, body = post(chat(), b"expect: 100-continue").partition(b"\r\n\r\n")
    with server.connect() as raw:
        raw.sendall(head + b"\r\n\r\n")
        assert raw.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.sendall(body)
        assert answer(raw)[0] == 200


def test_a_body_that_is_refused_unread_gets_no_leave(serve: Serve) -> None:
    server = serve()
    with server.connect() as raw:
        raw.sendall(POST + b"expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n")
        assert answer(raw)[0] == 413


def test_a_refused_body_is_taken_for_a_while_so_that_the_refusal_can_be_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.gateway.http.LINGER_S", 0.5)
    server = serve(body_bytes=1000)
    with server.connect() as raw:
        raw.sendall(POST + b"content-length: 99999999\r\n\r\n")
        for _ in range(20):
            raw.sendall(b" " * 65536)
        status, headers, body = answer(raw)
        assert (status, headers["connection"], code(body)) == (413, "close", "request_too_large")
        assert until_closed(raw) == b""
    wait_until(lambda: server.gateway.running == 0)


def test_head_has_no_body_and_the_connection_goes_on(serve: Serve) -> None:
    server = serve()
    with server.connect() as raw:
        raw.sendall(GET.replace(b"GET", b"HEAD") + GET[:-2] + b"connection: close\r\n\r\n")
        seen = until_closed(raw)
    assert seen.count(b"HTTP/1.1 200") == 2
    assert seen.count(b'{"live"') == 1


def test_timers_end_with_their_connections(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Iterator[int] = count()
    monkeypatch.setattr(connection, "LOOK_S", 0.01)
    look = connection.Connection._look
    seen = [0]

    def counted(self: connection.Connection) -> None:
        seen[0] = next(looks)
        look(self)

    monkeypatch.setattr(connection.Connection, "_look", counted)
    server = serve()
    for offer in UPGRADES.values():
        with server.connect() as raw:
            raw.sendall(GET[:-2] + b"\r\n".join(offer) + b"\r\n\r\n")
            assert answer(raw)[0] == 200
            before = seen[0]
            wait_until(lambda: seen[0] > before)  # noqa: B023
    time.sleep(0.2)
    before = seen[0]
    time.sleep(0.1)
    assert seen[0] == before


def test_the_versions_of_uvicorn_are_bounded_on_both_sides() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'"uvicorn>=\d+\.\d+,<\d+\.\d+"', text)
