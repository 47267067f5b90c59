"""A Request becomes a Submit that the model can run; what the engine says becomes Chunks."""

from __future__ import annotations

import pytest

from headway.engine.assembly import Assembly, Limits, prepare
from headway.engine.messages import Emitted, Logprobs
from headway.engine.tokenizer import Tokenizer
from headway.engine.vocabulary import read_gguf
from headway.errors import ContextExceeded, InvalidRequest, NeverFits
from headway.telemetry.clock import FakeClock
from headway.types import Chunk, EngineTiming, Finish, Message, Params, Request
from tests.engine import tiny

SIZE = tiny.bpe().vocabulary_size
LIMITS = Limits(context_tokens=200, capacity_tokens=1000, vocabulary=SIZE)


def request(text: str = "hello", **params: object) -> Request:
    return Request(id="r", model="m", text=text, params=Params(max_tokens=20, **params))  # type: ignore[arg-type]


def emitted(*token_ids: int, **more: object) -> Emitted:
    return Emitted(id="r", token_ids=token_ids, **more)  # type: ignore[arg-type]


def assembled(asked: Request, *said: Emitted) -> list[Chunk]:
    submit = prepare(asked, tiny.bpe(), LIMITS)
    assembly = Assembly(asked, submit, tiny.bpe(), FakeClock())
    return [chunk for one in said for chunk in assembly.feed(one)[0]]


@pytest.mark.parametrize("asked", ["text", "ids", "messages", "logit_bias", "stop_token_ids"])
def test_tokens_that_the_model_has_no_row_for_are_refused(asked: str) -> None:
    """Some checkpoints add tokens to the tokenizer only; such a row would fail the step of every neighbour."""
    metadata = tiny.bpe_metadata(tokenizer__chat_template="{{ messages[0].content }}<pad>")
    last = SIZE
    tokens = [*metadata["tokenizer.ggml.tokens"], "<pad>"]
    types = [*metadata["tokenizer.ggml.token_type"], 3]
    tokenizer = Tokenizer(read_gguf(metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}))
    wanted = {
        "text": request("a<pad>"),
        "ids": Request(id="r", model="m", token_ids=(5, last)),
        "messages": Request(id="r", model="m", messages=(Message(role="user", content="x"),)),
        "logit_bias": request(logit_bias={last: 1.0}),
        "stop_token_ids": request(stop_token_ids=(last,)),
    }[asked]
    with pytest.raises(InvalidRequest, match=str(last)) as caught:
        prepare(wanted, tokenizer, LIMITS)
    assert caught.value.param == {"text": "prompt", "ids": "prompt"}.get(asked, asked)
    assert f"{last - 1}" in caught.value.message
    prepare(wanted, tokenizer, Limits(context_tokens=200, capacity_tokens=1000, vocabulary=last + 1))


def test_the_tokenizers_end_tokens_reach_the_engine() -> None:
    assert set(prepare(request(), tiny.bpe(), LIMITS).ends) == {0, 2}, "<|endoftext|> and <|im_end|>"


def test_a_raw_prompt_begins_with_bos_where_the_model_wants_it_and_ids_are_taken_as_they_are() -> None:
    limits = Limits(context_tokens=200, capacity_tokens=1000, vocabulary=tiny.spm().vocabulary_size)
    ids = prepare(request("hello"), tiny.spm(), limits).token_ids
    assert ids == (1, *tiny.spm().encode("hello", add_special_tokens=False))
    assert prepare(Request(id="r", model="m", token_ids=ids[1:]), tiny.spm(), limits).token_ids == ids[1:]


def test_choices_share_one_tuple_of_prompt_logprobs() -> None:
    asked = request("hi", n=3, prompt_logprobs=1)
    count = len(prepare(asked, tiny.bpe(), LIMITS).token_ids)
    prompt = (None, *(Logprobs(token_id=7, logprob=-1.0, top=((8, -0.5),)) for _ in range(count - 1)))
    said = [emitted(9, index=i, prompt_logprobs=prompt if i == 0 else ()) for i in range(3)]
    firsts = [chunk for chunk in assembled(asked, *said) if chunk.prompt_token_ids]
    assert [chunk.index for chunk in firsts] == [0, 1, 2]
    assert len(firsts[0].prompt_logprobs) == count
    assert all(chunk.prompt_logprobs is firsts[0].prompt_logprobs for chunk in firsts)


