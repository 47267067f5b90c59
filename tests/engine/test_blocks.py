import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headway.engine.blocks import BlockPool, Match, Prefix, Salt

SALT = ("model", "tenant")


def fill(pool: BlockPool, tokens: Sequence[int], salt: Salt = SALT) -> list[int]:
    """Hold blocks for the tokens as a sequence would: what matches is shared, the rest allocated and registered."""
    match = pool.match_prefix(tokens, salt)
    pool.share(match.blocks)
    table = [*match.blocks, *pool.allocate(pool.blocks_for(len(tokens)) - len(match.blocks))]
    prefix, size = match.prefix, pool.block_tokens
    for i in range(len(match.blocks), len(tokens) // size):
        prefix = pool.register(table[i], tokens[i * size : (i + 1) * size], salt, prefix)
    return table


def cached_tokens(pool: BlockPool, tokens: Sequence[int], salt: Salt = SALT) -> int:
    return pool.match_prefix(tokens, salt).tokens


def test_a_new_pool_is_all_free() -> None:
    pool = BlockPool(8, 4)
    assert pool.counts() == (0, 0, 8)
    assert pool.available() == 8
    assert not pool.check_integrity()


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(8, 4)
    assert [pool.blocks_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_released_blocks_without_known_tokens_are_free_again() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(3)
    assert pool.counts() == (3, 0, 1)
    assert not pool.can_allocate(2)
    pool.release(table)
    assert pool.counts() == (0, 0, 4)


@pytest.mark.parametrize(("tokens", "expected"), [(8, 4), (9, 8), (7, 4), (4, 0), (5, 4), (3, 0), (1, 0), (12, 8)])
def test_a_match_leaves_at_least_the_last_token(tokens: int, expected: int) -> None:
    pool = BlockPool(8, 4)
    pool.release(fill(pool, range(8)))
    assert cached_tokens(pool, range(tokens)) == expected


@pytest.mark.parametrize("other", [("model", "other"), ("other", "tenant"), ("", "modeltenant"), ("modeltenant", "")])
def test_another_tenant_or_model_matches_nothing(other: Salt) -> None:
    pool = BlockPool(8, 4)
    pool.release(fill(pool, range(8)))
    assert cached_tokens(pool, range(9)) == 8
    assert cached_tokens(pool, range(9), other) == 0


def test_tenants_are_cached_side_by_side() -> None:
    pool = BlockPool(8, 4)
    for tenant in ("a", "b"):
        pool.release(fill(pool, range(8), ("m", tenant)))
    assert [cached_tokens(pool, range(9), ("m", tenant)) for tenant in ("a", "b")] == [8, 8]


def test_the_same_block_after_another_start_does_not_match() -> None:
    pool = BlockPool(8, 4)
    pool.release(fill(pool, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert cached_tokens(pool, [5, 6, 7, 8, 9]) == 0
    assert cached_tokens(pool, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


def test_the_same_block_after_two_starts_is_cached_for_both() -> None:
    pool = BlockPool(8, 4)
    prompts = [[start, 2, 3, 4, 5, 6, 7, 8, 9] for start in (0, 1)]
    for prompt in prompts:
        pool.release(fill(pool, prompt))
    assert [cached_tokens(pool, prompt) for prompt in prompts] == [8, 8]


def test_prefix_cache_off_finds_and_keeps_nothing() -> None:
    pool = BlockPool(8, 4, prefix_cache=False)
    pool.release(fill(pool, range(8)))
    assert pool.counts() == (0, 0, 8)
    assert cached_tokens(pool, range(9)) == 0


def test_a_collision_is_a_miss() -> None:
    pool = BlockPool(8, 4, digest=lambda parent, tokens: b"all the same")
    pool.release(fill(pool, [1, 2, 3, 4]))
    assert cached_tokens(pool, [1, 2, 3, 4, 9]) == 4
    assert cached_tokens(pool, [1, 2, 3, 5, 9]) == 0
    assert cached_tokens(pool, [1, 2, 3, 4, 9], ("model", "other")) == 0
    table = fill(pool, [5, 6, 7, 8, 1, 2, 3, 4])
    assert cached_tokens(pool, [5, 6, 7, 8, 9]) == 0
    assert not pool.check_integrity([table])


def test_a_collision_of_the_parents_is_a_miss() -> None:
    # The digest ignores what was before, so block (5 6 7 8) is found after any first block: only comparing tells.
    pool = BlockPool(8, 4, digest=lambda parent, tokens: tokens)
    pool.release(fill(pool, [1, 2, 3, 4, 5, 6, 7, 8]))
    pool.release(fill(pool, [9, 9, 9, 9]))
    assert cached_tokens(pool, [1, 2, 3, 4, 5, 6, 7, 8, 0]) == 8
    assert cached_tokens(pool, [9, 9, 9, 9, 5, 6, 7, 8, 0]) == 4


def test_a_chain_is_found_again_after_its_start_was_computed_anew() -> None:
    first = Prefix(b"", (1,), SALT, None)
    again = Prefix(b"", (1,), SALT, None)
    assert Prefix(b"", (2,), SALT, first).same((2,), SALT, again)
    assert not Prefix(b"", (2,), SALT, first).same((2,), SALT, None)


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool = BlockPool(4, 4)
    pool.release(fill(pool, [1, 1, 1, 1, 2, 2, 2, 2]))
    pool.release(fill(pool, [3, 3, 3, 3, 4, 4, 4, 4]))
    used_last = pool.match_prefix([1, 1, 1, 1, 0], SALT).blocks
    pool.share(used_last)
    pool.release(used_last)
    table = pool.allocate(1)
    assert cached_tokens(pool, [1, 1, 1, 1, 2, 2, 2, 2, 0]) == 4
    table += pool.allocate(1)
    assert cached_tokens(pool, [3, 3, 3, 3, 4, 4, 4, 4, 0]) == 4
    table += pool.allocate(1)
    assert cached_tokens(pool, [3, 3, 3, 3, 4, 4, 4, 4, 0]) == 0
    assert cached_tokens(pool, [1, 1, 1, 1, 0]) == 4
    assert not pool.check_integrity([table])


def test_a_block_that_was_computed_again_counts_as_used() -> None:
    pool = BlockPool(3, 4)
    pool.release(fill(pool, [1, 1, 1, 1]))
    pool.release(fill(pool, [2, 2, 2, 2]))
    pool.release(fill(pool, [1, 1, 1, 1]))  # exactly one block: its last token is computed again
    pool.release(pool.allocate(2))
    assert cached_tokens(pool, [1, 1, 1, 1, 0]) == 4
    assert cached_tokens(pool, [2, 2, 2, 2, 0]) == 0


def test_matched_blocks_do_not_count_as_room() -> None:
    pool = BlockPool(2, 4)
    pool.release(fill(pool, range(4)))
    match = pool.match_prefix(range(5), SALT)
    assert pool.can_allocate(2)
    assert pool.can_allocate(1, match.blocks)
    assert not pool.can_allocate(2, match.blocks)


def test_a_shared_block_stays_held_until_its_last_holder_goes() -> None:
    pool = BlockPool(4, 4)
    first = fill(pool, range(5))
    second = fill(pool, range(6))
    assert first[0] == second[0]
    assert first[1] != second[1]
    pool.release(first)
    assert pool.counts() == (2, 0, 2)
    assert not pool.check_integrity([second])
    pool.release(second)
    assert pool.counts() == (0, 1, 3)


def test_check_integrity_names_what_is_broken() -> None:
    pool = BlockPool(4, 4)
    table = fill(pool, range(5))
    assert "holders, but" in pool.check_integrity([])
    assert "twice" in pool.check_integrity([table + table[:1]])
    pool._free.append(table[0])
    assert "has 1 holders and is idle" in pool.check_integrity()
    pool._free[-1] = pool._free[0]
    assert "free list twice" in pool.check_integrity()
    pool._free.pop()
    pool._blocks[table[0]].prefix = None
    assert "prefix map" in pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations keeps the invariants, and a match is always of equal tokens of the same tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 2)
        self.tables: list[list[int]] = []
        self.content: dict[int, tuple[Salt, tuple[int, ...]]] = {}
        """What each block was last registered with: all tokens up to its end."""

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        tenant=st.sampled_from("ab"),
        computed=st.integers(0, 6),
    )
    def start(self, tokens: list[int], tenant: str, computed: int) -> None:
        pool, salt = self.pool, ("m", tenant)
        match: Match = pool.match_prefix(tokens, salt)
        assert match.tokens < len(tokens)
        for i, block in enumerate(match.blocks):
            assert self.content[block] == (salt, tuple(tokens[: (i + 1) * 2]))
        need = pool.blocks_for(len(tokens)) - len(match.blocks)
        if not pool.can_allocate(need, match.blocks):
            return
        pool.share(match.blocks)
        table = [*match.blocks, *pool.allocate(need)]
        self.tables.append(table)
        prefix = match.prefix
        for i in range(len(match.blocks), min(len(tokens) // 2, computed)):
            before = table[i] if pool._blocks[table[i]].prefix is None else None
            prefix = pool.register(table[i], tokens[i * 2 : i * 2 + 2], salt, prefix)
            if before is not None:
                self.content[table[i]] = (salt, tuple(tokens[: (i + 1) * 2]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        if self.pool.can_allocate(1):
            data.draw(st.sampled_from(self.tables)).extend(self.pool.allocate(1))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def holds(self) -> None:
        assert not self.pool.check_integrity(self.tables)
        assert sum(self.pool.counts()) == self.pool.n_blocks
        assert self.pool.counts().held == len({block for table in self.tables for block in table})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_large_pool_takes_and_gives_in_constant_time() -> None:
    pool = BlockPool(4096, 1)
    tables = [pool.allocate(8) for _ in range(512)]
    random.Random(1).shuffle(tables)
    for table in tables:
        pool.release(table)
    assert pool.counts() == (0, 0, 4096)
