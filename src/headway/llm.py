"""The offline API: the same engine without a server, in this process.

>>> llm = LLM("smollm2-135m")                                          # doctest: +SKIP
>>> llm.generate("The capital of France is", max_tokens=8)[0].text     # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from headway.config import EngineConfig, environment
from headway.engine.assembly import Assembly, Limits, prepare
from headway.engine.launch import launch
from headway.engine.launch_spec import EngineSpec
from headway.engine.messages import Abort, Emitted, Refused
from headway.engine.tokenizer import Tokenizer, load_tokenizer
from headway.errors import InvalidRequest, error_of
from headway.kernels.machine import usable_threads
from headway.models.checkpoint import open_checkpoint
from headway.models.pull import obtain
from headway.telemetry.clock import MonotonicClock
from headway.types import Chunk, EngineTiming, Finish, Message, Params, Request, TokenLogprob, Usage

Prompt = str | Sequence[int] | Sequence[Message]


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One whole answer."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish: Finish
    usage: Usage
    timing: EngineTiming
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probability of a text under the model, each token given those before it (the first has none)."""

    n_tokens: int
    sum_logprob: float
    perplexity: float


class LLM:
    """A model loaded into this process; not thread-safe."""

    def __init__(self, model: str = "smollm2-135m", *, config: EngineConfig | None = None, **settings: Any) -> None:
        """Load a model; ``settings`` are fields of ``EngineConfig`` such as ``threads=2`` or ``kv_memory="1GiB"``."""
        self.config = msgspec.convert({**msgspec.structs.asdict(config or EngineConfig()), **settings}, EngineConfig)
        self.path: Path = obtain(model, environment())
        self.name = model
        threads = self.config.threads or usable_threads().value
        self.engine, self.runner, self.started = launch(
            EngineSpec(model=str(self.path), config=self.config, threads=threads)
        )
        self._checkpoint = open_checkpoint(self.path)
        self.shape = self._checkpoint.config
        self.tokenizer: Tokenizer = load_tokenizer(self._checkpoint)
        self._clock = MonotonicClock()
        self._count = 0

    def __enter__(self) -> LLM:
        """Return the loaded model."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unmap the checkpoint."""
        self._checkpoint.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params | None = None, **sampling: Any
    ) -> list[Completion]:
        """Answer all prompts together (continuous batching), in the order given.

        A prompt is raw text, token ids, or a conversation (Messages, rendered by the chat template). ``sampling`` are
        fields of ``Params``; ``n`` must be 1. Raises HeadwayError with the first prompt that cannot be run.
        """
        params = msgspec.convert({**msgspec.structs.asdict(params or Params()), **sampling}, Params)
        if params.n != 1:
            raise InvalidRequest(
                f"n={params.n}: generate gives one answer a prompt; repeat the prompt instead", param="n"
            )
        several = [prompts] if _is_one(prompts) else list(prompts)
        requests = [self._request(prompt, params) for prompt in several]  # type: ignore[arg-type]
        collected: dict[str, list[Chunk]] = {request.id: [] for request in requests}
        self._run(requests, lambda request_id, chunk: collected[request_id].append(chunk))
        return [_whole(collected[request.id]) for request in requests]

    def chat(self, messages: Sequence[Message], params: Params | None = None, **sampling: Any) -> Completion:
        """Answer one conversation."""
        return self.generate(list(messages), params, **sampling)[0]

    def stream(self, prompt: Prompt, params: Params | None = None, **sampling: Any) -> Iterator[Chunk]:
        """Yield the Chunks of one answer as they come; closing the iterator cancels it."""
        params = msgspec.convert({**msgspec.structs.asdict(params or Params()), **sampling}, Params)
        waiting: list[Chunk] = []
        request = self._request(prompt, params)
        turn = self._start([request], lambda _, chunk: waiting.append(chunk))
        try:
            while True:
                more = turn()
                yield from waiting
                waiting.clear()
                if not more:
                    return
        finally:
            self.engine.abort(Abort(id=request.id))
            while self.engine.has_work:
                self.engine.step()

    def score(self, text: str) -> Score:
        """Return the teacher-forced log-probability of a text, no BOS added (long texts in windows of the context)."""
        import math

        ids = self.tokenizer.encode(text, add_special_tokens=False, allow_special=False)
        if len(ids) < 2:
            raise InvalidRequest(f"the text has {len(ids)} token(s); a score needs at least 2", param="text")
        limit = self.started.context_tokens - 1
        # Windows overlap by half, so that every token after the first window has at least half a context before it.
        stride = max(1, limit // 2)
        total, counted, begin, done = 0.0, 0, 0, 1
        while done < len(ids):
            end = min(begin + limit, len(ids))
            answer = self.generate([tuple(ids[begin:end])], max_tokens=0, prompt_logprobs=0)[0]
            for entry in answer.prompt_logprobs[done - begin :]:
                assert entry is not None
                total += entry.logprob
                counted += 1
            done = end
            begin = max(begin + 1, end - stride) if end < len(ids) else end
        return Score(n_tokens=len(ids), sum_logprob=total, perplexity=math.exp(-total / counted))

    # Inside

    def _request(self, prompt: Prompt, params: Params) -> Request:
        self._count += 1
        asked = Request(id=f"local-{self._count}", model=self.name, params=params, arrived=self._clock.now())
        if isinstance(prompt, str):
            return msgspec.structs.replace(asked, text=prompt)
        if prompt and isinstance(prompt[0], Message):
            return msgspec.structs.replace(asked, messages=tuple(prompt))
        return msgspec.structs.replace(asked, token_ids=tuple(prompt))

    def _start(self, requests: Sequence[Request], emit: Callable[[str, Chunk], None]) -> Callable[[], bool]:
        """Submit all; return a function that runs one step and says whether there are more."""
        started = self.started
        limits = Limits(started.context_tokens, started.n_blocks * started.block_tokens, started.vocabulary)
        submits = [prepare(request, self.tokenizer, limits) for request in requests]
        open_now: dict[str, Assembly] = {}
        for request, submit in zip(requests, submits, strict=True):
            open_now[request.id] = Assembly(request, submit, self.tokenizer)
            self.engine.submit(submit)

        def turn() -> bool:
            for message in self.engine.step():
                if isinstance(message, Refused) and message.id in open_now:
                    for other in open_now:
                        self.engine.abort(Abort(id=other))
                    raise error_of(message.code, message.message)
                if isinstance(message, Emitted) and message.id in open_now:
                    assembly = open_now[message.id]
                    chunks, aborts = assembly.feed(message)
                    for chunk in chunks:
                        emit(message.id, chunk)
                    for abort in aborts:
                        self.engine.abort(abort)
                    if assembly.done:
                        del open_now[message.id]
            return bool(open_now)

        return turn

    def _run(self, requests: Sequence[Request], emit: Callable[[str, Chunk], None]) -> None:
        turn = self._start(requests, emit)
        while turn():
            pass


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Tell a single prompt from a list of prompts."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Message))


def _whole(chunks: Sequence[Chunk]) -> Completion:
    """Join the Chunks of one choice."""
    last = chunks[-1]
    finish = next(chunk.finish for chunk in chunks if chunk.finish is not None)
    return Completion(
        prompt_token_ids=next((chunk.prompt_token_ids for chunk in chunks if chunk.prompt_token_ids), ()),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        text="".join(chunk.text for chunk in chunks),
        finish=finish,
        usage=last.usage or Usage(),
        timing=last.timing or EngineTiming(),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        prompt_logprobs=next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs), ()),
    )
