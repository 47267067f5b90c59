"""``headway bench serve`` as it is typed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.cli import main
from tests.bench.fake_server import FakeServer, Script, serving
from tests.bench.test_summary import KEYS


class Hosted:
    """A fake server in a thread of its own, since the command has its own loop."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(5)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with serving(self._script) as server:
            server.tokens_per_word = 2.0
            self.server: FakeServer = server
            self._ready.set()
            await self._stop.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)


@pytest.fixture
def good() -> Iterator[Hosted]:
    hosted = Hosted(Script(ttft_s=0.02, itl_s=0.002))
    yield hosted
    hosted.stop()


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = main(["bench", "serve", "--model", "m", *argv])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_has_the_contracts_keys(good: Hosted, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, out, _ = run(
        capsys, "--url", f"{good.server.url}/v1", "--rate", "50", "--arrivals", "constant", "--duration", "0.3",
        "--input-tokens", "20-40", "--output-tokens", "5", "--shared-prefix-tokens", "10", "--slo-ttft-ms", "5000",
        "--header", "X-Tenant: blue", "--api-key", "k", "--json", "--html", str(page),
    )  # fmt: skip
    report = json.loads(out)
    assert code == 0
    assert set(report) == KEYS
    assert (report["requests"], report["completed"], report["errors"], report["refused"]) == (15, 15, 0, 0)
    assert report["mode"] == "rate=50 arrivals=constant"
    assert report["output_tokens"] == 75
    assert report["goodput_per_s"] == report["requests_per_s"] > 0
    assert report["slo"] == {"ttft_ms": 5000.0, "tpot_ms": None, "itl_ms": None}
    assert 19 <= report["ttft_ms"]["p50"] < 500
    assert good.server.headers[0]["x-tenant"] == "blue"
    prompts = [body["messages"][0]["content"].split() for body in good.server.bodies]
    assert {tuple(prompt[:5]) for prompt in prompts} == {tuple(prompts[0][:5])}  # two tokens a word
    assert all(10 <= len(prompt) <= 20 for prompt in prompts)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_trace_and_a_closed_loop_print_a_table(
    good: Hosted, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    trace = tmp_path / "t.jsonl"
    row = {"timestamp": 5, "input_length": 8, "output_length": 3, "hash_ids": [1]}
    trace.write_text(f"{json.dumps(row)}\n{json.dumps(row | {'timestamp': 105})}\n", encoding="utf-8")
    code, out, _ = run(capsys, "--url", good.server.url, "--trace", str(trace), "--speed", "2")
    assert code == 0
    assert "2 requests, 2 completed" in out
    assert "ttft_ms" in out
    assert good.server.headers[0]["authorization"] == "Bearer from-env"
    code, out, _ = run(
        capsys, "--url", good.server.url, "--concurrency", "2", "--requests", "4", "--output-tokens", "2"
    )
    assert code == 0
    assert "4 requests, 4 completed" in out


def test_nothing_completed_is_a_failure_that_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    hosted = Hosted(Script(status=503, retry_after="7"))
    code, out, err = run(capsys, "--url", hosted.server.url, "--concurrency", "1", "--requests", "2", "--json")
    hosted.stop()
    report = json.loads(out)
    assert code == 1
    assert report["refused"] == 2
    assert report["retry_after_s"]["p50"] == 7.0
    assert "refused with 503" in err
    code, _, err = run(capsys, "--url", hosted.server.url, "--concurrency", "1", "--requests", "1")
    assert code == 1
    assert "connect" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--rate", "1"], "--duration"),
        (["--rate", "0", "--duration", "1"], "positive number"),
        (["--rate", "nan", "--duration", "1"], "positive number"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with"),
        (["--duration", "1"], "--rate"),
        (["--concurrency", "1", "--duration", "1", "--speed", "2"], "--speed 2"),
        (["--concurrency", "1", "--duration", "1", "--arrivals", "constant"], "--arrivals constant"),
        (["--concurrency", "1", "--duration", "1", "--input-tokens", "9-3"], "N or MIN-MAX"),
        (["--concurrency", "1", "--duration", "1", "--shared-prefix-tokens", "128"], "--shared-prefix-tokens 128"),
        (["--concurrency", "1", "--duration", "1", "--header", "nonsense"], "'nonsense' is no header"),
        (["--concurrency", "1", "--duration", "1", "--html", "no/such/folder.html"], "no such folder"),
        (["--trace", "absent.jsonl"], "absent.jsonl"),
        (["--trace", "absent.jsonl", "--input-tokens", "3"], "--input-tokens"),
    ],
)
def test_wrong_usage_is_named(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    code, out, err = run(capsys, "--url", "http://127.0.0.1:9", *argv)
    assert (code, out) == (2, "")
    assert words in err


def test_a_bad_url_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--url", "localhost:8000", "--rate", "1", "--duration", "1")
    assert code == 2
    assert "'localhost:8000'" in err
