"""Framed messages over a socket pair: four bytes of length, then MessagePack; the engine process's blocking side."""

from __future__ import annotations

import select
import socket
import struct
import threading

from headway.engine.messages import FromEngine, ToEngine, decode_to_engine, encode

HEADER = struct.Struct("<I")
LARGEST_FRAME = 1 << 30


def frame(messages: list[ToEngine] | list[FromEngine]) -> bytes:
    """Return the bytes on the wire."""
    body = encode(messages)
    return HEADER.pack(len(body)) + body


class Disconnected(Exception):
    """The other process is gone."""


class Channel:
    """The engine process's end: one thread receives, any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._lock = threading.Lock()

    def send(self, messages: list[FromEngine]) -> None:
        """Write all messages in one frame; blocks while the reader is behind."""
        if not messages:
            return
        try:
            with self._lock:
                self._socket.sendall(frame(messages))
        except OSError as error:
            raise Disconnected from error

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """Return the messages that have arrived, waiting up to ``timeout_s`` for the first one."""
        messages = self._take()
        if messages:
            return messages
        ready, _, _ = select.select([self._socket], [], [], timeout_s)
        while ready:
            try:
                data = self._socket.recv(1 << 20)
            except OSError as error:
                raise Disconnected from error
            if not data:
                raise Disconnected
            self._buffer += data
            ready, _, _ = select.select([self._socket], [], [], 0)
        return self._take()

    def _take(self) -> list[ToEngine]:
        """Cut the whole frames off the buffer."""
        messages: list[ToEngine] = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, start)
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            messages += decode_to_engine(bytes(self._buffer[start + HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return messages
