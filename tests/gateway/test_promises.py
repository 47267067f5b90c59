"""What a request is promised: by its headers, by its class; and what administrators see of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest

from headway.config import ClassConfig, Config, ServerConfig, SloConfig
from headway.errors import InvalidRequest
from headway.gateway.app import Gateway
from headway.gateway.deadline import Patience, promised, read_patience
from headway.types import Load, Request, Slo, StepReport
from tests.fakes import FakeBackend
from tests.gateway.conftest import Serve, chat

ASKED = Request(id="r", model="m", priority=2, arrived=100.0)


def test_a_class_promises_its_targets_and_moves_the_priority() -> None:
    found = promised(ASKED, Patience(slo_class="interactive"), SloConfig())
    assert found.slo == Slo(ttft_s=2.0, itl_s=0.1)
    assert found.priority == 1
    assert promised(ASKED, Patience(), SloConfig()).slo == Slo(ttft_s=30.0, itl_s=0.25)
    batch = promised(ASKED, Patience(slo_class="batch"), SloConfig())
    assert (batch.slo, batch.priority) == (Slo(), 12)


def test_what_the_caller_asked_for_goes_before_the_class() -> None:
    patience = Patience(ttft_s=0.5, total_s=3.0, slo_class="batch")
    found = promised(ASKED, patience, SloConfig())
    assert found.slo == Slo(ttft_s=0.5, ttft_asked=True)
    assert found.deadline == 103.0


def test_the_configured_default_class_counts() -> None:
    config = SloConfig(default="batch", batch=ClassConfig(ttft_s=7.0))
    assert promised(ASKED, Patience(), config).slo.ttft_s == 7.0


@pytest.mark.parametrize("value", ["fast", "standard,batch", "\x00", "x" * 5000])
def test_an_unknown_class_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-slo-class") as caught:
        read_patience({"x-slo-class": value}, stream=True, limit_s=None)
    assert caught.value.param == "x-slo-class"
    assert "interactive, standard, batch" in caught.value.message


def test_class_and_tenant_reach_the_backend_over_http(serve: Serve) -> None:
    server = serve(tenant_header="X-Tenant")
    server.post(chat(), headers={"x-slo-class": "Interactive", "x-tenant": "acme"})
    request = server.backend.requests[0]
    assert (request.slo.ttft_s, request.tenant) == (2.0, "acme")
    assert server.post(chat(), headers={"x-slo-class": "fast"}).status_code == 400


def test_a_tenant_header_that_is_not_configured_means_nothing(serve: Serve) -> None:
    server = serve()
    server.post(chat(), headers={"x-tenant": "acme"})
    assert server.backend.requests[0].tenant == ""


def test_load_says_when_a_newcomer_would_wait_longer_than_promised(serve: Serve) -> None:
    backend = FakeBackend()
    server = serve(backend)
    assert server.get("/health/load").json()["overloaded"] is False
    backend.load_now = Load(wait_s=31.0)
    found = server.get("/health/load").json()
    assert found["overloaded"] is True
    assert found["wait_s"] == 31.0


def steps_of(count: int, traced: int) -> tuple[StepReport, ...]:
    return tuple(
        StepReport(
            started=float(i),
            seconds=0.02,
            predicted=0.025,
            decode_rows=i,
            prefill_tokens=3,
            context_tokens=40,
            prefill_pairs=0,
            sampled=i,
            ran=(("a", 0, 1),) if i >= count - traced else (),
        )
        for i in range(count)
    )


async def get(path: str, config: Config, *, with_steps: bool = True) -> httpx.Response:
    async def steps(trace: int) -> Sequence[StepReport]:
        return steps_of(10, trace)

    gateway = Gateway(FakeBackend(), config, steps=steps if with_steps else None)
    transport = httpx.ASGITransport(app=gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.get(path)


def test_the_last_steps_are_shown_with_what_was_predicted() -> None:
    found = asyncio.run(get("/debug/steps?last=2", Config())).json()
    assert [step["decode_rows"] for step in found["steps"]] == [8, 9]
    assert found["steps"][0]["took_ms"] == 20.0
    assert found["steps"][0]["predicted_ms"] == 25.0
    assert found["median_error"] == pytest.approx(0.25)
    assert "ran" not in found["steps"][0]
    assert asyncio.run(get("/debug/steps?last=0", Config())).json() == {"steps": [], "median_error": None}


def test_a_trace_names_what_ran() -> None:
    found = asyncio.run(get("/debug/steps?trace=3", Config())).json()
    assert [step["ran"] for step in found["steps"]] == [[{"id": "a", "choice": 0, "tokens": 1}]] * 3


@pytest.mark.parametrize("query", ["last=-1", "last=x", "trace=1001", "last=", "trace=99999999999999", "last=1.5"])
def test_nonsense_about_steps_is_refused(query: str) -> None:
    answer = asyncio.run(get(f"/debug/steps?{query}", Config()))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("last", "trace")


def test_steps_are_for_administrators() -> None:
    open_to_all = Config(server=ServerConfig(host="0.0.0.0"))
    assert asyncio.run(get("/debug/steps", open_to_all)).status_code == 403
    assert asyncio.run(get("/debug/steps", Config(server=ServerConfig(host="::1")))).status_code == 200
    assert asyncio.run(get("/debug/steps", Config(server=ServerConfig(host="localhost")))).status_code == 200
    assert asyncio.run(get("/debug/steps", Config(), with_steps=False)).status_code == 404


def test_a_backend_that_predicts_says_when_to_come_back(serve: Serve) -> None:
    backend = FakeBackend()
    server = serve(backend, max_waiting=1)
    backend.load_now = Load(waiting=1, wait_s=4.0)
    answer = server.post(chat())
    assert answer.status_code == 503
    assert 4 <= int(answer.headers["retry-after"]) <= 5
