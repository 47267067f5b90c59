"""The endpoints that do not generate: models, tokens, health, load, metrics, timing."""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from headway.config import Config
from headway.errors import InvalidRequest, ModelNotFound, NotFound, PermissionDenied, TemplateError
from headway.gateway.admit import Admit
from headway.gateway.decode import decode_off_loop
from headway.gateway.http import Exchange
from headway.gateway.openai import DetokenizeBody, TokenizeBody
from headway.gateway.parse import find_model, messages, tools
from headway.gateway.wire import Detokenized, ModelList, Tokens, model_body
from headway.telemetry.budget import Ledgers
from headway.telemetry.metrics import CONTENT_TYPE, Metrics
from headway.types import Backend, StepReport

MOST_STEPS: Final = 1000


Steps = Callable[[int], Awaitable[Sequence[StepReport]]]
"""Returns the last steps; waits for so many that are traced."""

PAGE: Final = b"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>headway</title>
<h1>headway</h1>
<p>Serves language models with a latency you can predict, account for and prove.</p>
<ul>
<li><a href="/v1/models">Models</a>
<li><a href="/health/ready">Health</a>, <a href="/health/load">load</a>
<li><a href="/metrics">Metrics</a>
<li><a href="/openapi.json">OpenAPI description</a>
</ul>
</html>
"""


class Endpoints:
    """Answers from what the backend says of itself."""

    def __init__(
        self,
        backend: Backend,
        config: Config,
        admit: Admit,
        ledgers: Ledgers,
        metrics: Metrics,
        openapi: Callable[[], bytes],
        steps: Steps | None = None,
    ) -> None:
        self._backend = backend
        self._config = config
        self._admit = admit
        self._ledgers = ledgers
        self._metrics = metrics
        self._openapi = openapi
        self._steps = steps

    async def page(self, exchange: Exchange) -> None:
        """GET /."""
        await exchange.respond(PAGE, kind=b"text/html; charset=utf-8")

    async def openapi(self, exchange: Exchange) -> None:
        """GET /openapi.json."""
        await exchange.respond(self._openapi())

    async def metrics(self, exchange: Exchange) -> None:
        """GET /metrics."""
        await exchange.respond(self._metrics.render(), kind=CONTENT_TYPE.encode())

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        await exchange.respond_json(ModelList(data=[model_body(card) for card in self._backend.models()]))

    async def model(self, exchange: Exchange, name: str) -> None:
        """GET /v1/models/{id}."""
        card = find_model(name, self._backend.models(), (self._config.model,))
        await exchange.respond_json(model_body(card))

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize."""
        body = await decode_off_loop(await self._body(exchange), TokenizeBody)
        card = find_model(body.model, self._backend.models(), (self._config.model,))
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is required", param="prompt")
        try:
            ids = await self._backend.tokenize(
                text=body.prompt,
                messages=None if body.messages is None else messages(body.messages),
                tools=tools(body.tools),
                add_special_tokens=body.add_special_tokens is not False,
                add_generation_prompt=body.add_generation_prompt is not False,
            )
        except TemplateError as error:
            raise InvalidRequest(error.message, param="messages") from error
        await exchange.respond_json(Tokens(count=len(ids), max_model_len=card.context_tokens, tokens=ids))

    async def detokenize(self, exchange: Exchange) -> None:
        """POST /detokenize."""
        body = await decode_off_loop(await self._body(exchange), DetokenizeBody)
        card = find_model(body.model, self._backend.models(), (self._config.model,))
        largest = max(body.tokens, default=0)
        if largest >= card.vocabulary:
            raise InvalidRequest(
                f"tokens holds {largest}: a token id must be from 0 to {card.vocabulary - 1}", param="tokens"
            )
        await exchange.respond_json(Detokenized(prompt=await self._backend.detokenize(body.tokens)))

    async def _body(self, exchange: Exchange) -> bytes:
        server = self._config.server
        return await exchange.read_body(limit_bytes=server.body_bytes, limit_s=server.body_s)

    async def timing(self, exchange: Exchange, name: str) -> None:
        """GET /v1/requests/{id}/timing; an answer's own id is understood too."""
        request_id = name.removeprefix("chatcmpl-").removeprefix("cmpl-")
        ledger = self._ledgers.get(request_id) or self._ledgers.get(name)
        if ledger is None:
            raise NotFound(
                f"no timing of request {name[:140]!r}: it is unknown, or older than the last "
                f"{self._config.server.recent_requests} requests"
            )
        await exchange.respond_json({"id": request_id, **ledger.to_json()})

    async def live(self, exchange: Exchange) -> None:
        """GET /health/live: 503 when the engine's steps do not advance."""
        health = self._backend.health()
        await self._health(exchange, "live", health.live, health.reason)

    async def ready(self, exchange: Exchange) -> None:
        """GET /health/ready: 503 when a request sent now would not be run."""
        health = self._backend.health()
        draining = self._admit.draining
        reason = "draining" if draining else health.reason
        await self._health(exchange, "ready", health.ready and not draining, reason)

    async def _health(self, exchange: Exchange, name: str, good: bool, reason: str) -> None:
        body: dict[str, Any] = {name: good, "reason": "" if good else reason}
        await exchange.respond(msgspec.json.encode(body), status=200 if good else 503)

    async def load(self, exchange: Exchange) -> None:
        """GET /health/load."""
        await exchange.respond_json(
            {
                **msgspec.to_builtins(self._backend.load()),
                "admitted": self._admit.admitted,
                "predicted_wait_ms": round(self._admit.predicted_wait_s() * 1000) if self._admit.waiting() else 0,
                "overloaded": self._overloaded(),
                "draining": self._admit.draining,
            }
        )

    def _overloaded(self) -> bool:
        """Whether a request of the default class would wait longer than it is promised."""
        promised = self._config.slo.of(self._config.slo.default).ttft_s
        full = self._admit.waiting() >= self._config.engine.max_waiting
        return full or (promised is not None and self._backend.load().wait_s > promised)

    async def steps(self, exchange: Exchange) -> None:
        """GET /debug/steps: the engine's last steps; ``trace=N`` waits for the next N, and names what ran in them."""
        if not _is_loopback(self._config.server.host):
            raise PermissionDenied("/debug/steps is for administrators: it answers only where headway is on loopback")
        if self._steps is None:
            raise NotFound("the backend has no steps of its own to show")
        last = _whole(exchange.query, "last", 100)
        trace = _whole(exchange.query, "trace", 0)
        reports = await self._steps(trace)
        shown = [step for step in reports if step.ran][-trace:] if trace else reports[len(reports) - last :]
        await exchange.respond_json(
            {
                "steps": [_step_json(step) for step in shown],
                "median_error": statistics.median(map(_error, shown)) if shown else None,
            }
        )


