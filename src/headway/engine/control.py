"""Keeps control tokens the template's own: text that a caller sent never becomes one."""

from __future__ import annotations

import itertools
import json
import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from headway.errors import CheckpointError, InvalidRequest

# Characters for marks, none of which is ever assigned a meaning; the first ones that the caller did not send are used.
_MARKS = tuple(map(chr, (*range(0xFDD0, 0xFDF0), *range(0x10FF00, 0x10FFFE))))


class Marks:
    """Two characters, absent from the caller's text: no control token may start, or end, where they stand."""

    def __init__(self, control: ControlTokens, texts: Iterable[str]) -> None:
        joined = "\0".join(texts)
        lowered = joined.lower()
        unused = (m for m in _MARKS if m not in joined and json.dumps(m)[1:-1] not in lowered)
        free = list(itertools.islice(unused, 2))
        if len(free) < 2:
            raise InvalidRequest(
                "The messages hold all of the Unicode noncharacters (U+FDD0 and following); remove some of them.",
                param="messages",
            )
        self._no_start, self._no_end = free[0], free[1]
        self._control = control
        # A template may write strings with tojson(ensure_ascii=True), so the marks' escapes count as marks too.
        escaped = "|".join(re.escape(json.dumps(mark)[1:-1]) for mark in free)
        self._found = re.compile(f"[{self._no_start}{self._no_end}]|{escaped}")

    def mark(self, value: Any) -> Any:
        """Return the value with every string in it marked."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            # A key is looked up by its spelling: it is only changed where it holds a whole control token.
            return {self._mark_key(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def _mark_key(self, key: Any) -> Any:
        return self._mark_text(key) if isinstance(key, str) and self._control.holds(key) else key

    def _mark_text(self, text: str) -> str:
        starts, end = self._control.touches(text)
        marks = [(start, self._no_start) for start in starts]
        if end:
            marks = sorted([*marks, (end, self._no_end)])
        pieces: list[str] = []
        last = 0
        for position, mark in marks:
            pieces += (text[last:position], mark)
            last = position
        return "".join([*pieces, text[last:]])

    def remove(self, rendered: str) -> tuple[str, set[int], set[int]]:
        """Return the text without marks, and where no control token may start, and where none may end."""
        pieces: list[str] = []
        length = last = 0
        no_start: set[int] = set()
        no_end: set[int] = set()
        for found in self._found.finditer(rendered):
            piece = rendered[last : found.start()]
            pieces.append(piece)
            length += len(piece)
            last = found.end()
            is_start = found[0] in (self._no_start, json.dumps(self._no_start)[1:-1])
            (no_start if is_start else no_end).add(length)
        pieces.append(rendered[last:])
        return "".join(pieces), no_start, no_end


class ControlTokens:
    """The control tokens of one vocabulary, and an encoder that takes only those it is told of.

    The encoder shares the model, normalizer and pre-tokenizer of the full one, but knows each control token by an
    unguessable stand-in. So a text with control tokens replaced by stand-ins gives the full encoder's ids, and a
    control token's own spelling is plain text to it.
    """

    def __init__(self, backend: Tokenizer, added: Mapping[int, AddedToken], special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._added = added
        self._ids = {token.content: index for index, token in added.items() if index in special_ids and token.content}
        self._lock = threading.Lock()
        self._quiet: tuple[Tokenizer, dict[str, str], dict[int, int]] | None = None
        self._compile()

    def widen(self, template_text: str) -> None:
        """Count plain added tokens that the template itself writes as control tokens too.

        Some vocabularies mark their turns by added tokens that are not special (DeepSeek). Tags in pairs, such as
        ``<think>`` and ``</think>``, stay what they are: the model writes them, so they return in its messages.
        """
        contents = {token.content: index for index, token in self._added.items()}
        for content, index in contents.items():
            is_tag = re.fullmatch(r"</?([^<>/\s]+)>", content)
            paired = is_tag and {f"<{is_tag[1]}>", f"</{is_tag[1]}>"} <= contents.keys()
            if content.strip() and content in template_text and not paired:
                self._ids.setdefault(content, index)
        self._compile()

    def _compile(self) -> None:
        spellings = sorted(self._ids, key=len, reverse=True)
        try:
            alternatives = longest_of(spellings)
            self._pattern = re.compile(alternatives)
            # Without regard to case: a template may lower the text. Look-ahead: occurrences may overlap.
            self._anywhere = re.compile(f"(?=(?:{alternatives}))", re.IGNORECASE)
        except (RecursionError, OverflowError):
            raise CheckpointError(
                f"The vocabulary's {len(spellings)} control tokens are beginnings of one another without end; "
                "the file is damaged: download or convert it again."
            ) from None
        folded = {spelling.lower() for spelling in spellings}
        # Tokens that begin or end as words do are left out: half of one is an ordinary word's end.
        self._prefixes = {s[:n] for s in folded if not s[0].isalnum() for n in range(1, len(s))}
        self._suffixes = {s[n:] for s in folded if not s[-1].isalnum() for n in range(1, len(s))}
        self._longest = max(map(len, folded), default=0)

    def holds(self, text: str) -> bool:
        """Return whether a whole control token is spelled in a text."""
        return bool(self._ids) and self._anywhere.search(text) is not None

    def touches(self, text: str) -> tuple[list[int], int]:
        """Return where control tokens start in a text, its unfinished one at the end too; and where a tail of one ends.

        The tail is one at the very beginning of the text, which what stands before it could make whole; 0 if none.
        """
        starts = {found.start() for found in self._anywhere.finditer(text)} if self._ids else set()
        edge = self._longest - 1
        tail = text[-edge:].lower() if edge > 0 else ""
        starts |= {len(text) - n for n in range(1, len(tail) + 1) if tail[-n:] in self._prefixes}
        head = text[:edge].lower() if edge > 0 else ""
        end = max((n for n in range(1, len(head) + 1) if head[:n] in self._suffixes), default=0)
        return sorted(starts), end

    def marks_for(self, texts: Sequence[str]) -> Marks | None:
        """Return marks for a caller's strings, or None where none of them holds or touches a control token."""
        for text in texts:
            starts, end = self.touches(text)
            if starts or end:
                return Marks(self, texts)
        return None

    def encode(
        self,
        text: str,
        *,
        no_start: set[int] | None = None,
        no_end: set[int] | None = None,
        all_plain: bool = False,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Return the ids of a text in which control tokens are taken except where they are forbidden (or anywhere)."""
        quiet, stand_ins, real = self._quiet_encoder()
        pieces: list[str] = []
        position = last = 0
        while not all_plain and (found := self._pattern.search(text, position)):
            position = found.end()
            if found.start() in (no_start or ()) or found.end() in (no_end or ()):
                position = found.start() + 1
                continue
            pieces += (text[last : found.start()], stand_ins[found[0]])
            last = found.end()
        pieces.append(text[last:])
        whole = "".join(pieces)
        ids: list[int] = quiet.encode_batch_fast([whole], add_special_tokens=False)[0].ids
        forged = next((index for index in ids if index not in real and index in self._real_ids), None)
        if forged is not None:
            raise InvalidRequest(
                f"The text spells the control token {self._added[forged].content!r}, which this vocabulary cannot "
                "write as plain text; remove it from the text."
            )
        ids = [real.get(index, index) for index in ids]
        if not add_special_tokens:
            return ids
        ends: list[int] = self._backend.encode("", add_special_tokens=True).ids
        return _wrap(self._backend, ids, ends)

    def _quiet_encoder(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        with self._lock:
            if self._quiet is None:
                self._quiet = self._build()
                # What stands for characters that the vocabulary lacks comes out of any text, and controls nothing.
                unknown = getattr(self._backend.model, "unk_token", None)
                self._real_ids = frozenset(index for token, index in self._ids.items() if token != unknown)
            return self._quiet

    def _build(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        quiet = Tokenizer(self._backend.model)  # shares the vocabulary: no copy
        if self._backend.normalizer is not None:
            quiet.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            quiet.pre_tokenizer = self._backend.pre_tokenizer
        key = secrets.token_hex(8)
        stand_ins = {content: f"\ufdd0{key}:{index}\ufdd1" for content, index in self._ids.items()}
        flags = {token.content: token for token in self._added.values()}
        quiet.add_tokens([token for token in self._added.values() if token.content not in self._ids])
        quiet.add_special_tokens(
            [
                AddedToken(stand_in, lstrip=flags[content].lstrip, rstrip=flags[content].rstrip, normalized=False)
                for content, stand_in in stand_ins.items()
            ]
        )
        spelled = {stand_in: content for content, stand_in in stand_ins.items()}
        # Added tokens that the model's own vocabulary lacks get new ids here, in an order of their own.
        ids = {token.content: index for index, token in self._added.items()}
        decoder = quiet.get_added_tokens_decoder()
        real = {i: ids[spelled.get(token.content, token.content)] for i, token in decoder.items()}
        return quiet, stand_ins, real


def longest_of(spellings: Sequence[str]) -> str:
    """Return an expression for the longest of these that stands here; a tree, so that thousands cost little."""
    tree: dict[str, Any] = {}
    for spelling in spellings:
        branch = tree
        for char in spelling:
            branch = branch.setdefault(char, {})
        branch[""] = {}
    return _branch_pattern(tree) if tree else "(?!)"


def _branch_pattern(branch: dict[str, Any]) -> str:
    run = ""
    while len(branch) == 1 and "" not in branch:
        char, branch = next(iter(branch.items()))
        run += re.escape(char)
    ways = [re.escape(char) + _branch_pattern(below) for char, below in branch.items() if char]
    if not ways:
        return run
    return f"{run}(?:{'|'.join(ways)}){'?' if '' in branch else ''}"


def _wrap(backend: Tokenizer, ids: list[int], ends: list[int]) -> list[int]:
    """Put the special tokens that the backend adds to an empty text around ids: BOS before, others behind."""
    if not ends:
        return ids
    probe: list[int] = backend.encode("a", add_special_tokens=True).ids
    inner: list[int] = backend.encode("a", add_special_tokens=False).ids
    before = (
        len(ends) if not inner else next((i for i in range(len(ends) + 1) if probe[i : i + len(inner)] == inner), 0)
    )
    return [*ends[:before], *ids, *ends[before:]]
