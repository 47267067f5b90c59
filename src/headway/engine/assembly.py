"""A Request becomes a Submit; the engine's tokens become Chunks. Shared by the server's host and the offline API."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from headway.engine.messages import Abort, Emitted, Logprobs, Submit
from headway.engine.output import ChoiceText
from headway.engine.tokenizer import Tokenizer
from headway.errors import ContextExceeded, InvalidRequest, NeverFits
from headway.telemetry.clock import Clock, MonotonicClock
from headway.types import Chunk, EngineTiming, Finish, Params, Request, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can hold."""

    context_tokens: int
    capacity_tokens: int
    """Tokens of all KV blocks together."""


def prepare(request: Request, tokenizer: Tokenizer, limits: Limits) -> Submit:
    """Tokenise a Request and resolve its bounds; InvalidRequest names what cannot be run, and why."""
    params = check_params(request.params, tokenizer.vocabulary_size)
    ids = _prompt_ids(request, tokenizer)
    room = limits.context_tokens - len(ids)
    if room < 1:
        raise ContextExceeded(
            f"the prompt has {len(ids)} tokens; the model's context is {limits.context_tokens} and the answer needs at "
            "least one of them; shorten the prompt",
            param="messages" if request.messages is not None else "prompt",
        )
    wanted = params.max_tokens
    if wanted is not None and wanted > room:
        raise ContextExceeded(
            f"the prompt has {len(ids)} tokens and max_tokens is {wanted}, {len(ids) + wanted} together; the model's "
            f"context is {limits.context_tokens}: ask for at most {room}",
            param="max_tokens",
        )
    fits = limits.capacity_tokens - len(ids)
    if fits < (wanted or 1):
        raise NeverFits(
            f"the prompt has {len(ids)} tokens and the answer up to {wanted or 1}; the KV cache holds "
            f"{limits.capacity_tokens}: shorten the request, or give the server more with --kv-memory",
            param="max_tokens" if fits > 0 else "prompt",
        )
    # Asked for nothing but the prompt's log-probabilities: one token is run and not shown.
    resolved = max(1, min(room, fits)) if wanted is None else max(1, wanted)
    return Submit(
        id=request.id,
        token_ids=ids,
        params=msgspec.structs.replace(params, max_tokens=resolved),
        priority=request.priority,
        tenant=request.tenant,
        deadline=request.deadline,
        arrived=request.arrived,
    )


def _prompt_ids(request: Request, tokenizer: Tokenizer) -> tuple[int, ...]:
    if request.messages is not None:
        ids = tuple(tokenizer.encode_chat(request.messages, request.tools, request.add_generation_prompt))
    elif request.token_ids is not None:
        ids = request.token_ids
        for token_id in ids:
            if not 0 <= token_id < tokenizer.vocabulary_size:
                limit = tokenizer.vocabulary_size - 1
                raise InvalidRequest(f"token id {token_id} is outside the vocabulary 0..{limit}", param="prompt")
    else:
        ids = tuple(tokenizer.encode(request.text or "", add_special_tokens=True, allow_special=True))
    if not ids:
        raise InvalidRequest("the prompt is empty: it has no token to start from", param="prompt")
    return ids


def check_params(params: Params, vocabulary: int) -> Params:
    """Raise InvalidRequest for values outside their range; the offline API has no other check, HTTP has one before."""

    def refuse(name: str, value: object, rule: str) -> None:
        raise InvalidRequest(f"{name} is {value!r}; it must be {rule}", param=name)

    def between(name: str, low: float, high: float, *, above: bool = False) -> None:
        value = getattr(params, name)
        if not math.isfinite(value) or not (low < value if above else low <= value) or value > high:
            refuse(name, value, f"{'above' if above else 'from'} {low:g} {'and' if above else 'to'} at most {high:g}")

    between("temperature", 0.0, 100.0)
    between("top_p", 0.0, 1.0, above=True)
    between("min_p", 0.0, 1.0)
    between("repetition_penalty", 0.0, 100.0, above=True)
    between("presence_penalty", -2.0, 2.0)
    between("frequency_penalty", -2.0, 2.0)
    between("top_k", 0, 1 << 31)
    between("min_tokens", 0, 1 << 31)
    between("n", 1, 128)
    if params.max_tokens is not None and params.max_tokens < (0 if params.echo else 1):
        refuse("max_tokens", params.max_tokens, "at least 1")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        refuse("min_tokens", params.min_tokens, f"at most max_tokens, {params.max_tokens}")
    if any(not stop for stop in params.stop):
        refuse("stop", "", "a text of at least one character")
    for token_id in (*params.logit_bias, *params.stop_token_ids):
        if not 0 <= token_id < vocabulary:
            name = "logit_bias" if token_id in params.logit_bias else "stop_token_ids"
            refuse(name, token_id, f"a token id from 0 to {vocabulary - 1}")
    for bias in params.logit_bias.values():
        if not -100.0 <= bias <= 100.0:
            refuse("logit_bias", bias, "from -100 to 100")
    return params


