from hypothesis import given
from hypothesis import strategies as st

from headway.engine.fairness import Shares


def test_who_has_had_more_is_in_excess_by_whole_quanta() -> None:
    shares = Shares(100)
    shares.enter("a")
    shares.enter("b")
    shares.charge("a", 250)
    assert (shares.excess("a"), shares.excess("b")) == (2, 0)
    shares.charge("b", 200)
    assert (shares.excess("a"), shares.excess("b")) == (0, 0)
    assert dict(shares.counters()) == {"a": 50, "b": 0}


def test_idleness_saves_nothing_up() -> None:
    shares = Shares(100)
    for tenant in "ab":
        shares.enter(tenant)
        shares.charge(tenant, 1000)
    shares.enter("late")  # it starts level with the others, not a thousand tokens behind
    assert (shares.excess("a"), shares.excess("late")) == (0, 0)


def test_leaving_for_a_moment_does_not_cancel_a_debt() -> None:
    shares = Shares(100)
    shares.enter("a")
    shares.enter("b")
    shares.charge("a", 1000)
    shares.leave("a")
    shares.enter("a")
    assert shares.excess("a") == 10


def test_debts_end_when_nobody_waits_for_anything() -> None:
    shares = Shares(100)
    shares.enter("a")
    shares.enter("b")
    shares.charge("a", 1000)
    shares.leave("a")
    shares.leave("b")
    shares.enter("a")
    shares.enter("b")
    assert shares.excess("a") == 0


def test_counters_of_tenants_that_never_return_are_dropped() -> None:
    shares = Shares(100)
    shares.enter("stays")
    for i in range(20_000):
        shares.enter(str(i))
        shares.charge(str(i), 5)
        shares.charge("stays", 10)
        shares.leave(str(i))
    assert len(shares._served) < 10_000


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["enter", "leave", "charge"]), st.integers(1, 500))))
def test_the_least_served_is_never_in_excess(steps: list[tuple[str, str, int]]) -> None:
    shares = Shares(64)
    active: dict[str, int] = {}
    for tenant, act, tokens in steps:
        if act == "enter":
            shares.enter(tenant)
            active[tenant] = active.get(tenant, 0) + 1
        elif active.get(tenant):
            if act == "leave":
                shares.leave(tenant)
                active[tenant] -= 1
            else:
                shares.charge(tenant, tokens)
        live = [name for name, count in active.items() if count]
        if live:
            assert min(shares.excess(name) for name in live) == 0
            assert all(shares.excess(name) >= 0 for name in live)
