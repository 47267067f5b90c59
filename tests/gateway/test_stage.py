"""Stages: order, rewriting, refusing, and closing all the way down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import pytest

from headway.config import Config
from headway.errors import InvalidRequest
from headway.gateway.admit import Admit
from headway.gateway.app import Gateway
from headway.gateway.dispatch import Dispatch
from headway.gateway.stage import Next, Stage, compose
from headway.telemetry.budget import ORDER, Ledger, Ledgers
from headway.telemetry.clock import FakeClock
from headway.types import Chunk, Request
from tests.fakes import FakeBackend

REQUEST = Request(id="r", model="m", text="x")


class Mark:
    """Writes its name into the request on the way in, and into the Chunks on the way out."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def __call__(self, request: Request, then: Next) -> AsyncGenerator[Chunk, None]:
        """Yield marked Chunks."""
        async with aclosing(then(msgspec.structs.replace(request, text=f"{request.text}>{self.name}"))) as chunks:
            async for chunk in chunks:
                yield msgspec.structs.replace(chunk, text=f"{chunk.text}<{self.name}")


async def read(pipeline: Next) -> list[str]:
    """Return the texts of an answer."""
    return [chunk.text async for chunk in pipeline(REQUEST)]


def test_the_first_stage_is_the_outermost() -> None:
    backend = FakeBackend(("t",))
    stages: list[Stage] = [Mark("a"), Mark("b")]
    assert asyncio.run(read(compose(stages, backend.generate))) == ["t<b<a"]
    assert backend.requests[0].text == "x>a>b"


def test_no_stage_is_the_backend_itself() -> None:
    assert asyncio.run(read(compose([], FakeBackend(("t",)).generate))) == ["t"]


def test_a_stage_refuses_by_raising() -> None:
    class Refuse(Mark):
        async def __call__(self, request: Request, then: Next) -> AsyncGenerator[Chunk, None]:
            if request:
                raise InvalidRequest("no")
            yield Chunk()

    backend = FakeBackend()
    with pytest.raises(InvalidRequest):
        asyncio.run(read(compose([Mark("a"), Refuse("b")], backend.generate)))
    assert backend.requests == []


def test_closing_the_outermost_closes_the_backend_at_once() -> None:
    clock, ledgers, backend = FakeClock(), Ledgers(4), FakeBackend(["t"] * 9)
    ledgers.open("r", Ledger(clock))
    admit = Admit(backend, clock, ledgers, max_running=4, max_waiting=4)
    pipeline = compose([admit, Dispatch(ledgers)], backend.generate)

    async def run() -> None:
        chunks = pipeline(REQUEST)
        await anext(chunks)
        assert (backend.running, admit.admitted) == (1, 1)
        await chunks.aclose()
        assert (backend.running, admit.admitted) == (0, 0)

    asyncio.run(run())
    assert backend.cancelled == {"r": "decode"}


def test_stages_are_named_after_the_path_and_run_in_its_order() -> None:
    gateway = Gateway(FakeBackend(), Config())
    places = [ORDER.index(stage.name) for stage in gateway.stages]
    assert places == sorted(places)