def _error(step: StepReport) -> float:
    return abs(step.predicted - step.seconds) / max(step.seconds, 1e-9)


def _step_json(step: StepReport) -> dict[str, Any]:
    row: dict[str, Any] = {
        "started": step.started,
        "took_ms": round(1e3 * step.seconds, 3),
        "predicted_ms": round(1e3 * step.predicted, 3),
        "decode_rows": step.decode_rows,
        "prefill_tokens": step.prefill_tokens,
        "context_tokens": step.context_tokens,
        "sampled": step.sampled,
    }
    if step.ran:
        row["ran"] = [{"id": name, "choice": choice, "tokens": tokens} for name, choice, tokens in step.ran]
    return row


def _whole(query: str, name: str, default: int) -> int:
    """Return a number of the query; InvalidRequest names one that is none, or more than is kept."""
    text = parse_qs(query, keep_blank_values=True).get(name, [str(default)])[-1]
    if not text.isascii() or not text.isdecimal() or not 0 <= int(text[:9]) <= MOST_STEPS:
        raise InvalidRequest(f"{name}={text[:40]!r} must be a number from 0 to {MOST_STEPS}", param=name)
    return int(text)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def no_model_of(kind: str) -> Callable[[Exchange], Any]:
    """Return the answer of an endpoint whose kind of model is not served."""

    async def refuse(exchange: Exchange) -> None:
        raise ModelNotFound(f"no {kind} model is served here; /v1/models lists what is", param="model")

    return refuse
