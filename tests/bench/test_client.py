"""What a client measures and calls an error, against a server whose timing is known."""

from __future__ import annotations

import asyncio
import itertools
import time
from email.utils import formatdate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.bench.ask import Planned, Record, Target, ask, prepare, retry_after_s
from headway.bench.client import Connections, SseParser, WireError, parse_url, render
from headway.errors import InvalidRequest
from tests.bench.fake_server import FakeServer, Script, serving

LATE_S = 0.15
"""What a shared machine may add."""


def asked(
    script: Script, planned: Planned | None = None, *, times: int = 1, **target: Any
) -> tuple[list[Record], FakeServer]:
    """Ask one after the other over the same connections."""

    async def run() -> tuple[list[Record], FakeServer]:
        async with serving(script) as server:
            aim = Target(url=server.url, model="m", **target)
            connections = Connections(aim.origin())
            plan = planned or Planned(prompt="hello", output_tokens=6)
            records = []
            for _ in range(times):
                started = time.monotonic()
                request = prepare(aim, connections.origin, plan)
                record = await ask(
                    connections, request, plan, scheduled_s=0.0, started=started, timeout_s=aim.timeout_s
                )
                records.append(record)
            connections.close()
            return records, server

    return asyncio.run(run())


def test_the_times_are_those_of_the_server() -> None:
    (record,), _ = asked(Script(ttft_s=0.1, itl_s=0.03, pings=True))
    assert record.outcome == "completed"
    assert record.ttft_s is not None
    assert 0.099 <= record.ttft_s < 0.1 + LATE_S
    assert record.tpot_s is not None
    assert 0.029 <= record.tpot_s < 0.03 + LATE_S / 5
    assert len(record.gaps_s) == 5
    assert sum(record.gaps_s) == pytest.approx(5 * record.tpot_s)
    assert record.last_s is not None
    assert record.last_s <= record.done_s == record.e2e_s
    assert (record.output_tokens, record.input_tokens, record.counted_by) == (6, 7, "usage")
    assert record.finish_reason == "length"


@pytest.mark.parametrize("content", ["content", "reasoning_content", "reasoning", "tool_calls"])
def test_any_content_is_the_first_token_but_a_role_is_not(content: str) -> None:
    (record,), _ = asked(Script(ttft_s=0.08, itl_s=0.0, content=content))
    assert record.ttft_s is not None
    assert record.ttft_s >= 0.079
    assert len(record.deltas_s) == 6


def test_slow_headers_count_into_the_first_token() -> None:
    (record,), _ = asked(Script(ttft_s=0.08, head_delay_s=0.08, itl_s=0.0))
    assert record.ttft_s is not None
    assert 0.079 <= record.ttft_s < 0.08 + LATE_S


@pytest.mark.parametrize("cut_bytes", [1, 3, 7, 64])
def test_bytes_may_be_cut_anywhere(cut_bytes: int) -> None:
    (record,), _ = asked(Script(ttft_s=0.0, itl_s=0.0, cut_bytes=cut_bytes, pings=True))
    assert (record.outcome, len(record.deltas_s), record.output_tokens) == ("completed", 6, 6)


def test_tokens_are_deltas_where_no_usage_is_told() -> None:
    (record,), _ = asked(
        Script(ttft_s=0.0, itl_s=0.0, usage=False), Planned(prompt="x", output_tokens=4, input_tokens=9)
    )
    assert (record.output_tokens, record.counted_by, record.input_tokens) == (4, "deltas", 9)


def test_usage_wins_where_a_delta_holds_several_tokens() -> None:
    (record,), _ = asked(Script(ttft_s=0.0, itl_s=0.02, tokens_per_delta=3))
    assert (len(record.deltas_s), record.output_tokens, record.counted_by) == (2, 6, "usage")
    assert record.tpot_s is not None
    assert record.tpot_s == pytest.approx(record.gaps_s[0] / 5)


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        ("no_done", "truncated"),
        ("no_finish", "truncated"),
        ("reset", "reset"),
        ("error_event", "stream_error"),
        ("garbage", "protocol"),
        ("not_a_stream", "not_a_stream"),
    ],
)
def test_a_broken_stream_is_an_error_of_its_kind(broken: Any, kind: str) -> None:
    (record,), _ = asked(Script(ttft_s=0.0, itl_s=0.0, broken=broken))
    assert (record.outcome, record.error) == ("error", kind)
    assert record.detail


def test_a_stream_that_hangs_is_a_timeout() -> None:
    (record,), _ = asked(Script(ttft_s=0.0, itl_s=0.0, broken="hang"), timeout_s=0.2)
    assert (record.outcome, record.error) == ("error", "timeout")
    assert 0.2 <= record.e2e_s < 0.2 + LATE_S
    assert len(record.deltas_s) == 3


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_is_no_error_and_says_when_to_come_back(status: int) -> None:
    (record,), _ = asked(Script(status=status, retry_after="2.5", head_delay_s=0.05))
    assert (record.outcome, record.error, record.status, record.retry_after_s) == ("refused", None, status, 2.5)
    assert 0.05 <= record.e2e_s < 0.05 + LATE_S


def test_other_statuses_are_errors_by_number() -> None:
    (record,), _ = asked(Script(status=500))
    assert (record.outcome, record.error) == ("error", "http_500")
    assert "no" in record.detail


def test_nobody_there_is_an_error() -> None:
    async def run() -> Record:
        async with serving(Script()) as server:
            target = Target(url=server.url, model="m")
        connections = Connections(target.origin())
        planned = Planned(prompt="x", output_tokens=1)
        request = prepare(target, connections.origin, planned)
        return await ask(connections, request, planned, scheduled_s=0.0, started=time.monotonic(), timeout_s=5.0)

    record = asyncio.run(run())
    assert (record.outcome, record.error, record.status) == ("error", "connect", None)


