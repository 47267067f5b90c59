"""The visible text of one choice: stop strings are cut off, and only what could begin one is held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headway.engine.detokenizer import Detokenizer
from headway.engine.messages import Logprobs
from headway.engine.tokenizer import Tokenizer
from headway.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class Delta:
    """What may be shown after some tokens."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens whose text has been shown; those inside a stop string never are."""
    stop: str | None = None
    """The stop string that ended the choice; nothing follows."""


class StopMatcher:
    """Finds the first of several strings to be completed in a text that arrives in pieces (Knuth, Morris, Pratt 1977).

    Of two that are completed by the same character, the longer one counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def held_chars(self) -> int:
        """Length of the longest end of the text that could be the start of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str, *, counts: bool = True) -> tuple[int, str] | None:
        """Return (characters of ``text`` up to the match's end, stop string) or None; unless it ``counts``, go on."""
        if not self._stops:
            return None
        for position, char in enumerate(text, 1):
            hit = None
            for index, stop in enumerate(self._stops):
                matched = self._matched[index]
                while matched and stop[matched] != char:
                    matched = self._borders[index][matched - 1]
                matched += stop[matched] == char
                if matched == len(stop):
                    hit = hit or stop
                    matched = self._borders[index][matched - 1]
                self._matched[index] = matched
            if hit is not None and counts:
                return position, hit
        return None


def _borders(pattern: str) -> list[int]:
    """Return, for each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        length += pattern[index] == pattern[length]
        borders[index] = length
    return borders


class ChoiceText:
    """Assembles one choice: tokens in, text out; the same text for any chunking of the tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
    ) -> None:
        """``after`` is the prompt; a stop string that is complete before ``min_tokens`` tokens does not count."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, after=after)
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._held = ""
        self._shown_chars = 0
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()
        self.tokens = 0
        """Tokens generated: with those of the stop string and the end token, without any that came after a stop."""
        self.stop: str | None = None
        self.ended = False

    def feed(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprobs] = (), *, ended_by_token: bool = False
    ) -> Delta:
        """Take new tokens; ``ended_by_token`` hides the text of the last one. After a stop, nothing counts."""
        texts: list[str] = []
        released: list[TokenLogprob] = []
        for position, token_id in enumerate(token_ids):
            if self.ended:
                break
            self.tokens += 1
            hidden = ended_by_token and position == len(token_ids) - 1
            text = "" if hidden else self._detokenizer.feed((token_id,))
            start = self._shown_chars + len(self._held)
            if logprobs:
                self._waiting.append((start, start + len(text), to_token_logprob(self._tokenizer, logprobs[position])))
            texts.append(self._take(text))
            self._release_logprobs(released)
        return Delta("".join(texts), tuple(released), self.stop)

    def finish(self) -> Delta:
        """Return what was held back, once no token will follow."""
        if self.ended:
            return Delta(stop=self.stop)
        text = self._take(self._detokenizer.flush())
        if not self.ended:
            text += self._held
            self._show(self._held)
        self.ended = True
        released: list[TokenLogprob] = []
        self._release_logprobs(released)
        return Delta(text, tuple(released), self.stop)

    def _take(self, text: str) -> str:
        """Add decoded text; return what can be shown now."""
        hit = self._matcher.feed(text, counts=self.tokens >= self._min_tokens)
        buffer = self._held + text
        if hit is None:
            cut = len(buffer) - self._matcher.held_chars
        else:
            end, self.stop = hit
            self.ended = True
            cut = len(self._held) + end - (0 if self._include_stop else len(self.stop))
        self._held = "" if self.ended else buffer[cut:]
        self._show("", chars=cut)
        return buffer[:cut]

    def _show(self, text: str, chars: int = 0) -> None:
        self._shown_chars += len(text) + chars

    def _release_logprobs(self, released: list[TokenLogprob]) -> None:
        shown = self._shown_chars
        while self._waiting:
            start, end, _ = self._waiting[0]
            if end > shown and not (self.ended and start < shown):
                break
            released.append(self._waiting.popleft()[2])


def to_token_logprob(tokenizer: Tokenizer, logprobs: Logprobs) -> TokenLogprob:
    """Return the wire-ready form: with each token's text and bytes."""

    def entry(token_id: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        raw = tokenizer.token_bytes(token_id)
        return TokenLogprob(token_id=token_id, logprob=logprob, text=raw.decode("utf-8", "replace"), raw=raw, top=top)

    return entry(logprobs.token_id, logprobs.logprob, tuple(entry(*alternative) for alternative in logprobs.top))
