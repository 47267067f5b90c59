"""KV blocks: who holds them, which may be reused for an equal prefix, which go first when memory is short.

A block is held (some table names it), cached (nobody holds it, its tokens are known) or free. Only the block numbers
live here; the keys and values are the runner's.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Salt = tuple[str, str]
"""(model, tenant): prefixes are shared only where both are equal."""

Digest = Callable[[bytes, bytes], bytes]
"""(parent's digest or the salt, the block's token bytes) -> digest."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A prompt's first blocks as a chain: this block's tokens and everything before them."""

    digest: bytes
    tokens: tuple[int, ...]
    salt: Salt
    parent: Prefix | None

    def same(self, tokens: tuple[int, ...], salt: Salt, parent: Prefix | None) -> bool:
        """Whether the whole chain is equal, compared token by token (shared ancestors by identity)."""
        if self.tokens != tokens or self.salt != salt:
            return False
        mine, other = self.parent, parent
        while mine is not other:
            if mine is None or other is None or mine.tokens != other.tokens or mine.salt != other.salt:
                return False
            mine, other = mine.parent, other.parent
        return True


class Match(NamedTuple):
    """The cached blocks that a prompt can start from; valid until the pool changes."""

    blocks: tuple[int, ...]
    tokens: int
    prefix: Prefix | None


class Counts(NamedTuple):
    """How the blocks are used; the three sum to the size of the pool."""

    held: int
    cached: int
    free: int


@dataclass(slots=True)
class _Block:
    holders: int = 0
    prefix: Prefix | None = None
    """Set while the prefix map points here."""


def _keyed_digest() -> Digest:
    # A key per process: nobody can compute a colliding prompt outside of it.
    key = secrets.token_bytes(32)

    def digest(parent: bytes, tokens: bytes) -> bytes:
        return hashlib.blake2b(parent + tokens, digest_size=32, key=key).digest()

    return digest


@dataclass(slots=True)
class BlockPool:
    """Gives blocks out, counts their holders, and finds cached prefixes; every operation is O(blocks touched)."""

    n_blocks: int
    block_tokens: int
    prefix_cache: bool = True
    digest: Digest = field(default_factory=_keyed_digest)
    _blocks: list[_Block] = field(init=False)
    _free: list[int] = field(init=False)
    _cached: OrderedDict[int, None] = field(init=False, default_factory=OrderedDict)
    """Unheld blocks with known tokens, least recently used first."""
    _map: dict[bytes, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        assert self.n_blocks > 0
        assert self.block_tokens > 0
        self._blocks = [_Block() for _ in range(self.n_blocks)]
        self._free = list(range(self.n_blocks - 1, -1, -1))

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-tokens // self.block_tokens)

    def available(self) -> int:
        """Return how many blocks could be allocated now."""
        return len(self._free) + len(self._cached)

    def counts(self) -> Counts:
        """Return the use of the pool."""
        cached, free = len(self._cached), len(self._free)
        return Counts(self.n_blocks - cached - free, cached, free)

    def match_prefix(self, tokens: Sequence[int], salt: Salt) -> Match:
        """Return the longest cached prefix of full blocks that leaves at least the last token to compute.

        Nothing is taken: ``share`` the blocks before the pool changes.
        """
        blocks: list[int] = []
        prefix: Prefix | None = None
        if self.prefix_cache:
            size = self.block_tokens
            for start in range(0, (len(tokens) - 1) // size * size, size):
                part = tuple(tokens[start : start + size])
                number = self._map.get(self._digest_of(part, salt, prefix))
                if number is None:
                    break
                found = self._blocks[number].prefix
                assert found is not None
                if not found.same(part, salt, prefix):  # a collision is a miss, never a wrong text
                    break
                blocks.append(number)
                prefix = found
        return Match(tuple(blocks), len(blocks) * self.block_tokens, prefix)

    def can_allocate(self, count: int, sharing: Sequence[int] = ()) -> bool:
        """Whether ``count`` new blocks can be had beside taking ``sharing`` (which must then not be evicted)."""
        revived = sum(1 for number in sharing if not self._blocks[number].holders)
        return count <= self.available() - revived

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` blocks, each held once; the least recently used cached ones are forgotten for it."""
        assert self.can_allocate(count)
        taken = []
        for _ in range(count):
            number = self._free.pop() if self._free else self._evict()
            self._blocks[number].holders = 1
            taken.append(number)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks that are cached or held already once more."""
        for number in blocks:
            block = self._blocks[number]
            if block.holders == 0:
                del self._cached[number]
            block.holders += 1

    def release(self, table: Sequence[int]) -> None:
        """Give a table's blocks back; the last one is the first to be evicted, so that chains shrink from the leaf."""
        for number in reversed(table):
            block = self._blocks[number]
            assert block.holders > 0
            block.holders -= 1
            if block.holders == 0:
                if block.prefix is None:
                    self._free.append(number)
                else:
                    self._cached[number] = None

    def register(self, number: int, tokens: Sequence[int], salt: Salt, parent: Prefix | None) -> Prefix | None:
        """Make a full, computed, held block findable; return its link in the chain for the next one's ``parent``.

        When an equal block is known already, that one stays the findable one.
        """
        if not self.prefix_cache:
            return None
        block = self._blocks[number]
        assert block.holders > 0
        assert len(tokens) == self.block_tokens
        part = tuple(tokens)
        digest = self._digest_of(part, salt, parent)
        known = self._map.get(digest)
        if known is not None:
            prefix = self._blocks[known].prefix
            assert prefix is not None
            if not prefix.same(part, salt, parent):
                return Prefix(digest, part, salt, parent)
            if known in self._cached:
                self._cached.move_to_end(known)
            return prefix
        assert block.prefix is None
        block.prefix = Prefix(digest, part, salt, parent)
        self._map[digest] = number
        return block.prefix

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> str:
        """Return the first broken invariant, or ""; with all live ``tables``, holders are checked against them."""
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            return "a block is on the free list twice"
        if free & cached:
            return f"block {min(free & cached)} is free and cached"
        for number, block in enumerate(self._blocks):
            idle = number in free or number in cached
            if idle == (block.holders > 0):
                return f"block {number} has {block.holders} holders and is {'idle' if idle else 'lost'}"
            if number in free and block.prefix is not None:
                return f"free block {number} is still findable"
            if number in cached and block.prefix is None:
                return f"cached block {number} cannot be found"
            if block.prefix is not None and self._map.get(block.prefix.digest) != number:
                return f"block {number} is not where the prefix map points"
        if len(self._map) != sum(1 for block in self._blocks if block.prefix is not None):
            return "the prefix map points to a block that does not know it"
        return "" if tables is None else self._check_holders(tables)

    def _check_holders(self, tables: Iterable[Sequence[int]]) -> str:
        holders = [0] * self.n_blocks
        for table in tables:
            if len(set(table)) != len(table):
                return f"a table names a block twice: {list(table)}"
            for number in table:
                holders[number] += 1
        for number, block in enumerate(self._blocks):
            if block.holders != holders[number]:
                return f"block {number} counts {block.holders} holders, but {holders[number]} tables name it"
        return ""

    def _digest_of(self, tokens: tuple[int, ...], salt: Salt, parent: Prefix | None) -> bytes:
        before = repr(salt).encode() if parent is None else parent.digest
        return self.digest(before, array("q", tokens).tobytes())

    def _evict(self) -> int:
        number, _ = self._cached.popitem(last=False)
        block = self._blocks[number]
        assert block.prefix is not None
        del self._map[block.prefix.digest]
        block.prefix = None
        return number
