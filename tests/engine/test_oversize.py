"""Texts of many contexts are refused early; whatever might fit is left to the tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.engine.assembly import Limits
from headway.engine.oversize import PIECE, refuse_oversize
from headway.engine.tokenizer import Tokenizer, load_tokenizer
from headway.errors import ContextExceeded
from headway.models.checkpoint import open_checkpoint
from headway.types import Message, Request
from tests.engine.test_host import drive, request, running

LIMITS = Limits(context_tokens=2048, capacity_tokens=1 << 30, vocabulary=400)


class Counting:
    """Notes how much was tokenised."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.characters = 0

    def encode(self, text: str, *, add_special_tokens: bool, allow_special: bool) -> list[int]:
        self.characters += len(text)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, allow_special=allow_special)


@pytest.fixture
def counting(tiny_model: Path) -> Counting:
    return Counting(load_tokenizer(open_checkpoint(tiny_model)))


def ask(text: str | None = None, messages: tuple[Message, ...] | None = None) -> Request:
    return Request(id="a", model="tiny", text=text, messages=messages)


@pytest.mark.parametrize("text", ["x" * 7_000_000, "word " * 1_000_000, "漢" * 1_000_000, "x\n" * 2_000_000])
def test_a_text_of_many_contexts_is_refused_after_a_few_pieces(counting: Counting, text: str) -> None:
    for asked in (
        ask(text),
        ask(messages=(Message(role="user", content=text),)),
        ask(messages=(Message(role="user", content=text[:20_000]),) * 40),
    ):
        counting.characters = 0
        with pytest.raises(ContextExceeded, match="context is 2048") as refused:
            refuse_oversize(asked, counting, LIMITS)  # type: ignore[arg-type]
        assert refused.value.param == ("prompt" if asked.messages is None else "messages")
        assert counting.characters <= 10 * PIECE


def test_more_messages_than_tokens_are_refused_unread(counting: Counting) -> None:
    with pytest.raises(ContextExceeded, match="100000 messages"):
        refuse_oversize(ask(messages=(Message(role="user", content=""),) * 100_000), counting, LIMITS)  # type: ignore[arg-type]
    assert counting.characters == 0


@pytest.mark.parametrize(
    "asked",
    [
        ask("x" * 2000),
        ask("the quick brown fox " * 500),
        ask(messages=(Message(role="user", content=" " * 1_000_000 + "hello" + "\n" * 1_000_000),)),
        ask(messages=(Message(role="assistant", content="x" * 100_000), Message(role="user", content="hi"))),
        Request(id="a", model="tiny", token_ids=(1,) * 2000),
    ],
    ids=["short", "about a context", "blank around", "assistant", "ids"],
)
def test_what_may_fit_is_left_to_the_tokenizer(counting: Counting, asked: Request) -> None:
    refuse_oversize(asked, counting, LIMITS)  # type: ignore[arg-type]


def test_the_host_refuses_before_it_tokenises(tiny_model: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model) as host:
            with pytest.raises(ContextExceeded, match="characters"):
                async for _ in host.generate(request("a", "x" * 1_000_000)):
                    pass

    drive(scenario)
