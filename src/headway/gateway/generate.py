"""The two endpoints that generate: body to Call, Call through the stages, Chunks to the wire."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import aclosing
from typing import Final

import msgspec

from headway.config import Config
from headway.errors import ClientError, HeadwayError, InvalidRequest, Overloaded, RequestTimeout, TemplateError
from headway.gateway import fanout
from headway.gateway.deadline import promised, read_patience
from headway.gateway.decode import LARGE_BYTES
from headway.gateway.events import events_for
from headway.gateway.http import ClientGone, Exchange
from headway.gateway.lifeline import Lifeline
from headway.gateway.parse import Call, parse_chat, parse_completion
from headway.gateway.plain import answer, collect
from headway.gateway.stage import Next
from headway.gateway.stream import EventStream
from headway.telemetry.budget import Ledger, Ledgers
from headway.telemetry.metrics import Metrics
from headway.types import Backend

LONGEST_TENANT: Final = 128
GRACE_S: Final = 0.1
"""How long past a deadline the backend's own answer is awaited: it knows whether the request ever ran."""
_encode = msgspec.json.Encoder().encode


def internal_error(exchange: Exchange) -> HeadwayError:
    """Return what a caller may know of a fault of ours: the id to ask about."""
    return HeadwayError(f"internal error; request id {exchange.id}")


def _cause(error: Exception, lifeline: Lifeline) -> str:
    """Return why an answer was cut short; empty for a refusal, which is no fault and cuts nothing."""
    if isinstance(error, ClientGone):
        return lifeline.cause or "disconnect"
    if isinstance(error, RequestTimeout):
        return "deadline"
    return "" if isinstance(error, ClientError | Overloaded) else "error"


