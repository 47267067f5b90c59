"""Chat and completions, plain and streamed, as the official client sees them."""

from __future__ import annotations

import asyncio

import openai
import pytest

from headway.errors import ContextExceeded, EngineDied, Overloaded
from headway.types import Chunk, Finish, Request, Usage
from tests.fakes import FakeBackend, Step
from tests.gateway.conftest import Serve, chat, events, wait_until

HI: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


def test_plain_chat_with_the_official_client(serve: Serve) -> None:
    with serve().client() as client:
        answer = client.chat.completions.create(model="fake-1", messages=HI)
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.id.startswith("chatcmpl-")


def test_streamed_chat_with_the_official_client(serve: Serve) -> None:
    with serve().client() as client:
        chunks = list(client.chat.completions.create(model="fake-1", messages=HI, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello, world!"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 5 + ["stop"]


def test_the_asynchronous_client_streams_too(serve: Serve) -> None:
    server = serve()

    async def run() -> str:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", http_client=http) as client:
            stream = await client.chat.completions.create(model="fake-1", messages=HI, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(run()) == "Hello, world!"


def test_n_choices_interleave_and_keep_their_index(serve: Serve) -> None:
    with serve().client() as client:
        plain = client.chat.completions.create(model="fake-1", messages=HI, n=3)
        chunks = list(client.chat.completions.create(model="fake-1", messages=HI, n=3, stream=True))
    assert [choice.index for choice in plain.choices] == [0, 1, 2]
    assert {choice.message.content for choice in plain.choices} == {"Hello, world!"}
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 12
    for index in range(3):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == "Hello, world!"
        assert [c.finish_reason for c in mine if c.finish_reason] == ["stop"]


def test_chat_logprobs(serve: Serve) -> None:
    with serve().client() as client:
        plain = client.chat.completions.create(model="fake-1", messages=HI, logprobs=True, top_logprobs=2)
        chunks = list(
            client.chat.completions.create(model="fake-1", messages=HI, logprobs=True, top_logprobs=2, stream=True)
        )
    assert plain.choices[0].logprobs is not None
    content = plain.choices[0].logprobs.content
    assert content is not None
    assert [t.token for t in content] == ["Hello", ",", " world", "!"]
    assert content[0].bytes == list(b"Hello")
    assert [t.token for t in content[0].top_logprobs] == ["Hello", "alt1"]
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content or []]
    assert streamed == content


def test_logprobs_without_alternatives_and_without_being_asked(serve: Serve) -> None:
    server = serve()
    asked = server.post(chat(logprobs=True)).json()["choices"][0]["logprobs"]
    assert asked["content"][0]["top_logprobs"] == []
    assert server.post(chat()).json()["choices"][0]["logprobs"] is None


def test_case_stream_usage(serve: Serve) -> None:
    server = serve()
    asked = events(server.post(chat(stream=True, stream_options={"include_usage": True})).text)
    assert asked[-1] == "[DONE]"
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"]["completion_tokens"] == 4
    assert all(event["usage"] is None for event in asked[:-2])
    unasked = events(server.post(chat(stream=True)).text)
    assert unasked[-1] == "[DONE]"
    assert all("usage" not in event and event["choices"] for event in unasked[:-1])
    assert server.metric("headway_tokens_total", kind="output") == 8
    assert server.metric("headway_tokens_total", kind="prompt") == 10


def test_case_stream_finish(serve: Serve) -> None:
    server = serve()
    assert events(server.post(chat(stream=True, max_tokens=1)).text)[-2]["choices"][0]["finish_reason"] == "length"
    assert events(server.post(chat(stream=True, max_tokens=4)).text)[-2]["choices"][0]["finish_reason"] == "stop"


def test_case_stream_stop_first(serve: Serve) -> None:
    def script(request: Request) -> list[Step]:
        usage = Usage(prompt_tokens=3, completion_tokens=1)
        return [Chunk(token_ids=(9,), finish=Finish.STOP, stop_reason="END", usage=usage)]

    server = serve(FakeBackend(script=script))
    got = events(server.post(chat(stream=True, stream_options={"include_usage": True})).text)
    assert [event["choices"][0]["delta"] for event in got[:2]] == [{"role": "assistant", "content": ""}, {}]
    assert got[1]["choices"][0]["finish_reason"] == "stop"
    assert got[1]["choices"][0]["stop_reason"] == "END"
    assert [event["usage"] for event in got[:-1] if event["usage"]] == [got[2]["usage"]]
    assert got[3:] == ["[DONE]"]
    plain = server.post(chat()).json()
    assert plain["choices"][0]["message"]["content"] == ""
    assert plain["usage"]["completion_tokens"] == 1


def test_case_stream_stop_false_held_back_text_arrives_and_empty_deltas_do_not(serve: Serve) -> None:
    def script(request: Request) -> list[Step]:
        held_back = Chunk(text="", token_ids=(1,))
        return [held_back, held_back, Chunk(text="ENA", token_ids=(2,), finish=Finish.STOP, usage=Usage())]

    server = serve(FakeBackend(script=script))
    deltas = [e["choices"][0]["delta"] for e in events(server.post(chat(stream=True)).text)[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "ENA"}, {}]
    ids = [
        e["choices"][0].get("token_ids")
        for e in events(server.post(chat(stream=True, return_token_ids=True)).text)[:-1]
    ]
    assert ids == [None, [1], [1], [2], None]


@pytest.mark.parametrize("text", ["👨‍👩‍👧 家族", "line\nbreak\r\n\u2028", 'quote " and \\ back', "\x00 null"])
def test_case_stream_emoji_any_text_survives_the_wire(serve: Serve, text: str) -> None:
    with serve(FakeBackend(tuple(text))).client() as client:
        chunks = list(client.chat.completions.create(model="fake-1", messages=HI, stream=True))
        plain = client.chat.completions.create(model="fake-1", messages=HI)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert plain.choices[0].message.content == text


def test_completions_of_every_form_of_prompt(serve: Serve) -> None:
    server = serve()
    with server.client() as client:
        one = client.completions.create(model="fake-1", prompt="Once")
        many = client.completions.create(model="fake-1", prompt=["a", "b"], n=2)
        ids = client.completions.create(model="fake-1", prompt=[5, 6, 7])
        lists = client.completions.create(model="fake-1", prompt=[[5], [6, 7]])
        stream = list(client.completions.create(model="fake-1", prompt=["a", "b"], n=2, stream=True))
    assert one.choices[0].text == "Hello, world!"
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    assert many.usage is not None
    assert many.usage.completion_tokens == 16
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    assert [c.text for c in lists.choices] == ["Hello, world!"] * 2
    for index in range(4):
        assert "".join(c.choices[0].text for c in stream if c.choices[0].index == index) == "Hello, world!"
    assert server.backend.requests[0].text == "Once"
    assert server.backend.requests[3].token_ids == (5, 6, 7)
    assert {r.params.max_tokens for r in server.backend.requests} == {16}


def test_echo_with_logprobs_of_the_prompt(serve: Serve) -> None:
    server = serve()
    with server.client() as client:
        answer = client.completions.create(model="fake-1", prompt="ab", echo=True, logprobs=1)
        stream = list(client.completions.create(model="fake-1", prompt="ab", echo=True, logprobs=1, stream=True))
    choice = answer.choices[0]
    assert choice.text == "abHello, world!"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "Hello", ",", " world", "!"]
    assert choice.logprobs.token_logprobs == [None, -0.25, -0.25, -0.25, -0.25, -0.25]
    assert choice.logprobs.text_offset == [0, 1, 2, 7, 8, 14]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[2] == {"Hello": -0.25}
    assert "".join(c.choices[0].text for c in stream) == choice.text
    offsets = [offset for c in stream if c.choices[0].logprobs for offset in c.choices[0].logprobs.text_offset or []]
    assert offsets == choice.logprobs.text_offset


def test_echo_of_ids_and_of_nothing_more(serve: Serve) -> None:
    server = serve()
    body = {"model": "fake-1", "prompt": [98, 99], "echo": True, "max_tokens": 0}
    answer = server.post(body, "/v1/completions").json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_in_vllms_form(serve: Serve) -> None:
    body = {"model": "fake-1", "prompt": "ab", "prompt_logprobs": 1}
    choice = serve().post(body, "/v1/completions").json()["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"99": {"logprob": -0.25, "decoded_token": "b"}}]


def test_refusals_of_the_backend_are_statuses_even_on_a_stream(serve: Serve) -> None:
    refused = ContextExceeded("3000 tokens are asked for, the context has 2048", param="max_tokens")
    with (
        serve(FakeBackend(refuse=refused)).client() as client,
        pytest.raises(openai.BadRequestError, match="2048") as caught,
    ):
        client.chat.completions.create(model="fake-1", messages=HI, stream=True)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_tokens"


def test_overload_says_when_to_come_back(serve: Serve) -> None:
    answer = serve(FakeBackend(refuse=Overloaded("full", retry_after_s=3.0))).post(chat())
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "server_is_overloaded"
    assert 3000 <= int(answer.headers["retry-after-ms"]) <= 3750
    assert int(answer.headers["retry-after"]) == 4


def test_case_stream_error_late(serve: Serve) -> None:
    pieces = [f"t{i} " for i in range(9)]
    backend = FakeBackend(pieces, fail_after=5, failure=EngineDied("the engine process ended"))
    server = serve(backend)
    got = events(server.post(chat(stream=True)).text)
    assert got[-1] == "[DONE]"
    assert got[-2]["error"]["code"] == "engine_died"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in got[:-2]) == "t0 t1 t2 t3 t4 "
    assert server.metric("headway_cancelled_total", phase="decode", cause="error") == 1
    with server.client() as client, pytest.raises(openai.APIError, match="engine process ended"):
        list(client.chat.completions.create(model="fake-1", messages=HI, stream=True))
    plain = server.post(chat())
    assert plain.status_code == 500
    assert plain.json()["error"]["code"] == "engine_died"
    assert server.metric("headway_cancelled_total", phase="decode", cause="error") == 3
    assert server.metric("headway_refused_total", reason="engine_died") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_that_nobody_foresaw_tells_the_caller_nothing_but_an_id(serve: Serve, stream: bool) -> None:
    server = serve(FakeBackend(fail_after=2))
    answer = server.post(chat(stream=stream), headers={"x-request-id": "mine-1"})
    error = events(answer.text)[-2]["error"] if stream else answer.json()["error"]
    assert error["message"] == "internal error; request id mine-1"
    assert answer.status_code == (200 if stream else 500)
    wait_until(lambda: server.gateway.running == 0)


def test_an_answer_without_a_finish_is_a_failure(serve: Serve) -> None:
    server = serve(FakeBackend(script=lambda request: [Chunk(text="half")]))
    got = events(server.post(chat(stream=True)).text)
    assert got[-2]["error"]["code"] == "engine_died"
    assert server.post(chat()).status_code == 500


def test_what_a_chat_asks_of_the_backend(serve: Serve) -> None:
    server = serve()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "q\u0000", "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ],
        tools=[tool],
        tool_choice="auto",
        max_completion_tokens=7,
        max_tokens=3,
        stop="X",
        top_k=-1,
        logit_bias={"5": -100},
        seed=None,
        temperature=None,
        priority=-2,
    )
    assert server.post(body).status_code == 200
    request = server.backend.requests[0]
    assert request.messages is not None
    assert [m.role for m in request.messages] == ["developer", "user", "assistant", "tool"]
    assert request.messages[0].content == "a\nb"
    assert request.messages[2].tool_calls[0].name == "f"
    assert request.tools == (tool,)
    assert request.priority == -2
    params = request.params
    assert (params.max_tokens, params.stop, params.top_k, params.logit_bias) == (7, ("X",), 0, {5: -100.0})
    assert (params.temperature, params.seed) == (1.0, None)