class _Choice:
    """One of the n answers."""

    def __init__(self, tokenizer: Tokenizer, params: Params) -> None:
        self.text = ChoiceText(tokenizer, stop=params.stop, min_tokens=params.min_tokens)
        self.tokens = 0
        self.begun = False
        self.done = False
        self.pending_ids: list[int] = []
        self.pending_logprobs: list[TokenLogprob] = []


class Assembly:
    """Turns what the engine emits for one request into Chunks, and says when it is complete."""

    def __init__(self, request: Request, submit: Submit, tokenizer: Tokenizer, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._id = submit.id
        self._prompt = submit.token_ids
        self._params = request.params
        self._tokenizer = tokenizer
        self._choices = [_Choice(tokenizer, request.params) for _ in range(request.params.n)]
        self._timing = EngineTiming()
        self.fed = False
        """Something has come from the engine: the request cannot be repeated unseen."""
        self.done = False

    def feed(self, emitted: Emitted) -> tuple[list[Chunk], list[Abort]]:
        """Return the Chunks that are ready, and the choices that a stop string has ended."""
        self.fed = True
        choice = self._choices[emitted.index]
        if choice.done:
            return [], []
        if emitted.timing is not None and emitted.index == 0:
            self._timing = emitted.timing
        chunks: list[Chunk] = []
        if not choice.begun:
            choice.begun = True
            chunks += self._begin(emitted)
        text, finish, reason = self._text(choice, emitted)
        aborts: list[Abort] = []
        if finish is not None:
            choice.done = True
            if emitted.finish is None:
                aborts.append(Abort(id=self._id, index=emitted.index, cause="stop"))
                if emitted.index == 0:  # the engine will not report this end: it is ours
                    self._timing = msgspec.structs.replace(self._timing, finished=self._clock.now())
        self.done = all(one.done for one in self._choices)
        if text or finish is not None or (choice.pending_logprobs and not self._params.stop):
            chunks.append(self._chunk(choice, emitted, text, finish, reason))
        return chunks, aborts

    def _begin(self, emitted: Emitted) -> list[Chunk]:
        """Return the Chunk that leads a choice: what the prompt was, and its text when it is to be echoed."""
        wants_prompt = self._params.echo or self._params.prompt_logprobs is not None
        return [
            Chunk(
                index=emitted.index,
                text=self._tokenizer.decode(list(self._prompt)) if self._params.echo else "",
                prompt_token_ids=self._prompt,
                prompt_logprobs=tuple(self._logprob(entry) if entry else None for entry in emitted.prompt_logprobs)
                if wants_prompt
                else (),
                timing=self._timing,
            )
        ]

    def _text(self, choice: _Choice, emitted: Emitted) -> tuple[str, Finish | None, str | int | None]:
        """Feed the tokens one by one until a stop string ends the choice."""
        finish, reason = emitted.finish, emitted.stop_reason
        if self._params.max_tokens == 0:
            return "", finish, reason
        parts: list[str] = []
        last = len(emitted.token_ids) - 1
        for place, token_id in enumerate(emitted.token_ids):
            choice.tokens += 1
            choice.pending_ids.append(token_id)
            if emitted.logprobs:
                choice.pending_logprobs.append(self._logprob(emitted.logprobs[place]))
            if emitted.ended_by_token and place == last:
                continue  # an end token has no text
            parts.append(choice.text.feed(token_id))
            if choice.text.stopped is not None:
                return "".join(parts), Finish.STOP, choice.text.stopped
        if finish is not None:
            parts.append(choice.text.flush())
            if choice.text.stopped is not None:
                return "".join(parts), Finish.STOP, choice.text.stopped
        return "".join(parts), finish, reason

    def _chunk(
        self, choice: _Choice, emitted: Emitted, text: str, finish: Finish | None, reason: str | int | None
    ) -> Chunk:
        ids, choice.pending_ids = tuple(choice.pending_ids), []
        logprobs, choice.pending_logprobs = tuple(choice.pending_logprobs), []
        usage = None
        if self.done:
            usage = Usage(
                prompt_tokens=len(self._prompt),
                completion_tokens=sum(one.tokens for one in self._choices),
                cached_tokens=self._timing.cached_tokens,
            )
        return Chunk(
            index=emitted.index,
            text=text,
            token_ids=ids,
            logprobs=logprobs,
            finish=finish,
            stop_reason=reason,
            usage=usage,
            timing=self._timing if usage is not None or emitted.timing is not None else None,
        )

    def _logprob(self, entry: Logprobs) -> TokenLogprob:
        def named(token_id: int, value: float) -> TokenLogprob:
            return TokenLogprob(
                token_id=token_id,
                logprob=value,
                text=self._tokenizer.token_text(token_id),
                raw=self._tokenizer.token_bytes(token_id),
            )

        top = tuple(named(token_id, value) for token_id, value in entry.top)
        return msgspec.structs.replace(named(entry.token_id, entry.logprob), top=top)
