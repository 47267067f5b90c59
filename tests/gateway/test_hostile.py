"""Hostile connections: bounded time, bounded memory, never a 500, and the next client is served."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
import tracemalloc

import pytest

from tests.gateway.conftest import Serve, Server, chat, wait_until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


def exchange(server: Server, sent: bytes, *, limit_s: float = 5.0) -> bytes:
    """Send bytes and return what comes back until the server closes or says nothing more."""
    with server.connect() as raw:
        raw.settimeout(limit_s)
        raw.sendall(sent)
        seen = b""
        try:
            while part := raw.recv(65536):
                seen += part
                head, _, body = seen.partition(b"\r\n\r\n")
                if b"content-length: %d\r\n" % len(body) in head.lower() + b"\r\n":
                    break
        except (TimeoutError, ConnectionResetError):
            pass
        return seen


def status(answer: bytes) -> int:
    """Return the status of a raw answer."""
    return int(answer.split(b" ", 2)[1])


def error_code(answer: bytes) -> str:
    """Return the error's code of a raw answer."""
    code = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]
    assert isinstance(code, str)
    return code


def test_case_json_depth_huge_content_length_is_refused_unread(serve: Serve) -> None:
    server = serve()
    for length in (b"2147483648", b"9" * 18):
        began = time.monotonic()
        answer = exchange(server, HEAD + b"content-length: " + length + b"\r\n\r\n{")
        assert status(answer) == 413
        assert error_code(answer) == "request_too_large"
        assert time.monotonic() - began < 1.0
        assert b"connection: close" in answer.lower()


def test_case_json_depth_ten_megabytes_of_spaces(serve: Serve) -> None:
    server = serve()
    assert status(exchange(server, HEAD + b"content-length: 10000000\r\n\r\n")) == 413
    spaces = b" " * 8_000_000
    assert server.post(spaces).status_code == 400


def test_case_json_depth_endless_chunked_body_is_counted(serve: Serve) -> None:
    server = serve(body_bytes=100_000)
    block = b"2710\r\n" + b" " * 10_000 + b"\r\n"
    answer = exchange(server, HEAD + b"transfer-encoding: chunked\r\n\r\n" + block * 12)
    assert status(answer) == 413


def test_case_json_depth_body_that_never_ends_is_timed(serve: Serve) -> None:
    server = serve(body_s=0.3)
    with server.connect() as raw:
        raw.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.05):
                try:
                    raw.sendall(b"1\r\n \r\n")
                except OSError:
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        began = time.monotonic()
        answer = raw.recv(65536)
        stop.set()
        dripping.join()
    assert status(answer) == 408
    assert b'"request_timeout"' in answer
    assert 0.2 < time.monotonic() - began < 1.5
    wait_until(lambda: server.gateway.running == 0)


def test_case_json_depth_gzip_bomb_is_never_unpacked(serve: Serve) -> None:
    server = serve()
    bomb = gzip.compress(b" " * 50_000_000)
    tracemalloc.start()
    try:
        answer = server.post(bomb, headers={"content-encoding": "gzip"})
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "content-encoding"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 1000,
        b"GET\r\n\r\n",
        b"GET /health/live HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: abc\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"content-length: 2\r\n\r\n{}" + b"\xff\xfe garbage \x00" * 50,
    ],
)
def test_garbage_gets_an_answer_or_a_closed_connection(serve: Serve, sent: bytes) -> None:
    server = serve()
    answer = exchange(server, sent, limit_s=1.0)
    assert b" 500 " not in answer[:20]
    wait_until(lambda: server.gateway.running == 0)
    assert server.get("/health/live").status_code == 200


def test_pipelined_requests_are_answered_in_order(serve: Serve) -> None:
    server = serve()
    get = b"GET /health/live HTTP/1.1\r\nhost: x\r\nx-request-id: %s\r\n\r\n"
    with server.connect() as raw:
        raw.sendall(get % b"one" + get % b"two")
        seen = b""
        while seen.count(b"x-request-id") < 2:
            seen += raw.recv(65536)
    assert seen.index(b"one") < seen.index(b"two")


def test_a_megabyte_string_and_a_long_prompt_of_ids(serve: Serve) -> None:
    server = serve()
    assert server.post(chat("x" * 7_000_000)).status_code == 200
    ids = server.post({"prompt": [1] * 500_000}, "/v1/completions")
    assert ids.json()["error"]["code"] == "context_length_exceeded"
    assert server.post({"tokens": [1] * 500_000}, "/detokenize").status_code == 200
    assert server.post(chat("x", user="y" * 9_000_000)).status_code == 413


def test_odd_headers_do_no_harm(serve: Serve) -> None:
    server = serve()
    body = json.dumps(chat()).encode()
    lines = b"content-type: text/\xff\r\nx-include-timing: \xe9\r\naccept: \x80\r\nexpect: x\r\n"
    answer = exchange(server, HEAD + lines + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert status(answer) == 200


def test_many_connections_that_send_nothing(serve: Serve) -> None:
    server = serve()
    idle: list[socket.socket] = [server.connect() for _ in range(100)]
    assert server.post(chat()).status_code == 200
    for raw in idle:
        raw.close()
    wait_until(lambda: server.gateway.running == 0)
