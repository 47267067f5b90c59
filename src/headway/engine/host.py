"""The engine as a Backend: tokenises and assembles text here, runs the model in a process of its own, restarts it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import msgspec

from headway.config import EngineConfig
from headway.engine.assembly import Assembly, Limits, prepare
from headway.engine.forecast import Forecast, Verdict
from headway.engine.launch_spec import EngineSpec
from headway.engine.messages import (
    Abort,
    AbortWaiting,
    Emitted,
    Failed,
    FromEngine,
    Refused,
    Started,
    Status,
    Submit,
    Trace,
)
from headway.engine.oversize import refuse_oversize
from headway.engine.process import EngineProcess
from headway.engine.tokenizer import Tokenizer, load_tokenizer
from headway.errors import (
    EngineDied,
    HeadwayError,
    InvalidRequest,
    OutOfReach,
    Overloaded,
    error_of,
)
from headway.models.checkpoint import Checkpoint, open_checkpoint
from headway.telemetry.clock import Clock, MonotonicClock
from headway.types import Chunk, Health, JsonObject, Load, Message, ModelCard, Request, StepReport

log = logging.getLogger("headway.engine")

LONG_TEXT = 4_000
"""Characters from which tokenising leaves the event loop for a thread."""
MANY_MESSAGES = 64
"""Messages from which rendering leaves the event loop too, however short they are."""
SHORTEST_RETRY_S = 0.05
WAIT_FRESH_S = 0.1
START_ATTEMPTS = 3
"""Starts that may fail in a row before the engine counts as dead; it is still tried again, in case the cause goes."""
LONGEST_PAUSE_S = 10.0
KEPT_STEPS = 1024
"""Reports of the last steps that are kept for whoever asks what the engine did."""
START_PATIENCE = 3
"""A starting engine may be silent this many times ``kill_s``: its imports come before its first beat."""


class _Active:
    """One request between ``generate`` and the engine."""

    def __init__(self, submit: Submit, assembly: Assembly) -> None:
        self.submit = submit
        self.assembly = assembly
        self.queue: asyncio.Queue[Chunk | HeadwayError] = asyncio.Queue()
        self.retried = False
        self.cause = "disconnect"
        """Why it is aborted, when its reader goes away before the end."""


class EngineHost:
    """A Backend over an engine process."""

    def __init__(
        self,
        path: Path,
        name: str,
        config: EngineConfig,
        *,
        threads: int,
        clock: Clock | None = None,
        on_status: Callable[[Status], None] | None = None,
    ) -> None:
        self._spec = EngineSpec(model=str(path), config=config, threads=threads)
        self._path = path
        self._name = name
        self._config = config
        self._clock = clock or MonotonicClock()
        self._on_status = on_status
        self._active: dict[str, _Active] = {}
        self._forecast = Forecast(
            max_running=config.max_running, step_tokens=config.step_tokens, longest_step_s=config.longest_step_s
        )
        self._steps: deque[StepReport] = deque(maxlen=KEPT_STEPS)
        self._process: EngineProcess | None = None
        self._tokenizer: Tokenizer | None = None
        self._checkpoint: Checkpoint | None = None
        self.started: Started | None = None
        self._start_result: asyncio.Future[Started] | None = None
        self._start_error: HeadwayError | None = None
        """What a starting engine said that it fails with; it counts when the process is gone."""
        self._load = Load()
        self._wait_s, self._wait_at = 0.0, -1.0
        self._beat = 0.0
        self._busy_since: float | None = None
        self._draining = False
        self._closed = False
        self._reason = "starting"
        self._failures = 0
        self.restarts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._created = int(time.time())

    # Start and end

    async def start(self) -> None:
        """Load the tokenizer here while the engine process loads the weights; returns when it can answer."""
        launching = asyncio.create_task(self._spawn())
        self._keep(self._watch())
        try:
            self._checkpoint, self._tokenizer = await asyncio.to_thread(self._open)
            await launching
        except BaseException:
            launching.cancel()
            await asyncio.gather(launching, return_exceptions=True)
            await self.close()
            raise

    def _open(self) -> tuple[Checkpoint, Tokenizer]:
        checkpoint = open_checkpoint(self._path)
        return checkpoint, load_tokenizer(checkpoint)

    async def _spawn(self) -> None:
        """Start a process and wait until it is ready; raises what it failed with, once it is gone."""
        self._start_result = asyncio.get_running_loop().create_future()
        self._start_error = None
        self._beat = self._clock.now()
        try:
            self._process = await EngineProcess.start(self._spec, self._receive, self._ended)
        except OSError as error:  # no memory, no process or no file descriptor left
            raise EngineDied(f"the engine process cannot be started: {error.strerror or error}") from error
        self.started = await self._start_result
        self._forecast.started(self.started.block_tokens, self.started.n_blocks)
        self._failures = 0
        self._reason = ""

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, end the waiting ones, let the running ones finish up to the limit."""
        self._draining = True
        self._reason = "draining"
        self._send(AbortWaiting())
        deadline = self._clock.now() + limit_s
        while self._active and self._clock.now() < deadline:  # noqa: ASYNC110 - once, at the end of a life
            await asyncio.sleep(0.02)
        for active in list(self._active.values()):
            active.cause = "drain"
            active.queue.put_nowait(Overloaded("the server is shutting down", retry_after_s=5.0))

    async def close(self) -> None:
        """Stop at once and give everything back."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None:
            await self._process.stop()
            self._process = None
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None

    # Backend

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield the answer's Chunks; closing the generator cancels the request in any phase."""
        self._refuse_if_unable()
        submit = await self._prepare(request)
        # Meanwhile the engine may have died, or the server begun to drain.
        self._refuse_if_unable()
        if submit.id in self._active:
            raise InvalidRequest(f"a request with id {request.id!r} is running; use another x-request-id")
        submit, verdict = self._admit(request, submit)
        active = _Active(submit, Assembly(request, submit, self._tokens))
        self._active[submit.id] = active
        self._forecast.submitted(submit, self._clock.now(), verdict)
        try:
            self._send(submit)
            while not (active.assembly.done and active.queue.empty()):
                item = await active.queue.get()
                if isinstance(item, HeadwayError):
                    raise item
                yield item
        finally:
            self._active.pop(submit.id, None)
            self._forecast.ended(submit.id, whole=active.assembly.done)
            if not active.assembly.done:
                self._send(Abort(id=submit.id, cause=active.cause, since=self._clock.now()))

    async def cancel(self, request_id: str, cause: str) -> None:
        """End a request from outside; its reader sees the end of the stream as an error."""
        active = self._active.get(request_id)
        if active is not None:
            active.cause = cause
            active.queue.put_nowait(EngineDied(f"the request was cancelled: {cause}"))

    async def tokenize(
        self,
        *,
        text: str | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[JsonObject] = (),
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """Return the ids of a text, or of a conversation rendered by the chat template."""
        tokens = self._tokens
        if messages is not None:
            return tuple(await asyncio.to_thread(tokens.encode_chat, messages, tools, add_generation_prompt))
        wanted = text or ""

        def encode() -> tuple[int, ...]:
            return tuple(tokens.encode(wanted, add_special_tokens=add_special_tokens, allow_special=True))

        return await asyncio.to_thread(encode) if len(wanted) > LONG_TEXT else encode()

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens included."""
        size = self._tokens.vocabulary_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise InvalidRequest(f"token id {token_id} is outside the vocabulary 0..{size - 1}", param="tokens")
        return await asyncio.to_thread(self._tokens.decode, list(token_ids))

    def models(self) -> tuple[ModelCard, ...]:
        """Return the one model."""
        assert self._checkpoint is not None
        shape = self._checkpoint.config
        return (
            ModelCard(
                name=self._name,
                context_tokens=self._limits().context_tokens,
                vocabulary=shape.vocabulary,
                has_chat_template=self._tokens.chat is not None,
                created=self._created,
                architecture=shape.architecture,
                kernels=self.started.kernels if self.started else "",
            ),
        )

    def load(self) -> Load:
        """Return the engine's newest report, with what is predicted from it now."""
        now = self._clock.now()
        if now - self._wait_at > WAIT_FRESH_S:  # playing a long queue forward is not free
            self._wait_s, self._wait_at = self._forecast.wait_s(), now
        return msgspec.structs.replace(
            self._load,
            backlog_tokens=self._forecast.backlog_tokens(),
            wait_s=self._wait_s,
            step_error=self._forecast.cost.error,
        )

    async def steps(self, trace: int = 0, patience_s: float = 5.0) -> tuple[StepReport, ...]:
        """Return the last steps; with ``trace``, wait for so many to run that name what was in them."""
        if trace:
            self._send(Trace(steps=trace))
            until = self._clock.now() + patience_s
            while sum(bool(step.ran) for step in self._steps) < trace and self._clock.now() < until:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return tuple(self._steps)

    def health(self) -> Health:
        """Live: the process beats and its step is not stuck. Ready: started, not draining."""
        if self._closed or self._failures >= START_ATTEMPTS:
            return Health(live=False, ready=False, reason=self._reason or "closed")
        silent = self._hung()
        if silent:
            return Health(live=False, ready=False, reason=silent)
        return Health(live=True, ready=not self._reason, reason=self._reason)

    # Inside

    @property
    def _tokens(self) -> Tokenizer:
        assert self._tokenizer is not None, "start() has not returned"
        return self._tokenizer

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id, for tests and operators."""
        return self._process.pid if self._process else None

    def _limits(self) -> Limits:
        started = self.started
        if started is None:
            assert self._checkpoint is not None
            shape = self._checkpoint.config
            return Limits(context_tokens=shape.context, capacity_tokens=1 << 62, vocabulary=shape.vocabulary)
        return Limits(started.context_tokens, started.n_blocks * started.block_tokens, started.vocabulary)

    async def _prepare(self, request: Request) -> Submit:
        """Tokenise; long texts and conversations do it on a thread, so that streams go on."""
        if _is_long(request):
            tokens, limits = self._tokens, self._limits()

            def work() -> Submit:
                refuse_oversize(request, tokens, limits)
                return prepare(request, tokens, limits)

            return await asyncio.to_thread(work)
        return prepare(request, self._tokens, self._limits())

    def _refuse_if_unable(self) -> None:
        if self._draining or self._closed:
            raise Overloaded("the server is shutting down; send the request to another one", retry_after_s=5.0)
        if self._failures >= START_ATTEMPTS:
            raise EngineDied(self._reason)
        if self._process is None or self.started is None:
            raise Overloaded("the engine is starting", retry_after_s=2.0)

    def _admit(self, request: Request, submit: Submit) -> tuple[Submit, Verdict | None]:
        """Set when the first token is due, and refuse what would be late, or would make others late, on arrival."""
        if submit.ttft_by is None:
            return submit, None
        now, due = self._clock.now(), submit.ttft_by
        if not request.slo.ttft_asked:
            # A default is meant for short prompts: a long one would never be answered.
            due += 2.0 * self._forecast.alone_s(submit)
            submit = msgspec.structs.replace(submit, ttft_by=due)
        verdict = self._forecast.verdict(submit, now)
        if verdict.late_by_s <= 0.0:
            return submit, verdict
        target_ms = 1e3 * (due - request.arrived)
        if verdict.alone_s > due - now:
            raise OutOfReach(
                f"the prompt of {len(submit.token_ids)} tokens takes {1e3 * verdict.alone_s:.0f} ms alone; it cannot "
                f"have its first token within {target_ms:.0f} ms: ask for more, or send less"
            )
        raise Overloaded(
            f"the first token would come in {1e3 * verdict.first_token_s:.0f} ms; {target_ms:.0f} ms were promised",
            retry_after_s=max(SHORTEST_RETRY_S, verdict.retry_s),
        )

    def _send(self, *messages: Submit | Abort | AbortWaiting | Trace) -> None:
        if self._process is not None:
            self._process.send(*messages)

    def _keep(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _receive(self, messages: list[FromEngine]) -> None:
        """Sort a frame of messages to their requests; runs on the event loop, never waits."""
        self._beat = self._clock.now()
        for message in messages:
            match message:
                case Emitted():
                    self._deliver(message)
                case Refused():
                    active = self._active.get(message.id)
                    if active is not None:
                        active.assembly.done = True  # the engine holds nothing of it any more
                        active.queue.put_nowait(error_of(message.code, message.message, message.retry_after_s))
                case Status():
                    self._load = message.load
                    self._busy_since = message.busy_since
                    self._steps.extend(message.steps)
                    if message.outlook is not None:
                        self._forecast.heard(message.outlook)
                    if self._on_status is not None:
                        self._on_status(message)
                case Started():
                    if self._start_result is not None and not self._start_result.done():
                        self._start_result.set_result(message)
                case Failed():
                    self._start_error = error_of(message.code, message.message)

    def _deliver(self, emitted: Emitted) -> None:
        active = self._active.get(emitted.id)
        if active is None:
            return
        if emitted.index == 0:
            self._forecast.answered(emitted.id, len(emitted.token_ids), self._clock.now())
        try:
            chunks, aborts = active.assembly.feed(emitted)
        except Exception:  # one broken request must not end the reader of all
            log.exception("assembling the answer of %s failed", emitted.id)
            active.queue.put_nowait(EngineDied("assembling the answer failed; the log has the details"))
            return
        for chunk in chunks:
            active.queue.put_nowait(chunk)
        if aborts:
            self._send(*aborts)

    def _hung(self) -> str:
        """Return why the engine counts as hung, or an empty text."""
        now = self._clock.now()
        if self._process is None:
            return ""
        if now - self._beat > self._config.hang_s and self.started is not None:
            return f"the engine has been silent for {now - self._beat:.1f} s"
        if self._busy_since is not None and now - self._busy_since > self._config.step_limit_s:
            return f"a step has been running for {now - self._busy_since:.1f} s"
        return ""

    async def _watch(self) -> None:
        """Kill an engine that stays hung, also while it starts; its end starts a new one."""
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            now = self._clock.now()
            # After a failed start the next one gets more time: a machine may just be slow.
            patience_s = self._config.kill_s * (START_PATIENCE * (1 + self._failures) if self.started is None else 1)
            stuck = self._busy_since is not None and now - self._busy_since > self._config.step_limit_s
            if self._process is not None and (now - self._beat > patience_s or stuck):
                log.error("killing the hung engine: %s", self._hung() or "silent while it starts")
                self._process.kill()

    def _ended(self, code: int | None) -> None:
        """The process is gone: end what cannot be repeated, keep what had delivered nothing, start again."""
        self._process = None
        self.started = None
        self._busy_since = None
        self._load = Load()
        result = self._start_result
        if result is not None and not result.done():
            died = EngineDied(f"the engine process ended at its start with status {code}")
            result.set_exception(self._start_error or died)
            return
        if self._closed or (result is not None and result.cancelled()):
            return  # nobody wants it back: whoever asked for this start has been told why it failed
        log.error("the engine process ended with status %s; starting it again", code)
        self._reason = "the engine is starting again"
        for active in list(self._active.values()):
            if active.assembly.fed or active.retried:
                active.assembly.done = True
                active.queue.put_nowait(EngineDied("the engine process ended while it answered this request"))
        self._keep(self._restart())

    async def _restart(self) -> None:
        """Bring the engine back, with growing pauses, and repeat the requests that it had not begun to answer."""
        while not self._closed:
            try:
                await self._spawn()
                break
            except HeadwayError as error:
                self._failures += 1
                # The error may name files of this machine: the log's readers may know, callers need not.
                self._reason = "the engine does not start; the server's log says why"
                log.error("the engine did not start again (attempt %d): %s", self._failures, error.message)
                if self._failures >= START_ATTEMPTS:
                    self._fail_all(EngineDied(self._reason))
                await asyncio.sleep(min(0.5 * self._failures, LONGEST_PAUSE_S))
        self.restarts += 1
        if self._draining:
            self._reason = "draining"
        for active in list(self._active.values()):
            if not active.retried and not active.assembly.done:
                active.retried = True
                self._send(active.submit)

    def _fail_all(self, error: HeadwayError) -> None:
        for active in list(self._active.values()):
            active.assembly.done = True
            active.queue.put_nowait(error)


def _is_long(request: Request) -> bool:
    """Whether making a request's tokens takes long enough to do it on a thread."""
    messages = request.messages or ()
    if request.tools or len(messages) > MANY_MESSAGES or len(request.text or "") > LONG_TEXT:
        return True
    calls = (call for message in messages for call in message.tool_calls)
    size = sum(len(message.content or "") for message in messages) + sum(len(call.arguments) for call in calls)
    return size > LONG_TEXT
