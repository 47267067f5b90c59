"""The whole server, started as a user starts it, on a tiny model, driven by the official client and by raw sockets."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import openai
import psutil
import pytest

from tests.server import Server, environ, serving

SETTINGS = """
engine: {kv_memory: 16MB, block_tokens: 16, heartbeat_s: 0.1, hang_s: 1.0, threads: 1, max_running: 16}
server: {ping_s: 0.2, drain_s: 10}
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("settings") / "headway.yaml"
    path.write_text(SETTINGS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def server(tiny_model: Path, settings: Path) -> Iterator[Server]:
    with serving(tiny_model, "--config", str(settings)) as running:
        yield running


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


def chat(server: Server, **more: object) -> dict[str, object]:
    return {"model": server.model, "messages": [{"role": "user", "content": "hello"}], "temperature": 0, **more}


def long_prompt(tokens: int) -> list[int]:
    return [3 + i % 250 for i in range(tokens)]


def test_stdout_has_the_ready_line_and_nothing_else(server: Server) -> None:
    with client(server) as ai:
        ai.chat.completions.create(**chat(server, max_tokens=4))  # type: ignore[call-overload]
    assert len(server.lines) == 1
    assert server.start_s < 10


def test_the_official_client_streams_what_it_gets_whole(server: Server) -> None:
    with client(server) as ai:
        whole = ai.chat.completions.create(**chat(server, max_tokens=32))  # type: ignore[call-overload]
        parts = ai.chat.completions.create(  # type: ignore[call-overload]
            **chat(server, max_tokens=32, stream=True, stream_options={"include_usage": True})
        )
        chunks = list(parts)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]


def test_a_short_prompt_overtakes_a_long_prefill(server: Server) -> None:
    """The short one's first token arrives before the long one's: prefill is chunked."""
    with client(server) as ai:

        def first_token(prompt: list[int]) -> float:
            stream = ai.completions.create(
                model=server.model, prompt=prompt, max_tokens=4, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            at = time.monotonic()
            stream.close()
            return at

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            long = pool.submit(first_token, long_prompt(2000))
            time.sleep(0.02)
            short = pool.submit(first_token, [5, 6, 7, 8, 9])
            assert short.result() < long.result()


def test_the_second_of_equal_prompts_reports_its_prefix_as_cached(server: Server) -> None:
    prompt = [7 + i % 200 for i in range(1500)]
    with client(server) as ai:
        answers = [
            ai.completions.create(model=server.model, prompt=prompt, max_tokens=2, temperature=0) for _ in range(2)
        ]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]  # type: ignore[union-attr]
    assert cached[0] == 0
    assert cached[1] is not None
    assert cached[1] >= 0.95 * 1500
    assert answers[0].choices[0].text == answers[1].choices[0].text


def _body(server: Server, rng: random.Random) -> bytes:
    prompt = long_prompt(rng.choice([5, 40, 400, 1800]))
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": rng.choice([1, 8, 200]),
        "stream": rng.random() < 0.6,
        "ignore_eos": True,
        "n": rng.choice([1, 1, 1, 3]),
    }
    return json.dumps(body).encode()


def _connect_and_drop(server: Server, seed: int) -> None:
    """Send a request, or a part of one, read a little or nothing, and go: politely, by half, or by a reset."""
    rng = random.Random(seed)
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as connection:
        body = _body(server, rng)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        data = head + body
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data))]
        connection.sendall(data)
        if rng.random() < 0.5:
            time.sleep(rng.random() * 0.05)
        if rng.random() < 0.4:
            connection.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                connection.recv(rng.choice([1, 200, 4000]))
        if rng.random() < 0.3:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close sends a reset
        elif rng.random() < 0.2:
            connection.shutdown(socket.SHUT_WR)


