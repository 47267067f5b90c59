"""Synthetic prompts of about so many tokens that share exactly the beginnings that they are meant to share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from headway.bench.ask import Target, request_headers
from headway.bench.client import Connections, WireError, render
from headway.bench.trace import BLOCK_TOKENS

_COMMON: Final = (
    "the of and to in is that for it was on as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people "
    "my made over did down only way find use may water long little very after words called just where most know"
)
WORDS: Final = tuple(_COMMON.split())
"""Common enough to be one token each, with the space before it, in every tokenizer of English."""
SAMPLE_WORDS: Final = (64, 1088)
"""Two texts are counted, and their difference taken: what a tokenizer adds to every text drops out."""
CALIBRATE_S: Final = 10.0


class _Count(msgspec.Struct):
    count: int | None = None
    tokens: list[Any] | None = None


class Prompts:
    """Makes prompts; equal seed and keys give equal texts, different keys differ within a few words."""

    def __init__(self, seed: int = 0, words_per_token: float = 1.0) -> None:
        self._seed = seed
        self._words_per_token = words_per_token

    def text(self, tokens: int, key: object) -> str:
        """Return about ``tokens`` tokens; what one key gives is a beginning of what it gives for more tokens."""
        rng = random.Random(f"{self._seed}/{key}")
        return " ".join(rng.choices(WORDS, k=max(1, round(tokens * self._words_per_token))))

    def prompt(self, tokens: int, key: object, *, shared_tokens: int = 0) -> str:
        """Return a prompt of about ``tokens`` tokens, of which the first ``shared_tokens`` are every prompt's."""
        if shared_tokens <= 0:
            return self.text(tokens, f"own/{key}")
        return f"{self.text(shared_tokens, 'shared')} {self.text(tokens - shared_tokens, f'own/{key}')}"

    def from_blocks(self, tokens: int, hash_ids: Sequence[int], key: object) -> str:
        """Return the prompt of a trace's row: each id's own text, then what no other prompt has."""
        parts = []
        for place, hash_id in enumerate(hash_ids):
            left = min(BLOCK_TOKENS, tokens - place * BLOCK_TOKENS)
            parts.append(self.text(left, f"block/{hash_id}"))
        rest = tokens - BLOCK_TOKENS * len(hash_ids)
        if rest > 0:
            parts.append(self.text(rest, f"own/{key}"))
        return " ".join(parts)


async def words_per_token(connections: Connections, target: Target) -> float:
    """Ask the server's /tokenize how many of our words a token is; 1.0 where it has none."""
    rng = random.Random(0)
    counts = []
    try:
        async with asyncio.timeout(CALIBRATE_S):
            for words in SAMPLE_WORDS:
                text = " ".join(rng.choices(WORDS, k=words))
                counts.append(await _count(connections, target, text))
    except (OSError, WireError, msgspec.DecodeError):
        return 1.0
    few, many = counts
    if few is None or many is None or many <= few:
        return 1.0
    return (SAMPLE_WORDS[1] - SAMPLE_WORDS[0]) / (many - few)


async def _count(connections: Connections, target: Target, text: str) -> int | None:
    body = msgspec.json.encode({"model": target.model, "prompt": text})
    request = render(connections.origin, "/tokenize", request_headers(target), body)
    async with connections.exchange(request) as answer:
        data = await answer.read_all()
        if answer.status != 200:
            return None
    found = msgspec.json.decode(data, type=_Count)
    return len(found.tokens) if found.count is None and found.tokens is not None else found.count
