"""A real server on a free port, and the official clients on it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from headway.config import Config, EngineConfig, ServerConfig
from headway.gateway.app import Gateway
from headway.gateway.connection import connection_of
from tests.fakes import FakeBackend


class Server:
    """A Gateway under uvicorn in a thread of its own."""

    def __init__(self, backend: FakeBackend, config: Config, *, timeout_keep_alive: int = 5) -> None:
        self.backend = backend
        self.gateway = Gateway(backend, config)
        settings = uvicorn.Config(
            self.gateway.app,
            loop="uvloop",
            http=connection_of(config.server),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=timeout_keep_alive,
        )
        self._server = uvicorn.Server(settings)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            self.loop = runner.get_loop()
            runner.run(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """Stop the server; whatever still runs is cancelled."""
        self._server.force_exit = True
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._socket.close()

    def post(self, body: Any, path: str = "/v1/chat/completions", **options: Any) -> httpx.Response:
        """Post JSON; ``body`` may be bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = httpx.Headers(options.pop("headers", {}))
        headers.setdefault("content-type", "application/json")
        return httpx.post(self.url + path, content=content, headers=headers, timeout=10, trust_env=False, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Get a path."""
        return httpx.get(self.url + path, timeout=10, trust_env=False, **options)

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample's value; 0.0 when there is none yet."""
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0

    def connect(self) -> socket.socket:
        """Return a raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def client(self, **options: Any) -> openai.OpenAI:
        """Return the official client."""
        options.setdefault("max_retries", 0)
        http = openai.DefaultHttpxClient(trust_env=False)
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", http_client=http, **options)


Serve = Callable[..., Server]


def wait_until(condition: Callable[[], Any], limit_s: float = 5.0) -> None:
    """Poll until the condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts a server: ``serve(backend, ping_s=..., max_waiting=...)``."""
    servers: list[Server] = []

    def start(backend: FakeBackend | None = None, **settings: Any) -> Server:
        keep_alive_s = settings.pop("keep_alive_s", 5)
        engine = {name: settings.pop(name) for name in ("max_running", "max_waiting") if name in settings}
        config = Config(model="fake", engine=EngineConfig(**engine), server=ServerConfig(**settings))
        server = Server(backend or FakeBackend(), config, timeout_keep_alive=keep_alive_s)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def chat(content: str = "Hi", **fields: Any) -> dict[str, Any]:
    """Return a chat body."""
    return {"model": "fake-1", "messages": [{"role": "user", "content": content}], **fields}


def events(text: str) -> list[Any]:
    """Return the data events of a stream, [DONE] as a string; comments are left out."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
