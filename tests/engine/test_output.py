from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.engine.messages import Logprobs
from headway.engine.output import ChoiceText, Delta, StopMatcher
from headway.engine.tokenizer import Tokenizer
from tests.engine import tiny


class _Spelled(Tokenizer):
    """A tokenizer whose tokens are the given byte strings; id 0 is the end token."""

    def __init__(self, *tokens: str | bytes) -> None:
        self._spelled = [b"<end>", *(token.encode() if isinstance(token, str) else token for token in tokens)]
        self.special_ids = frozenset({0})

    def token_bytes(self, token_id: int) -> bytes:
        return self._spelled[token_id]


def _run(tokens: list[str], chunk: int = 1, **options: Any) -> tuple[list[Delta], ChoiceText]:
    choice = ChoiceText(_Spelled(*tokens), **options)
    ids = list(range(1, len(tokens) + 1))
    deltas = [choice.feed(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
    return [*deltas, choice.finish()], choice


def _text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_stream_emoji() -> None:
    text = "👨‍👩‍👧 family 中文，你好"
    for size in (1, 2):
        ids = tiny.byte_ids(text)
        choice = ChoiceText(tiny.bpe())
        deltas = [choice.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
        deltas.append(choice.finish())
        assert _text(deltas) == text
        assert not any("\ufffd" in delta.text for delta in deltas)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_stream_stop_split(chunk: int) -> None:
    deltas, choice = _run(["ok", "\n", "\nUs", "er: hi", "more"], chunk, stop=["\n\nUser:"])
    assert [delta.text for delta in deltas if delta.text] == ["ok"], "no part of the stop string was ever sent"
    assert (choice.stop, choice.tokens, choice.ended) == ("\n\nUser:", 4, True)


def test_stream_stop_false() -> None:
    deltas, choice = _run(["E", "N", "A"], stop=["END"])
    assert [delta.text for delta in deltas] == ["", "", "ENA", ""]
    assert choice.stop is None


def test_stream_stop_first() -> None:
    deltas, choice = _run(["STOP and more"], stop=["STOP"])
    assert (_text(deltas), choice.stop, choice.tokens) == ("", "STOP", 1)


def test_a_held_tail_is_released_when_the_answer_ends() -> None:
    deltas, choice = _run(["E", "N"], stop=["END"])
    assert [delta.text for delta in deltas] == ["", "", "EN"]
    assert choice.stop is None


def test_only_what_can_begin_a_stop_string_is_held() -> None:
    deltas, _ = _run(["aab", "a", "a", "c"], stop=["aabaac", "zz"])
    assert _text(deltas) == ""
    deltas, _ = _run(["xaab", "aab", "a"], stop=["aabaac"])
    assert [delta.text for delta in deltas] == ["x", "aab", "", "aaba"]


def test_the_stop_string_can_be_included() -> None:
    deltas, choice = _run(["a", "<", "/x>b"], stop=["</x>"], include_stop=True)
    assert (_text(deltas), choice.stop) == ("a</x>", "</x>")


def test_the_first_stop_string_to_be_complete_counts_and_the_longer_of_two() -> None:
    assert _text(_run(["abcd"], stop=["abcd", "c"])[0]) == "ab"
    deltas, choice = _run(["xabc"], stop=["c", "abc", "bc"])
    assert (_text(deltas), choice.stop) == ("x", "abc")


def test_min_tokens_lets_early_stop_strings_pass() -> None:
    deltas, choice = _run(["END", "a", "END", "b"], stop=["END"], min_tokens=3)
    assert (_text(deltas), choice.tokens) == ("ENDa", 3)
    deltas, choice = _run(["E", "N", "D"], stop=["END"], min_tokens=3)
    assert (_text(deltas), choice.stop) == ("", "END")


def test_the_end_tokens_text_is_hidden_even_if_it_is_no_special_token() -> None:
    choice = ChoiceText(_Spelled("a", "b", "c"))
    assert choice.feed([1, 2, 3], ended_by_token=True).text == "ab"
    assert (choice.finish().text, choice.tokens) == ("", 3)


def test_a_stop_string_of_a_replacement_is_found_in_the_flush() -> None:
    choice = ChoiceText(_Spelled(b"a\xe2"), stop=["\ufffd"])
    assert choice.feed([1]).text == "a"
    assert choice.finish() == Delta(stop="\ufffd")


def test_nothing_follows_an_end() -> None:
    _, choice = _run(["a"], stop=["a"])
    assert (choice.feed([1]), choice.finish()) == (Delta(stop="a"), Delta(stop="a"))
    assert choice.tokens == 1


def test_logprobs_come_with_their_text_and_never_from_inside_a_stop_string() -> None:
    choice = ChoiceText(_Spelled("ab", "E", "N", "A", "xE", "ND"), stop=["END"])
    logprobs = [Logprobs(token_id=index, logprob=-float(index), top=((2, -0.5),)) for index in range(7)]
    seen = [[entry.text for entry in choice.feed([i], [logprobs[i]]).logprobs] for i in range(1, 7)]
    assert seen == [["ab"], [], [], ["E", "N", "A"], [], ["xE"]]
    assert choice.stop == "END"


def test_logprobs_carry_bytes_and_alternatives() -> None:
    choice = ChoiceText(_Spelled(b"\xe2\x82", b"\xac"))
    (entry,) = choice.feed([1], [Logprobs(token_id=1, logprob=-1.5, top=((1, -1.5), (2, -3.0)))]).logprobs
    assert (entry.token_id, entry.logprob, entry.text, entry.raw) == (1, -1.5, "\ufffd", b"\xe2\x82")
    assert [(top.token_id, top.raw) for top in entry.top] == [(1, b"\xe2\x82"), (2, b"\xac")]


def test_the_end_tokens_logprob_is_reported() -> None:
    choice = ChoiceText(_Spelled("a"))
    logprobs = [Logprobs(token_id=1, logprob=-1.0), Logprobs(token_id=0, logprob=-2.0)]
    assert [entry.token_id for entry in choice.feed([1, 0], logprobs, ended_by_token=True).logprobs] == [1, 0]


_LETTERS = st.text(st.sampled_from("ab€"), min_size=1, max_size=4)


@settings(deadline=None)
@given(
    tokens=st.lists(_LETTERS, max_size=12),
    stops=st.lists(_LETTERS, max_size=3),
    cuts=st.lists(st.integers(0, 12), max_size=5),
    min_tokens=st.integers(0, 4),
    include=st.booleans(),
)
def test_any_chunking_gives_the_text_before_the_first_stop_string(
    tokens: list[str], stops: list[str], cuts: list[int], min_tokens: int, include: bool
) -> None:
    full = "".join(tokens)
    # The plain definition: the end that comes first, in a token that counts; the longest string that ends there.
    ends = list(itertools.accumulate(map(len, tokens)))
    hits = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(len(stop), len(full) + 1)
        if full[end - len(stop) : end] == stop and sum(edge < end for edge in ends) + 1 >= min_tokens
    ]
    want, reason = full, None
    if hits:
        end, length, reason = min(hits)
        want = full[:end] if include else full[: end + length]
    edges = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    choice = ChoiceText(_Spelled(*tokens), stop=stops, min_tokens=min_tokens, include_stop=include)
    shown = ""
    for start, stop_at in itertools.pairwise(edges):
        shown += choice.feed(list(range(start + 1, stop_at + 1))).text
        assert want.startswith(shown)
    shown += choice.finish().text
    assert (shown, choice.stop) == (want, reason)


def test_a_broken_match_falls_back_as_far_as_it_must() -> None:
    matcher = StopMatcher(["aaab"])
    held = []
    for char in "aaacaaab":
        hit = matcher.feed(char)
        held.append(matcher.held_chars)
    assert (held, hit) == ([1, 2, 3, 0, 1, 2, 3, 0], (1, "aaab"))


def test_matching_takes_time_linear_in_the_text() -> None:
    matcher = StopMatcher(["a" * 1000 + "b"])
    for _ in range(200):
        assert matcher.feed("a" * 1000) is None
    assert matcher.held_chars == 1000
