"""The gateway: every route, and the ordered list of stages that a request passes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headway.config import Config
from headway.errors import ClientError, HeadwayError, MethodNotAllowed, NotFound, Overloaded
from headway.gateway.admit import Admit
from headway.gateway.dispatch import Dispatch
from headway.gateway.endpoints import Endpoints, Steps, no_model_of
from headway.gateway.generate import Generation, internal_error
from headway.gateway.http import App, ClientGone, Exchange, Receive, Scope, Send
from headway.gateway.openapi import document
from headway.gateway.stage import Stage, compose
from headway.telemetry import log
from headway.telemetry.budget import Ledgers
from headway.telemetry.clock import Clock, MonotonicClock
from headway.telemetry.metrics import Metrics
from headway.types import Backend

Handler = Callable[[Exchange], Awaitable[None]]
_log = logging.getLogger(__name__)


class Gateway:
    """The HTTP side of one server; ``app`` is pure ASGI, so that disconnects and back-pressure reach it."""

    def __init__(
        self,
        backend: Backend,
        config: Config,
        *,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
        steps: Steps | None = None,
    ) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self.metrics = metrics or Metrics()
        self.metrics.follow(backend.load)
        self.running = 0
        """Exchanges whose answer is not complete."""
        ledgers = Ledgers(config.server.recent_requests)
        self._admit = Admit(
            backend,
            self._clock,
            ledgers,
            max_running=config.engine.max_running,
            max_waiting=config.engine.max_waiting,
        )
        # The request path, outermost first; the rest of telemetry.budget.ORDER has no stage of its own yet.
        self.stages: tuple[Stage, ...] = (
            self._admit,
            Dispatch(ledgers),
        )
        generation = Generation(backend, config, compose(self.stages, backend.generate), ledgers, self.metrics)
        points = Endpoints(backend, config, self._admit, ledgers, self.metrics, document, steps)
        self._routes: dict[str, dict[str, Handler]] = {
            "/": {"GET": points.page},
            "/v1/chat/completions": {"POST": generation.chat},
            "/v1/completions": {"POST": generation.completions},
            "/v1/models": {"GET": points.models},
            "/v1/embeddings": {"POST": no_model_of("embedding")},
            "/v1/rerank": {"POST": no_model_of("reranking")},
            "/v1/moderations": {"POST": no_model_of("moderation")},
            "/tokenize": {"POST": points.tokenize},
            "/detokenize": {"POST": points.detokenize},
            "/metrics": {"GET": points.metrics},
            "/health/live": {"GET": points.live},
            "/health/ready": {"GET": points.ready},
            "/health/load": {"GET": points.load},
            "/debug/steps": {"GET": points.steps},
            "/openapi.json": {"GET": points.openapi},
        }
        self._points = points

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._serve(scope, receive, send)

        # A function, because servers tell ASGI 3 from ASGI 2 by looking for one.
        self.app: App = app

    def start_drain(self) -> None:
        """Refuse new requests with 503 and fail readiness; what runs goes on."""
        self._admit.draining = True

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        exchange = Exchange(scope, receive, send, self._clock)
        self.running += 1
        try:
            await self._answer(exchange)
        finally:
            self.running -= 1
            if self._config.server.access_log:
                _access(exchange)

    async def _answer(self, exchange: Exchange) -> None:
        """Run the handler; whatever it raises becomes the one terminal event of the exchange."""
        try:
            await self._route(exchange)
        except ClientGone:
            # Nobody to answer: 499 is for the log only.
            exchange.status = 499
        except HeadwayError as error:
            exchange.cause = exchange.cause or error.code
            if isinstance(error, ClientError | Overloaded):
                self.metrics.refused(error.code)
            if not exchange.started:
                await exchange.refuse(error)
        except Exception:
            _log.exception("request %s failed", exchange.id)
            exchange.cause = "internal_error"
            if not exchange.started:
                await exchange.refuse(internal_error(exchange))

    async def _route(self, exchange: Exchange) -> None:
        path, method = exchange.path, exchange.method
        methods = self._routes.get(path) or self._named(path)
        if methods is None:
            raise NotFound(f"there is no {path[:200]!r} here; /openapi.json lists what is")
        handler = methods.get("GET" if method == "HEAD" else method)
        if handler is None:
            allowed = ", ".join(methods)
            error = MethodNotAllowed(f"{path[:200]} answers {allowed}, not {method[:20]}")
            self.metrics.refused(error.code)
            await exchange.refuse(error, headers=[(b"allow", allowed.encode())])
            return
        await handler(exchange)

    def _named(self, path: str) -> dict[str, Handler] | None:
        """Return the handlers of the two paths that hold a name (a model's may hold slashes)."""
        if path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/")
            return {"GET": lambda exchange: self._points.model(exchange, name)}
        if path.startswith("/v1/requests/") and path.endswith("/timing"):
            name = path.removeprefix("/v1/requests/").removesuffix("/timing")
            return {"GET": lambda exchange: self._points.timing(exchange, name)}
        return None


def create_app(backend: Backend, config: Config, *, clock: Clock | None = None, metrics: Metrics | None = None) -> App:
    """Return the ASGI application over a backend; ``Gateway`` gives the handles for draining and metrics too."""
    return Gateway(backend, config, clock=clock, metrics=metrics).app


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _access(exchange: Exchange) -> None:
    ledger = exchange.ledger
    fields: dict[str, Any] = {
        "id": exchange.id,
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status,
        "ms": round((exchange.clock.now() - ledger.started) * 1000, 3),
    }
    if exchange.model:
        fields["model"] = exchange.model
        fields |= {"prompt_tokens": ledger.prompt_tokens, "output_tokens": ledger.tokens}
        if ledger.ttft is not None:
            fields["ttft_ms"] = round(ledger.ttft * 1000, 3)
    if exchange.cause:
        fields["cause"] = exchange.cause
    log.access(**msgspec.to_builtins(fields))
