"""The engine as a Backend: answers, cancels, refuses, survives its process's death and stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headway.config import EngineConfig
from headway.engine.host import EngineHost
from headway.engine.messages import Status, Submit
from headway.engine.tokenizer import Tokenizer
from headway.errors import (
    ConfigError,
    ContextExceeded,
    DeadlineExceeded,
    EngineDied,
    HeadwayError,
    InvalidRequest,
    NeverFits,
    OutOfReach,
    Overloaded,
)
from headway.models.checkpoint import Checkpoint
from headway.types import Chunk, Finish, Message, Params, Request, Slo

GREEDY = Params(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = Params(temperature=0.0, max_tokens=1900, ignore_eos=True)


@contextlib.asynccontextmanager
async def running(model: Path, **settings: object) -> AsyncIterator[EngineHost]:
    # Slow kernels: what happens to a request while it runs is the matter here, and natively LONG is over in 0.4 s.
    defaults = {"kernels": "reference", "kv_memory": "8MB", "block_tokens": 16, "heartbeat_s": 0.1}
    config = EngineConfig(**{**defaults, **settings})  # type: ignore[arg-type]
    host = EngineHost(model, "tiny", config, threads=1)
    await host.start()
    try:
        yield host
    finally:
        await host.close()


def request(name: str, text: str = "the quick brown fox", params: Params = GREEDY, **more: object) -> Request:
    return Request(id=name, model="tiny", text=text, params=params, **more)  # type: ignore[arg-type]


async def collect(host: EngineHost, asked: Request) -> list[Chunk]:
    return [chunk async for chunk in host.generate(asked)]


def ids(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


async def until(true: Callable[[], bool], limit_s: float = 5.0) -> float:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < limit_s, "waited too long"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def idle(host: EngineHost) -> Callable[[], bool]:
    return lambda: host.load().running == 0 and host.load().waiting == 0 and host.load().blocks_held == 0


def drive(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 60)

    asyncio.run(bounded())


def test_an_answer_ends_with_one_finish_usage_and_timing(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            chunks = await collect(host, request("a"))
            assert [chunk.finish for chunk in chunks if chunk.finish] == [Finish.LENGTH]
            last = chunks[-1]
            assert last.usage is not None
            assert last.usage.completion_tokens == len(ids(chunks)) == 24
            assert last.timing is not None
            timing = last.timing
            assert timing.received <= timing.scheduled <= timing.prefilled <= timing.first_token <= timing.finished
            await until(idle(host))
            assert host.load().integrity == ""

    drive(scenario)


def test_sixteen_streams_together_get_what_each_gets_alone(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            asked = [request(f"r{i}", "the slow server " * (1 + 3 * i)) for i in range(16)]
            alone = [ids(await collect(host, one)) for one in asked]
            together = await asyncio.gather(*(collect(host, one) for one in asked))
            assert [ids(chunks) for chunks in together] == alone

    drive(scenario)


def test_a_closed_stream_frees_its_blocks_at_once(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            stream = host.generate(request("long", params=LONG))
            await anext(stream)
            await until(lambda: host.load().blocks_held > 0)
            await stream.aclose()
            await until(idle(host), 1.0)

    drive(scenario)


def test_case_cancel_queued_clients_that_leave_the_queue_never_run(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model, max_running=1) as host:
            first = host.generate(request("long", params=LONG))
            await anext(first)
            waiting = [asyncio.create_task(collect(host, request(f"w{i}"))) for i in range(100)]
            await until(lambda: host.load().waiting == 100)
            for task in waiting[:90]:
                task.cancel()
            await until(lambda: host.load().waiting == 10, 1.0)
            await first.aclose()
            answers = await asyncio.gather(*waiting[90:])
            assert all(len(ids(chunks)) == 24 for chunks in answers)
            await until(idle(host))

    drive(scenario)


def test_a_killed_engine_ends_streams_within_a_second_and_is_back_within_five(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            stream = host.generate(request("long", params=LONG))
            await anext(stream)
            await anext(stream)
            assert host.engine_pid is not None
            began = time.monotonic()
            os.kill(host.engine_pid, signal.SIGKILL)
            with pytest.raises(EngineDied):
                async for _ in stream:
                    pass
            assert time.monotonic() - began < 1.0
            assert not host.health().ready
            with pytest.raises(Overloaded) as refused:
                await collect(host, request("too early"))
            assert refused.value.retry_after_s
            await until(lambda: host.health().ready)
            assert len(ids(await collect(host, request("again")))) == 24
            assert time.monotonic() - began < 5.0

    drive(scenario)


def test_requests_that_had_delivered_nothing_are_repeated_after_a_restart(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model, max_running=1) as host:
            first = host.generate(request("long", params=LONG))
            await anext(first)
            waiting = [asyncio.create_task(collect(host, request(f"w{i}"))) for i in range(3)]
            await until(lambda: host.load().waiting == 3)
            assert host.engine_pid is not None
            os.kill(host.engine_pid, signal.SIGKILL)
            with pytest.raises(EngineDied):
                async for _ in first:
                    pass
            answers = await asyncio.gather(*waiting)
            assert all(len(ids(chunks)) == 24 for chunks in answers)
            assert host.restarts == 1

    drive(scenario)


def test_case_health_hung_a_stopped_engine_is_not_live(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model, hang_s=0.8, kill_s=60.0) as host:
            assert host.health().live
            assert host.engine_pid is not None
            os.kill(host.engine_pid, signal.SIGSTOP)
            try:
                await until(lambda: not host.health().live, 5.0)
                assert not host.health().ready
                assert "silent" in host.health().reason
            finally:
                os.kill(host.engine_pid, signal.SIGCONT)
            await until(lambda: host.health().ready)
            assert len(ids(await collect(host, request("after")))) == 24

    drive(scenario)


def test_health_hung_is_noticed_within_five_seconds_by_default() -> None:
    config = EngineConfig()
    assert config.hang_s + config.heartbeat_s < 5


def test_health_hung_a_step_that_does_not_end_is_not_live(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            began = time.monotonic()
            host._receive([Status(load=host.load(), busy_since=began - 59.0)])
            assert host.health().live
            host._receive([Status(load=host.load(), busy_since=began - 61.0)])
            health = host.health()
            assert (health.live, health.ready) == (False, False)
            assert "a step has been running for 61" in health.reason

    drive(scenario)


@pytest.mark.parametrize("event", ["drain", "death"])
def test_a_request_that_was_being_tokenised_when_the_engine_left_is_refused_in_time(
    tiny_model: Path, event: str
) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            prepare, inside, go_on = host._prepare, asyncio.Event(), asyncio.Event()

            async def slow(asked: Request) -> Submit:
                submit = await prepare(asked)
                inside.set()
                await go_on.wait()
                return submit

            host._prepare = slow  # type: ignore[method-assign, assignment]
            task = asyncio.create_task(collect(host, request("between")))
            await inside.wait()
            if event == "drain":
                await host.drain(0.1)
            else:
                assert host.engine_pid is not None
                os.kill(host.engine_pid, signal.SIGKILL)
                await until(lambda: host.started is None)
            go_on.set()
            with pytest.raises(Overloaded) as refused:
                await task
            assert refused.value.retry_after_s

    drive(scenario)


def test_a_lower_number_goes_first_and_a_deadline_ends_the_wait(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model, max_running=1) as host:
            long = host.generate(request("long", params=LONG))
            await anext(long)
            order: list[str] = []

            async def noted(asked: Request) -> None:
                await collect(host, asked)
                order.append(asked.id)

            tasks = []
            for name, priority in (("late", 5), ("usual", 0), ("first", -3)):
                tasks.append(asyncio.create_task(noted(request(name, priority=priority))))
                await until(lambda: host.load().waiting == len(tasks))
            assert host.load().running == 1, "the long one is still in the way"
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                await collect(host, request("expired", deadline=began + 0.1))
            assert time.monotonic() - began < 1.0
            await long.aclose()
            await asyncio.gather(*tasks)
            assert order == ["first", "usual", "late"]

    drive(scenario)


def test_an_engine_that_stays_hung_is_replaced(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model, hang_s=0.3, kill_s=0.8) as host:
            stopped = host.engine_pid
            assert stopped is not None
            os.kill(stopped, signal.SIGSTOP)
            await until(lambda: host.restarts == 1, 8.0)
            assert host.engine_pid != stopped
            assert len(ids(await collect(host, request("after")))) == 24

    drive(scenario)


def test_drain_lets_running_streams_finish_and_refuses_the_rest(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model, max_running=2) as host:
            some = Params(temperature=0.0, max_tokens=1500, ignore_eos=True)
            streams = [asyncio.create_task(collect(host, request(f"r{i}", params=some))) for i in range(2)]
            await until(lambda: host.load().running == 2)
            waiting = [asyncio.create_task(collect(host, request(f"w{i}"))) for i in range(2)]
            await until(lambda: host.load().waiting == 2)
            draining = asyncio.create_task(host.drain(20.0))
            for task in waiting:
                with pytest.raises(Overloaded) as refused:
                    await task
                assert refused.value.retry_after_s
            with pytest.raises(Overloaded):
                await collect(host, request("new"))
            await draining
            assert [len(ids(await stream)) for stream in streams] == [1500, 1500]

    drive(scenario)


def test_drain_ends_what_is_still_running_at_its_limit(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            stream = asyncio.create_task(collect(host, request("long", params=LONG)))
            await until(lambda: host.load().running == 1)
            await host.drain(0.1)
            with pytest.raises(Overloaded):
                await stream
            await until(idle(host))

    drive(scenario)


def test_what_can_never_fit_is_refused_with_both_numbers(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model, kv_memory="300KB") as host:
            assert host.started is not None
            capacity = host.started.n_blocks * host.started.block_tokens
            assert capacity < 2048
            with pytest.raises(ContextExceeded, match="2048"):
                await collect(host, request("a", params=Params(max_tokens=2048)))
            with pytest.raises(NeverFits, match=str(capacity)):
                await collect(host, request("b", params=Params(max_tokens=capacity)))
            unbounded = await collect(host, request("c", params=Params(temperature=0.0, ignore_eos=True)))
            assert len(ids(unbounded)) + len(unbounded[0].prompt_token_ids) == capacity

    drive(scenario)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (request("a", ""), "prompt"),
        (request("a", params=Params(temperature=float("nan"))), "temperature"),
        (request("a", params=Params(top_p=0.0)), "top_p"),
        (request("a", params=Params(logit_bias={10**9: 1.0})), "logit_bias"),
        (request("a", params=Params(stop=("",))), "stop"),
        (Request(id="a", model="tiny", token_ids=(5, 10**6)), "prompt"),
    ],
)
def test_bad_values_are_refused_by_name(tiny_model: Path, asked: Request, name: str) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            with pytest.raises(InvalidRequest) as refused:
                await collect(host, asked)
            assert refused.value.param == name

    drive(scenario)


def test_stop_strings_end_the_request_in_the_engine_too(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            whole = "".join(chunk.text for chunk in await collect(host, request("a")))
            stop = whole[5:8]
            chunks = await collect(host, request("b", params=Params(temperature=0.0, max_tokens=1900, stop=(stop,))))
            assert "".join(chunk.text for chunk in chunks) == whole[: whole.index(stop)]
            assert chunks[-1].finish is Finish.STOP
            assert chunks[-1].stop_reason == stop
            await until(idle(host), 1.0)

    drive(scenario)


def test_n_choices_share_the_prompt_and_differ_by_seed(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            params = Params(temperature=1.0, seed=7, n=3, max_tokens=16, ignore_eos=True)
            chunks = await collect(host, request("a", "the lazy dog " * 20, params))
            texts = [tuple(t for c in chunks if c.index == i for t in c.token_ids) for i in range(3)]
            assert [len(tokens) for tokens in texts] == [16, 16, 16]
            assert len(set(texts)) == 3
            assert sum(chunk.usage is not None for chunk in chunks) == 1
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 48
            again = await collect(host, request("b", "the lazy dog " * 20, params))
            assert [tuple(t for c in again if c.index == i for t in c.token_ids) for i in range(3)] == texts

    drive(scenario)


def test_a_conversation_is_rendered_by_the_template(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            talk = (Message(role="user", content="hello <|im_end|>"),)
            tokens = await host.tokenize(messages=talk)
            assert tokens.count(2) == 1, "the end token in the user's text is text"
            rendered = await host.detokenize(tokens)
            assert rendered == "<|im_start|>user\nhello <|im_end|><|im_end|>\n<|im_start|>assistant\n"
            chunks = await collect(host, Request(id="a", model="tiny", messages=talk, params=GREEDY))
            assert chunks[0].prompt_token_ids == tokens

    drive(scenario)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [({"kernels": "cuda"}, ConfigError, "cuda"), ({"kv_memory": "1KB"}, ConfigError, "kv_memory")],
)
def test_a_start_that_fails_says_why(
    tiny_model: Path, settings: dict[str, object], kind: type[HeadwayError], words: str
) -> None:
    async def scenario() -> None:
        with pytest.raises(kind, match=words):
            async with running(tiny_model, **settings):
                pass

    drive(scenario)


def test_a_start_that_fails_before_the_tokenizer_is_there_is_not_tried_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = EngineHost._open

    def slowly(host: EngineHost) -> tuple[Checkpoint, Tokenizer]:
        time.sleep(2.0)
        return opened(host)

    monkeypatch.setattr(EngineHost, "_open", slowly)

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="kv_memory"):
            async with running(tiny_model, kv_memory="1KB"):
                pass

    drive(scenario)
    assert caplog.records == []


def test_the_engine_process_leaves_when_its_parent_is_killed(tiny_model: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path; from headway.engine.host import EngineHost\n"
        "from headway.config import EngineConfig\n"
        "async def main():\n"
        f"    host = EngineHost(Path({str(tiny_model)!r}), 'tiny', EngineConfig(kv_memory='8MB'), threads=1)\n"
        "    await host.start(); print(host.engine_pid, flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environ) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{engine}").exists() and "Z" not in Path(f"/proc/{engine}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the engine process outlived its parent"
        time.sleep(0.05)


def promise(host: EngineHost, ttft_s: float, *, asked: bool = False) -> dict[str, Any]:
    return {"slo": Slo(ttft_s=ttft_s, ttft_asked=asked), "arrived": host._clock.now()}


def test_a_first_token_that_would_be_late_is_refused_on_arrival(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model, max_running=1) as host:
            stream = host.generate(request("long", params=LONG))
            await anext(stream)
            began = time.monotonic()
            with pytest.raises(Overloaded, match="were promised") as caught:
                await collect(host, request("late", **promise(host, 0.05)))
            assert time.monotonic() - began < 0.05
            assert caught.value.should_retry is None
            assert caught.value.retry_after_s is not None
            assert 0.05 <= caught.value.retry_after_s < 60.0
            assert host.load().wait_s >= 0.0
            await stream.aclose()
            await until(idle(host))
            assert await collect(host, request("fine", **promise(host, 5.0)))

    drive(scenario)


def test_a_target_that_the_prompt_alone_misses_is_refused_for_good(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            with pytest.raises(OutOfReach, match="alone") as caught:
                await collect(host, request("hasty", "the quick brown fox " * 40, **promise(host, 1e-6, asked=True)))
            assert caught.value.should_retry is False
            # A default is no reason to refuse a prompt that merely is long.
            assert await collect(host, request("default", "the quick brown fox " * 250, **promise(host, 0.06)))

    drive(scenario)


def test_the_last_steps_are_kept_and_a_trace_names_what_ran(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            await collect(host, request("before"))
            await until(lambda: bool(host._steps))
            assert not any(step.ran for step in await host.steps())
            stream = asyncio.create_task(collect(host, request("traced", params=LONG)))
            traced = [step for step in await host.steps(trace=5) if step.ran]
            assert len(traced) >= 5
            assert {name for step in traced for name, _, _ in step.ran} == {"traced"}
            assert all(step.predicted > 0.0 for step in traced)
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
            assert await host.steps(trace=3, patience_s=0.1)  # nothing runs: it does not wait for ever

    drive(scenario)


def test_a_repeated_prompt_is_predicted_as_cached(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            text = "the quick brown fox " * 60
            await collect(host, request("first", text))
            submit = await host._prepare(request("second", text))
            fresh = await host._prepare(request("other", "another beginning " + text))
            now = host._clock.now()
            assert host._forecast.verdict(submit, now).alone_s < 0.3 * host._forecast.verdict(fresh, now).alone_s

    drive(scenario)


def test_what_is_known_of_a_request_ends_with_it(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            await collect(host, request("whole"))
            stream = host.generate(request("cut", params=LONG))
            await anext(stream)
            assert set(host._forecast.jobs) == {"cut"}
            await stream.aclose()
            assert not host._forecast.jobs

    drive(scenario)