def test_a_thousand_connects_and_drops_leave_nothing_behind(server: Server) -> None:
    processes = [psutil.Process(server.process.pid), psutil.Process(server.engine_pid())]

    def burst(first: int, count: int) -> None:
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda seed: _connect_and_drop(server, seed), range(first, first + count)))

    burst(0, 250)  # fills caches, pools of the allocator and the KV pool
    server.until_idle(5.0)
    before = [process.memory_info().rss for process in processes]
    burst(250, 1000)
    load = server.until_idle(1.0 + 1.0)
    assert load["integrity"] == ""
    after = [process.memory_info().rss for process in processes]
    assert [late - early < 24e6 for early, late in zip(before, after, strict=True)] == [True, True], (before, after)
    with client(server) as ai:
        answer = ai.chat.completions.create(**chat(server, max_tokens=4))  # type: ignore[call-overload]
    assert answer.usage.completion_tokens >= 1


def test_case_cancel_plain_a_closed_socket_ends_a_plain_request(server: Server) -> None:
    address = urlsplit(server.url)
    body = json.dumps({"model": server.model, "prompt": [5, 6], "max_tokens": 2000, "ignore_eos": True}).encode()
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        deadline = time.monotonic() + 5
        while server.load()["running"] == 0:
            assert time.monotonic() < deadline
    server.until_idle(1.0)