def test_stream_stop_split_counts_every_generated_token() -> None:
    ids = tiny.byte_ids("ok\n\nUser: hi, more")
    asked = request(stop=("\n\nUser:",))
    chunks = assembled(asked, *(emitted(token, timing=EngineTiming(first_token=1.0)) for token in ids))
    assert "".join(chunk.text for chunk in chunks) == "ok"
    last = chunks[-1]
    assert (last.finish, last.stop_reason) == (Finish.STOP, "\n\nUser:")
    assert last.usage is not None
    assert last.usage.completion_tokens == len("ok\n\nUser:")
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_stream_stop_false_releases_what_was_held_when_the_tokens_end() -> None:
    ids = tiny.byte_ids("ENA EN")
    said = [*(emitted(token) for token in ids[:-1]), emitted(ids[-1], finish=Finish.LENGTH)]
    chunks = assembled(request(stop=("END",)), *said)
    assert [chunk.text for chunk in chunks if chunk.text] == ["ENA", " ", "EN"]
    assert chunks[-1].finish is Finish.LENGTH


def test_stream_stop_first() -> None:
    (token,) = tiny.byte_ids("X")
    chunks = assembled(request(stop=("X",)), emitted(token), emitted(token))
    assert [chunk.text for chunk in chunks] == ["", ""]
    assert [chunk.finish for chunk in chunks] == [None, Finish.STOP]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 1


def test_min_tokens_counts_for_stop_strings_as_for_end_tokens() -> None:
    ids = tiny.byte_ids("XaXb")
    chunks = assembled(request(stop=("X",), min_tokens=2), *(emitted(token) for token in ids))
    assert "".join(chunk.text for chunk in chunks) == "Xa"
    assert chunks[-1].stop_reason == "X"


def test_a_character_that_the_prompt_begins_is_whole_in_the_answer() -> None:
    ids = tiny.byte_ids("so 👨!")
    asked = Request(id="r", model="m", token_ids=tuple(ids[:5]), params=Params(max_tokens=20))
    assert "".join(chunk.text for chunk in assembled(asked, *map(emitted, ids[5:]))) == "👨!"


@pytest.mark.parametrize(
    ("prompt", "wanted", "kind"),
    [
        (150, 50, None),
        (150, 51, ContextExceeded),
        (199, 1, None),
        (199, None, None),
        (200, None, ContextExceeded),
        (200, 0, ContextExceeded),
    ],
)
def test_prompt_and_answer_may_fill_the_context_and_no_more(
    prompt: int, wanted: int | None, kind: type[ContextExceeded] | None
) -> None:
    asked = Request(id="r", model="m", token_ids=(5,) * prompt, params=Params(max_tokens=wanted))
    if kind is None:
        assert prepare(asked, tiny.bpe(), LIMITS).params.max_tokens == (wanted or 200 - prompt)
    else:
        with pytest.raises(kind, match="200"):
            prepare(asked, tiny.bpe(), LIMITS)


@pytest.mark.parametrize(
    ("prompt", "wanted", "fits"), [(60, 40, True), (60, 41, False), (99, None, True), (100, None, False)]
)
def test_prompt_and_answer_may_fill_the_kv_cache_and_no_more(prompt: int, wanted: int | None, fits: bool) -> None:
    limits = Limits(context_tokens=200, capacity_tokens=100, vocabulary=SIZE)
    asked = Request(id="r", model="m", token_ids=(5,) * prompt, params=Params(max_tokens=wanted))
    if fits:
        assert prepare(asked, tiny.bpe(), limits).params.max_tokens == 100 - prompt
    else:
        with pytest.raises(NeverFits, match=r"\b100\b"):
            prepare(asked, tiny.bpe(), limits)
