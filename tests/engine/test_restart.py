"""The engine's host when a start goes wrong: one process at a time, tried until it works, never in silence."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from headway.config import EngineConfig
from headway.engine import host as module
from headway.engine.assembly import prepare
from headway.engine.host import START_ATTEMPTS, EngineHost
from headway.engine.launch_spec import EngineSpec
from headway.engine.process import EngineProcess
from headway.errors import EngineDied
from headway.types import Message, Request
from tests.engine.test_host import GREEDY, collect, drive, ids, request, running, until


def engines() -> list[int]:
    found = []
    for child in psutil.Process().children():
        try:
            if "headway.engine.worker" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def kill(host: EngineHost) -> None:
    assert host.engine_pid is not None
    os.kill(host.engine_pid, signal.SIGKILL)


def test_an_engine_that_cannot_start_is_tried_one_at_a_time_until_the_cause_is_gone(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.05)
    model = shutil.copytree(tiny_model, tmp_path / "model")
    weights, aside = model / "model.safetensors", model / "aside"

    async def scenario() -> None:
        async with running(model) as host:
            weights.rename(aside)
            kill(host)
            most = 0
            while host.health().live:
                most = max(most, len(engines()))
                await asyncio.sleep(0.01)
            assert most <= 1
            assert host.restarts == 0
            assert not host.health().ready
            with pytest.raises(EngineDied, match="does not start") as refused:
                await collect(host, request("meanwhile"))
            assert str(model) not in refused.value.message + host.health().reason
            aside.rename(weights)
            await until(lambda: host.health().ready, 10.0)
            assert len(engines()) == 1
            assert host.restarts == 1
            assert len(ids(await collect(host, request("after")))) == 24

    drive(scenario)


def test_an_engine_that_is_killed_in_every_start_comes_back_in_the_end(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.02)

    async def scenario() -> None:
        async with running(tiny_model) as host:
            last = None
            for _ in range(START_ATTEMPTS + 3):
                await until(lambda: host.engine_pid not in (None, last))  # noqa: B023
                last = host.engine_pid
                kill(host)
            await until(lambda: host.health().ready, 10.0)
            assert len(engines()) == 1
            assert len(ids(await collect(host, request("after")))) == 24

    drive(scenario)


def test_an_engine_that_hangs_in_its_start_is_replaced(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model, hang_s=0.2, kill_s=0.5) as host:
            first = host.engine_pid
            kill(host)
            await until(lambda: host.engine_pid not in (None, first), 10.0)
            second = host.engine_pid
            assert second is not None
            os.kill(second, signal.SIGSTOP)
            assert not host.health().ready
            await until(lambda: host.health().ready, 40.0)
            assert host.engine_pid != second

    drive(scenario)


def test_a_machine_that_cannot_spawn_is_a_failed_start_and_tried_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, refusals = EngineProcess.start, [OSError(11, "Resource temporarily unavailable")]

    async def sometimes(*arguments: Any) -> EngineProcess:
        if refusals:
            raise refusals.pop()
        return await spawn(*arguments)

    async def scenario() -> None:
        async with running(tiny_model) as host:
            monkeypatch.setattr(EngineProcess, "start", sometimes)
            kill(host)
            await until(lambda: host.restarts == 1, 10.0)
            assert len(ids(await collect(host, request("after")))) == 24

    drive(scenario)


def test_a_start_that_is_cancelled_leaves_no_child(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    async def never(**_: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(asyncio, "open_unix_connection", never)

    async def scenario() -> None:
        spec = EngineSpec(model=str(tiny_model), config=EngineConfig(), threads=1)
        start = asyncio.create_task(EngineProcess.start(spec, lambda _: None, lambda _: None))
        await until(lambda: bool(started), 10.0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert started[0].returncode is not None

    drive(scenario)


def test_a_stopped_engine_ends_with_its_parent(tiny_model: Path) -> None:
    """It cannot read that the socket is closed: the kernel has to end it."""
    from tests.server import serving

    with serving(tiny_model) as server:
        engine = psutil.Process(server.engine_pid())
        engine.suspend()
        server.process.kill()
        psutil.wait_procs([engine], 5)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "more",
    [
        {"messages": (Message(role="user", content=""),) * 1000},
        {"messages": (Message(role="user", content="x"),), "tools": ({"type": "function", "function": {"name": "f"}},)},
        {"messages": (Message(role="user", content="x" * 5000),)},
    ],
)
def test_what_takes_long_to_tokenise_leaves_the_event_loop(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    threads = []

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return prepare(*arguments)

    async def scenario() -> None:
        async with running(tiny_model) as host:
            monkeypatch.setattr(module, "prepare", noted)
            asked = Request(id="a", model="tiny", params=GREEDY, **more)
            await asyncio.gather(collect(host, asked), return_exceptions=True)  # too long for the context: no matter
            assert threads[0] is not threading.main_thread()

    drive(scenario)
