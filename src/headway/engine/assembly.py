"""A Request becomes a Submit; the engine's tokens become Chunks. Shared by the server's host and the offline API."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from headway.engine.messages import Abort, Emitted, Submit
from headway.engine.output import ChoiceText, Delta, to_token_logprob
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
    vocabulary: int
    """Rows of the model's embedding; a tokenizer may know more tokens than that, or fewer."""


def prepare(request: Request, tokenizer: Tokenizer, limits: Limits) -> Submit:
    """Tokenise a Request and resolve its bounds; InvalidRequest names what cannot be run, and why."""
    known = min(tokenizer.vocabulary_size, limits.vocabulary)
    params = check_params(request.params, known)
    ids = _prompt_ids(request, tokenizer, known)
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
    resolved = min(room, fits) if wanted is None else wanted
    slo = request.slo
    ttft_by = None if slo.ttft_s is None else request.arrived + slo.ttft_s
    return Submit(
        id=request.id,
        token_ids=ids,
        params=msgspec.structs.replace(params, max_tokens=resolved),
        ends=tuple(sorted(tokenizer.eos_ids)),
        priority=request.priority,
        tenant=request.tenant,
        deadline=request.deadline,
        start_by=ttft_by if slo.ttft_asked else None,
        ttft_by=ttft_by,
        itl_s=slo.itl_s,
        itl_asked=slo.itl_asked,
        arrived=request.arrived,
    )


def _prompt_ids(request: Request, tokenizer: Tokenizer, known: int) -> tuple[int, ...]:
    if request.messages is not None:
        ids = tuple(tokenizer.encode_chat(request.messages, request.tools, request.add_generation_prompt))
    elif request.token_ids is not None:
        ids = request.token_ids
    else:
        ids = tuple(tokenizer.encode(request.text or "", add_special_tokens=True, allow_special=True))
    if not ids:
        raise InvalidRequest("the prompt is empty: it has no token to start from", param="prompt")
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < known:
            # Also a text's: some files add tokens to the tokenizer that the model has no row for.
            spelled = tokenizer.token_text(token_id)
            raise InvalidRequest(
                f"token id {token_id}{f' ({spelled!r})' if spelled else ''} is outside the vocabulary 0..{known - 1}",
                param="prompt" if request.messages is None else "messages",
            )
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
    if params.max_tokens is not None and params.max_tokens < 0:
        refuse("max_tokens", params.max_tokens, "at least 0")
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

    def __init__(self, tokenizer: Tokenizer, params: Params, prompt: tuple[int, ...]) -> None:
        self.text = ChoiceText(tokenizer, stop=params.stop, min_tokens=params.min_tokens, after=prompt)
        self.begun = False
        self.done = False
        self.ids: list[int] = []
        """Generated, and not yet in a Chunk: the end of the text may be held back."""


class Assembly:
    """Turns what the engine emits for one request into Chunks, and says when it is complete."""

    def __init__(self, request: Request, submit: Submit, tokenizer: Tokenizer, clock: Clock | None = None) -> None:
        self._id = submit.id
        self._prompt = submit.token_ids
        self._tokenizer = tokenizer
        self._clock = clock or MonotonicClock()
        self._choices = [_Choice(tokenizer, request.params, submit.token_ids) for _ in range(request.params.n)]
        self._timing = EngineTiming()
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        """One tuple for all choices: with many of them, copies would fill the memory."""
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
        chunks = [] if choice.begun else [self._begin(emitted)]
        choice.begun = True
        choice.ids += emitted.token_ids
        delta = choice.text.feed(emitted.token_ids, emitted.logprobs, ended_by_token=emitted.ended_by_token)
        text, logprobs, stop = delta.text, delta.logprobs, delta.stop
        if emitted.finish is not None and stop is None:
            rest = choice.text.finish()
            text, logprobs, stop = text + rest.text, logprobs + rest.logprobs, rest.stop
        finish = emitted.finish if stop is None else Finish.STOP
        aborts = []
        if finish is not None:
            choice.done = True
            self.done = all(one.done for one in self._choices)
            if emitted.finish is None:
                aborts.append(Abort(id=self._id, index=emitted.index, cause="stop"))
                if emitted.index == 0:  # the engine does not report this end: it is ours
                    self._timing = msgspec.structs.replace(self._timing, finished=self._clock.now())
        if text or logprobs or finish is not None:
            reason = emitted.stop_reason if stop is None else stop
            chunks.append(self._chunk(choice, emitted, Delta(text, logprobs), finish, reason))
        return chunks, aborts

    def _begin(self, emitted: Emitted) -> Chunk:
        """Return the Chunk that leads a choice: what the prompt was."""
        if emitted.prompt_logprobs:
            entries = (None if e is None else to_token_logprob(self._tokenizer, e) for e in emitted.prompt_logprobs)
            self._prompt_logprobs = tuple(entries)
        return Chunk(
            index=emitted.index,
            prompt_token_ids=self._prompt,
            prompt_logprobs=self._prompt_logprobs,
            timing=self._timing,
        )

    def _chunk(
        self, choice: _Choice, emitted: Emitted, delta: Delta, finish: Finish | None, reason: str | int | None
    ) -> Chunk:
        ids, choice.ids = tuple(choice.ids), []
        usage = None
        if self.done:
            usage = Usage(
                prompt_tokens=len(self._prompt),
                completion_tokens=sum(one.text.tokens for one in self._choices),
                cached_tokens=self._timing.cached_tokens,
            )
        return Chunk(
            index=emitted.index,
            text=delta.text,
            token_ids=ids,
            logprobs=delta.logprobs,
            finish=finish,
            stop_reason=reason,
            usage=usage,
            timing=self._timing if usage is not None or emitted.timing is not None else None,
        )