def test_case_stream_error_late_a_killed_engine_is_an_error_and_then_an_answer(server: Server) -> None:
    with client(server) as ai:
        stream = ai.completions.create(
            model=server.model, prompt=[5, 6, 7], max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        events = iter(stream)
        for _ in range(3):
            next(events)
        began = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine"):
            for _ in events:
                pass
        assert time.monotonic() - began < 1.0
        while True:
            try:
                ai.chat.completions.create(**chat(server, max_tokens=4))  # type: ignore[call-overload]
                break
            except openai.InternalServerError as error:
                if not error.response.headers.get("retry-after"):
                    raise
                time.sleep(0.05)
        assert time.monotonic() - began < 5.0


def test_metrics_name_what_happened(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    for name in (
        "headway_requests_running 0.0",
        'headway_kv_blocks{state="held"} 0.0',
        "headway_time_to_first_token_seconds_count",
        "headway_step_seconds_count",
        'headway_stage_seconds_count{stage="prefill"}',
        'headway_tokens_total{kind="output"}',
        "headway_cancel_to_free_seconds_count",
    ):
        assert name in text, name


def test_case_drain_sigterm_finishes_streams_refuses_new_ones_and_exits_with_zero(
    tiny_model: Path, settings: Path, tmp_path: Path
) -> None:
    tight = tmp_path / "tight.yaml"
    tight.write_text(
        settings.read_text(encoding="utf-8").replace("max_running: 16", "max_running: 5"), encoding="utf-8"
    )
    with serving(tiny_model, "--config", str(tight)) as server, client(server) as ai:
        body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 1500}
        extra = {"ignore_eos": True}

        def stream() -> str | None:
            finish = None
            for chunk in ai.completions.create(**body, stream=True, extra_body=extra):  # type: ignore[call-overload]
                if chunk.choices and chunk.choices[0].finish_reason:
                    finish = chunk.choices[0].finish_reason
            return finish

        def plain() -> object:
            try:
                return ai.completions.create(**body, extra_body=extra)  # type: ignore[call-overload]
            except openai.InternalServerError as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            running = [pool.submit(stream) for _ in range(5)]
            while server.load()["running"] < 5:
                time.sleep(0.01)
            waiting = [pool.submit(plain) for _ in range(2)]
            while server.load()["waiting"] < 2:
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            late = pool.submit(plain)
            for refused in (*waiting, late):
                error = refused.result(10)
                assert isinstance(error, openai.InternalServerError), error
                assert error.status_code == 503
                assert error.response.headers["retry-after"]
            assert [one.result(30) for one in running] == ["length"] * 5
        assert server.process.wait(10) == 0


def test_a_sigterm_to_the_whole_group_drains_too(tiny_model: Path, settings: Path) -> None:
    """Service managers and `timeout` signal every process of the service, the engine's included."""
    with serving(tiny_model, "--config", str(settings)) as server, client(server) as ai:
        stream = ai.completions.create(
            model=server.model, prompt=[5, 6, 7], max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        for pid in (server.engine_pid(), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert [c.choices[0].finish_reason for c in stream if c.choices][-1] == "length"
        assert server.process.wait(10) == 0


def test_the_log_is_json_lines_and_holds_the_access_lines_that_were_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    config, errors = tmp_path / "headway.yaml", tmp_path / "stderr"
    config.write_text("engine: {kv_memory: 16MB, threads: 1}\nserver: {access_log: true}\n", encoding="utf-8")
    with serving(tiny_model, "--config", str(config), log=errors) as server:
        server.get("/v1/models")
    hint, page, *lines = errors.read_text(encoding="utf-8").splitlines()
    assert hint.startswith("try: curl ")
    assert page.startswith("dashboard: http")
    records = [json.loads(line) for line in lines]
    assert [record["path"] for record in records if record["logger"] == "headway.access"] == ["/v1/models"]
    assert [record["level"] for record in records if record["logger"] == "headway.serve"] == ["warning"]  # the drain


def test_a_full_disk_under_the_log_does_not_end_the_server(tiny_model: Path, tmp_path: Path) -> None:
    config = tmp_path / "headway.yaml"
    config.write_text("engine: {kv_memory: 16MB, threads: 1}\nserver: {access_log: true}\n", encoding="utf-8")
    argv = [sys.executable, "-m", "headway.cli", "serve", str(tiny_model), "--port", "0", "--config", str(config)]
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=full, text=True, env=environ()) as process,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[1]
            for _ in range(2):
                with urllib.request.urlopen(f"{url}/health/live", timeout=10) as answer:
                    assert answer.status == 200
            process.terminate()
            assert process.wait(10) == 0
        finally:
            process.kill()


def test_a_ready_line_that_cannot_be_written_is_one_clear_line(tiny_model: Path) -> None:
    argv = [sys.executable, "-m", "headway.cli", "serve", str(tiny_model), "--port", "0"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, env=environ(), timeout=30)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "stdout" in done.stderr


def test_verbose_logs_the_settings_that_hold(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "headway.cli",
        "-v",
        "serve",
        str(tmp_path / "absent"),
        "--threads",
        "1",
        "--port",
        "0",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, env=environ(), timeout=30)
    first = json.loads(done.stderr.splitlines()[0])
    assert first["message"] == "settings"
    assert first["engine"]["threads"] == 1
    assert first["server"]["drain_s"] == 30


def test_a_second_sigterm_ends_what_runs_with_an_error_and_exits_at_once(tiny_model: Path, settings: Path) -> None:
    with serving(tiny_model, "--config", str(settings)) as server, client(server) as ai:
        stream = ai.completions.create(
            model=server.model, prompt=[5, 6], max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        events = iter(stream)
        next(events)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            for _ in events:
                pass
        assert server.process.wait(5) == 0
        # The stream alone would run for seconds, and may by the limit of 10 s.
        assert time.monotonic() - began < 1.5


def test_the_end_of_the_terminal_drains_unless_it_is_to_be_ignored(tiny_model: Path, settings: Path) -> None:
    with serving(tiny_model, "--config", str(settings)) as server, client(server) as ai:
        stream = ai.completions.create(
            model=server.model, prompt=[5, 6, 7], max_tokens=500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        for pid in (server.engine_pid(), server.process.pid):
            os.kill(pid, signal.SIGHUP)
        assert [c.choices[0].finish_reason for c in stream if c.choices][-1] == "length"
        assert server.process.wait(10) == 0
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does it; the child inherits it
    try:
        with serving(tiny_model, "--config", str(settings)) as server, client(server) as ai:
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.2)
            assert server.get("/health/ready")["ready"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stopped_engine_does_not_hold_up_a_second_sigterm(tiny_model: Path, settings: Path) -> None:
    with serving(tiny_model, "--config", str(settings)) as server:
        engine = psutil.Process(server.engine_pid())
        engine.suspend()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < 4.0
        psutil.wait_procs([engine], 5)
        assert not engine.is_running()


def test_a_taken_port_is_one_clear_line(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        argv = [sys.executable, "-m", "headway.cli", "serve", str(tiny_model), "--port", port]
        done = subprocess.run(argv, capture_output=True, text=True, env=environ(), timeout=30)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert port in done.stderr
    assert "--port" in done.stderr
