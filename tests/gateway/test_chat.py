"""Chat, plain and streamed, as the official client sees it."""

from __future__ import annotations

import asyncio

import openai

from tests.gateway.conftest import Serve


def test_plain_chat_with_the_official_client(serve: Serve) -> None:
    with serve().client() as client:
        answer = client.chat.completions.create(model="fake-1", messages=[{"role": "user", "content": "Hi"}])
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
        stream = client.chat.completions.create(
            model="fake-1", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello, world!"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(c.usage is None for c in chunks)


def test_the_asynchronous_client_streams_too(serve: Serve) -> None:
    server = serve()

    async def run() -> str:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", http_client=http) as client:
            stream = await client.chat.completions.create(
                model="fake-1", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(run()) == "Hello, world!"