def test_connections_are_kept_also_after_refusals() -> None:
    records, server = asked(Script(ttft_s=0.0, itl_s=0.0), times=4)
    assert [record.outcome for record in records] == ["completed"] * 4
    assert server.connections == 1
    _, server = asked(Script(status=429), times=3)
    assert server.connections == 1


def test_a_broken_connection_is_not_used_again() -> None:
    records, server = asked(Script(ttft_s=0.0, itl_s=0.0, broken="no_finish"), times=2)
    assert {record.error for record in records} == {"truncated"}
    records, server = asked(Script(ttft_s=0.0, itl_s=0.0, broken="reset"), times=2)
    assert {record.error for record in records} == {"reset"}
    assert server.connections == 2


def test_the_body_asks_for_what_was_planned() -> None:
    planned = Planned(prompt="hi", output_tokens=3, headers={"X-Tenant": "a"}, body={"top_p": 0.5, "temperature": None})
    _, server = asked(Script(), planned, api_key="secret", headers={"x-b": "c"}, ignore_eos=True)
    assert server.bodies == [
        {
            "model": "m",
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "messages": [{"role": "user", "content": "hi"}],
            "top_p": 0.5,
        }
    ]
    assert server.paths == ["/v1/chat/completions"]
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert (server.headers[0]["x-tenant"], server.headers[0]["x-b"]) == ("a", "c")


def test_completions_are_measured_alike() -> None:
    (record,), server = asked(Script(ttft_s=0.05, itl_s=0.0), endpoint="completions")
    assert record.outcome == "completed"
    assert record.ttft_s is not None
    assert record.ttft_s >= 0.049
    assert server.paths == ["/v1/completions"]
    assert server.bodies[0]["prompt"] == "hello"
    assert "ignore_eos" not in server.bodies[0]


STREAM = (
    b"\xef\xbb\xbfdata: one\n\n: a comment\n\nevent: x\ndata:two\r\ndata: lines\r\n\r\nid: 3\r\rdata: \xc3\xa9\r\r"
    b"data\n\ndata: unfinished\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_how_bytes_are_cut(cuts: list[int]) -> None:
    parser, events = SseParser(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        events += parser.feed(STREAM[start:end])
    assert events == [b"one", b"two\nlines", "é".encode(), b""]


LINES = st.lists(st.sampled_from([b"data: a", b"data:b", b"data", b"", b":c", b"x: y"]), max_size=12)


@settings(max_examples=60)
@given(LINES, st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=12, max_size=12), st.integers(1, 9))
def test_any_events_are_the_same_whole_and_cut(lines: list[bytes], ends: list[bytes], size: int) -> None:
    data = b"".join(line + end for line, end in zip(lines, ends, strict=False))
    parser, cut = SseParser(), []
    for start in range(0, len(data), size):
        cut += parser.feed(data[start : start + size])
    assert cut == SseParser().feed(data)


def test_an_event_without_end_is_refused() -> None:
    parser = SseParser()
    parser.feed(b"data: " + b"x" * 2**23)
    with pytest.raises(WireError, match="event"):
        parser.feed(b"x" * 2**23)


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("http://h:8000", "h", 8000, ""),
        ("http://h:8000/v1", "h", 8000, ""),
        ("http://h/v1/", "h", 80, ""),
        ("https://h/base/v1", "h", 443, "/base"),
        ("http://[::1]:9/", "::1", 9, ""),
    ],
)
def test_urls_are_read_with_and_without_v1(url: str, host: str, port: int, prefix: str) -> None:
    origin = parse_url(url)
    assert (origin.host, origin.port, origin.prefix) == (host, port, prefix)


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://h:x", "http://h?a=b", "http://u:p@h", ""])
def test_a_bad_url_is_named(url: str) -> None:
    with pytest.raises(InvalidRequest, match="--url"):
        parse_url(url)


def test_a_header_cannot_break_lines() -> None:
    with pytest.raises(InvalidRequest):
        render(parse_url("http://h"), "/", {"x": "a\r\nb: c"}, b"")


def test_retry_after_may_be_a_date() -> None:
    got = retry_after_s({"retry-after": formatdate(time.time() + 60, usegmt=True)})
    assert got is not None
    assert 55 < got <= 60
    assert retry_after_s({"retry-after": "3"}) == 3.0
    assert retry_after_s({"retry-after": "3", "retry-after-ms": "2600"}) == 2.6
    assert retry_after_s({"retry-after": "3", "retry-after-ms": "soon"}) == 3.0
    assert retry_after_s({"retry-after": "soon"}) is None
    assert retry_after_s({}) is None


def test_a_kept_connection_that_the_server_closed_is_no_error() -> None:
    async def run() -> tuple[list[Record], FakeServer]:
        async with serving(Script()) as server:
            server.drops_kept = True
            aim = Target(url=server.url, model="m")
            connections = Connections(aim.origin())
            plan = Planned(prompt="hello", output_tokens=3)
            request = prepare(aim, connections.origin, plan)
            records = [
                await ask(connections, request, plan, scheduled_s=0.0, started=time.monotonic(), timeout_s=5.0)
                for _ in range(3)
            ]
            connections.close()
            return records, server

    records, server = asyncio.run(run())
    assert [record.outcome for record in records] == ["completed"] * 3
    assert server.connections == 3
    assert len(server.bodies) == 3
