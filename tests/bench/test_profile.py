from __future__ import annotations

from collections.abc import Callable

from headway.bench.engine import Facts
from headway.bench.profile import BAR, profile, render


class FakeWorkload:
    """Ten milliseconds a call, of which nine are in Ops."""

    decode_steps = 8

    def facts(self) -> Facts:
        raise NotImplementedError

    def decode_step_s(self, batch: int, context: int) -> float:
        return 0.001

    def prefill_s(self, tokens: int) -> float:
        return 0.01

    def limits(self) -> tuple[float, float]:
        return 1e9, 1e9

    def profile(self, run: Callable[[], float], times: int) -> tuple[float, dict[str, tuple[float, int]]]:
        for _ in range(times):
            run()
        return 0.01 * times, {"add": (0.001 * times, 60 * times), "linear": (0.008 * times, 30 * times)}


def test_time_is_given_by_op_the_longest_first_with_what_is_outside() -> None:
    decode, fill = profile(FakeWorkload(), [(4, 64)], [512])
    assert (decode.case, fill.case) == ("decode, batch 4 at 64", "prefill 512")
    assert decode.ms == 10 / 8
    assert fill.ms == 10
    assert [(op.op, op.share) for op in decode.ops] == [("linear", 0.8), ("add", 0.1)]
    assert decode.outside == 0.1
    assert fill.ops[0].calls == 60


def test_the_bar_has_each_ops_share_of_its_length() -> None:
    (case,) = profile(FakeWorkload(), [], [512])
    bar = render([case]).splitlines()[1].strip()
    assert bar == "[" + "linear".ljust(47, "-") + "|" + "add--|" + "." * 6 + "]"
    assert len(bar) == BAR + 2