class Generation:
    """Serves /v1/chat/completions and /v1/completions."""

    def __init__(self, backend: Backend, config: Config, pipeline: Next, ledgers: Ledgers, metrics: Metrics) -> None:
        self._backend = backend
        self._config = config
        self._pipeline = pipeline
        self._ledgers = ledgers
        self._metrics = metrics

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        await self._serve(exchange, chat=True)

    async def completions(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        await self._serve(exchange, chat=False)

    async def _serve(self, exchange: Exchange, *, chat: bool) -> None:
        server = self._config.server
        raw = await exchange.read_body(limit_bytes=server.body_bytes, limit_s=server.body_s)
        exchange.ledger.end("accept")
        # Two requests may carry one x-request-id; ":" cannot be in a caller's id, so these are free.
        taken = self._ledgers.is_running(exchange.id)
        request_id = f"{exchange.id}:{secrets.token_hex(4)}" if taken else exchange.id
        self._ledgers.open(request_id, exchange.ledger)
        opened = [request_id]
        try:
            with exchange.ledger.stage("parse"):
                call = await self._parse(exchange, raw, request_id, chat=chat)
            del raw
            for request in call.requests:
                if request.id != request_id:
                    self._ledgers.open(request.id, exchange.ledger)
                    opened.append(request.id)
            exchange.model = call.model
            await self._run(exchange, call, request_id)
        except TemplateError as error:
            raise InvalidRequest(error.message, param="messages") from error
        finally:
            exchange.ledger.finish()
            for name in opened:
                self._ledgers.close(name, keep=name == request_id)
            self._account(exchange.ledger)

    async def _parse(self, exchange: Exchange, raw: bytes, request_id: str, *, chat: bool) -> Call:
        parse = parse_chat if chat else parse_completion
        cards, aliases, arrived = self._backend.models(), (self._config.model,), exchange.ledger.started

        def work() -> Call:
            return parse(raw, cards, aliases, request_id=request_id, arrived=arrived)

        call = await asyncio.to_thread(work) if len(raw) > LARGE_BYTES else work()
        patience = read_patience(exchange.headers, stream=call.stream, limit_s=self._config.server.request_s)
        tenant = self._tenant(exchange)
        requests = tuple(promised(request, patience, self._config.slo, tenant) for request in call.requests)
        return msgspec.structs.replace(call, requests=requests)

    def _tenant(self, exchange: Exchange) -> str:
        name = self._config.server.tenant_header.lower()
        return exchange.headers.get(name, "")[:LONGEST_TENANT] if name else ""

    async def _run(self, exchange: Exchange, call: Call, request_id: str) -> None:
        """Run the Call until its answer is written, its client is gone or its time is up."""
        deadline = call.requests[0].deadline
        lifeline = Lifeline(exchange.receive, exchange.clock, deadline, grace_s=GRACE_S)
        prefix = "chatcmpl-" if call.chat else "cmpl-"
        names = (prefix + request_id, int(time.time()))
        try:
            if call.stream:
                await self._stream(exchange, call, lifeline, *names)
            else:
                await self._plain(exchange, call, lifeline, *names)
        except Exception as error:
            cause = _cause(error, lifeline)
            self._settle(exchange.ledger, refused=not cause)
            if cause:
                exchange.cause = cause
                self._metrics.cancelled(self._phase(exchange.ledger), cause)
            raise

    async def _stream(self, exchange: Exchange, call: Call, lifeline: Lifeline, answer_id: str, created: int) -> None:
        events = events_for(call, answer_id=answer_id, created=created)
        stream = EventStream(exchange, events, lifeline, self._config.server, self._metrics)
        try:
            async with lifeline, aclosing(fanout.run(call, self._pipeline, self._backend)) as chunks:
                await stream.run(chunks)
            timing = exchange.ledger.to_json() if exchange.wants_timing else None
            await stream.end(usage=call.include_usage, timing=timing)
        except ClientGone:
            raise
        except TimeoutError:
            lifeline.cause = "slow_reader"
            raise ClientGone from None
        except Exception as error:
            if exchange.started:
                await stream.fail(error if isinstance(error, HeadwayError) else internal_error(exchange))
            raise

    async def _plain(self, exchange: Exchange, call: Call, lifeline: Lifeline, answer_id: str, created: int) -> None:
        ledger = exchange.ledger
        async with lifeline, aclosing(fanout.run(call, self._pipeline, self._backend)) as chunks:
            collected = await collect(chunks, len(call.requests) * call.params.n, ledger)
        body = answer(call, collected, answer_id=answer_id, created=created)
        if exchange.wants_timing:
            body.timing = ledger.to_json()
        await exchange.respond(_encode(body))

    def _settle(self, ledger: Ledger, *, refused: bool) -> None:
        """Give the time up to the cut an owner too: the stage that was under way."""
        if not ledger.dispatched or (ledger.spans and ledger.spans[-1].stage == "decode"):
            return
        if not ledger.answering and (refused or self._phase(ledger) == "queued"):
            ledger.end("queue")
        else:
            ledger.last_chunk()

    def _phase(self, ledger: Ledger) -> str:
        """Return where a request was when it was cut; before its first Chunk the engine's queue is the best hint."""
        if not ledger.dispatched:
            return "queued"
        if ledger.answering:
            return "decode"
        return "queued" if self._backend.load().waiting else "prefill"

    def _account(self, ledger: Ledger) -> None:
        """Enter a dispatched request into the metrics, whatever its end."""
        if not ledger.dispatched:
            return
        metrics = self._metrics
        for span in ledger.spans:
            metrics.stage(span.stage, span.end - span.start)
        if ledger.ttft is not None:
            metrics.ttft.observe(ledger.ttft)
            metrics.unattributed.observe(ledger.unattributed)
        if ledger.tpot is not None:
            metrics.per_output_token.observe(ledger.tpot)
        if ledger.finished is not None:
            metrics.request.observe(ledger.finished - ledger.started)
        metrics.tokens(prompt=ledger.prompt_tokens, output=ledger.tokens)
