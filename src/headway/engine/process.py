"""The API process's end of the engine process: start it, talk to it, notice when it dies or hangs, end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from headway.engine.channel import HEADER, LARGEST_FRAME, frame
from headway.engine.launch_spec import EngineSpec
from headway.engine.messages import FromEngine, Stop, ToEngine, decode_from_engine

log = logging.getLogger("headway.engine")

PACKAGES = Path(__file__).resolve().parents[2]

Receive = Callable[[list[FromEngine]], None]
Ended = Callable[[int | None], None]


class EngineProcess:
    """One run of the engine process; a restart is a new object."""

    def __init__(self, child: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._child = child
        self._reader = reader
        self._writer = writer
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, spec: EngineSpec, receive: Receive, ended: Ended) -> EngineProcess:
        """Spawn the process; ``receive`` gets its messages, ``ended`` is called once when it is gone."""
        ours, theirs = socket.socketpair()
        # One native thread pool per process, and BLAS, which spins, is the reference kernels': it must know its width
        # before it is loaded.
        environ = dict(os.environ)
        # The child runs this very package, wherever the parent found it.
        environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), *filter(None, [environ.get("PYTHONPATH")])])
        reference = spec.config.kernels == "reference"
        if spec.threads or not reference:
            for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                environ[name] = str(spec.threads if reference else 1)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            argv = [sys.executable, "-m", "headway.engine.worker", str(theirs.fileno())]
            argv.append(msgspec.json.encode(spec).decode())
            child = subprocess.Popen(  # noqa: ASYNC220 - returns as soon as the child is spawned
                argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, env=environ
            )
            undo.pop_all()
        ours.setblocking(False)
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:  # a start that is cancelled here has nobody else who knows of the child
            ours.close()
            child.kill()
            child.wait()
            raise
        process = cls(child, reader, writer)
        process._pump = asyncio.create_task(process._read(receive, ended), name="engine-reader")
        return process

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def send(self, *messages: ToEngine) -> None:
        """Queue messages for the engine; a dead engine swallows them (``ended`` has the word then)."""
        if not self._writer.is_closing():
            self._writer.write(frame(list(messages)))

    async def _read(self, receive: Receive, ended: Ended) -> None:
        """Hand on every frame until the other end closes."""
        try:
            while True:
                header = await self._reader.readexactly(HEADER.size)
                (length,) = HEADER.unpack(header)
                if length > LARGEST_FRAME:
                    raise ConnectionError(f"frame of {length} bytes from the engine")
                messages = decode_from_engine(await self._reader.readexactly(length))
                try:
                    receive(messages)
                except Exception:  # a fault over one message must not silence all the others
                    log.exception("a message of the engine could not be handled")
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            pass
        finally:
            self._writer.close()
        code = await asyncio.to_thread(self._reap)
        ended(code)

    def _reap(self) -> int | None:
        """Wait for the exit status of a process whose socket has closed; kill it if it lingers."""
        try:
            return self._child.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait(timeout=5.0)

    def kill(self) -> None:
        """End it the hard way; works on a stopped process too."""
        with contextlib.suppress(ProcessLookupError):
            self._child.send_signal(signal.SIGKILL)

    async def stop(self, limit_s: float = 1.0) -> None:
        """Ask it to end, then make it: in the middle of a long step, or stopped, it does not listen."""
        self.send(Stop())
        assert self._pump is not None
        try:
            await asyncio.wait_for(asyncio.shield(self._pump), limit_s)
        except TimeoutError:
            self.kill()
            await self._pump
