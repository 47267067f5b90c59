"""Joins engine and gateway to a server: bind, start, say ready, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.config import Config, environment
from headway.engine.host import EngineHost
from headway.engine.messages import Status
from headway.errors import ConfigError, HeadwayError
from headway.kernels.machine import usable_threads
from headway.models.pull import obtain
from headway.telemetry.clock import MonotonicClock
from headway.telemetry.metrics import Metrics

if TYPE_CHECKING:
    import uvicorn

    from headway.gateway.app import Gateway

log = logging.getLogger("headway.serve")


def serve(config: Config) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP; return the exit status."""
    log.info("settings", extra={"fields": msgspec.to_builtins(config)})
    listener = _bind(config.server.host, config.server.port)  # before the model: a taken port is known at once
    try:
        path = obtain(config.model, environment())
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(config, path, listener))
    finally:
        listener.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not built for this platform: asyncio's own loop serves as well
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _bind(host: str, port: int) -> socket.socket:
    """Return a bound, not yet listening socket; ConfigError names the address and the way out."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --host or --port"
        ) from error
    bound.setblocking(False)
    return bound


async def _serve(config: Config, path: Path, listener: socket.socket) -> int:
    clock = MonotonicClock()
    metrics = Metrics()
    name = served_name(config.model)
    host = EngineHost(
        path,
        name,
        config.engine,
        threads=config.engine.threads or usable_threads().value,
        clock=clock,
        on_status=lambda status: _observe(metrics, status),
    )
    # Loading makes objects by the hundred thousand and frees few: collections would only walk them, again and again.
    gc.disable()
    starting = asyncio.create_task(host.start())
    try:
        # The HTTP layer's imports take as long as a small model: they go beside the engine's start.
        gateway, server = await asyncio.to_thread(_http, host, config, clock, metrics)
    finally:
        await starting
    gc.enable()
    gc.collect()
    gc.freeze()
    stopping = _on_signals(config, gateway, host, server)
    try:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.002)
        _say_ready(config, name, listener)
        await serving
        if stopping:
            await asyncio.gather(*stopping)
    finally:
        await host.close()
    return 0


def _http(host: EngineHost, config: Config, clock: MonotonicClock, metrics: Metrics) -> tuple[Gateway, uvicorn.Server]:
    import uvicorn

    from headway.gateway.app import Gateway
    from headway.gateway.connection import connection_of

    class Server(uvicorn.Server):
        """Leaves the signals to us: uvicorn would close the listener first, and new requests must get their 503."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    gateway = Gateway(host, config, clock=clock, metrics=metrics, steps=host.steps)
    settings = uvicorn.Config(
        gateway.app,
        http=connection_of(config.server),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        backlog=2048,
    )
    return gateway, Server(settings)


def _on_signals(config: Config, gateway: Gateway, host: EngineHost, server: uvicorn.Server) -> list[asyncio.Task[None]]:
    """First SIGTERM, SIGINT or SIGHUP drains, the second ends what still runs, with an error, and stops."""
    stopping: list[asyncio.Task[None]] = []
    hurry = asyncio.Event()

    async def drain() -> None:
        log.warning("draining: running streams have %.0f s", config.server.drain_s)
        gateway.start_drain()
        patient, hurried = asyncio.create_task(host.drain(config.server.drain_s)), asyncio.create_task(hurry.wait())
        await asyncio.wait((patient, hurried), return_when=asyncio.FIRST_COMPLETED)
        if hurry.is_set():
            patient.cancel()
            await host.drain(0.0)
        hurried.cancel()
        # The last bytes of what has just ended are still on their way through the HTTP layer.
        limit = time.monotonic() + 2.0
        while gateway.running and time.monotonic() < limit:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.force_exit = hurry.is_set()
        server.should_exit = True

    def stop() -> None:
        if stopping:
            hurry.set()
        else:
            stopping.append(asyncio.get_running_loop().create_task(drain()))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup has it ignored
            loop.add_signal_handler(number, stop)
    return stopping


def _say_ready(config: Config, name: str, listener: socket.socket) -> None:
    """Print the one line on stdout that scripts wait for, and a hint for people on stderr."""
    port = listener.getsockname()[1]
    host = config.server.host
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    try:
        print(f"ready {url} model={name} start={since_process_start():.2f}", flush=True)
    except OSError as error:
        raise ConfigError(f"cannot write the ready line to stdout: {error.strerror or error}") from error
    with contextlib.suppress(OSError):  # a full disk under the log is no reason to end
        print(
            f"try: curl {url}/v1/chat/completions -H 'content-type: application/json' "
            f'-d \'{{"model": "{name}", "temperature": 0, '
            f'"messages": [{{"role": "user", "content": "How many days are in a week?"}}]}}\'\n'
            f"dashboard: {url}/",
            file=sys.stderr,
            flush=True,
        )


def since_process_start() -> float:
    """Return the seconds since this process was started, imports included."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError):
        return time.process_time()


def served_name(model: str) -> str:
    """Return the name that requests use: the alias or hub id as it is, of a path the last part."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _observe(metrics: Metrics, status: Status) -> None:
    """Feed the engine's report into the histograms."""
    for step in status.steps:
        metrics.step.observe(step.seconds)
        metrics.step_error.observe(abs(step.predicted - step.seconds) / step.seconds)
    for phase, cause, seconds in status.freed:
        metrics.cancel_to_free.observe(seconds)
        log.debug("freed a request cancelled in %s (%s) after %.4f s", phase, cause, seconds)


__all__ = ["HeadwayError", "serve"]
