"""Threads that share one task at a time and sleep in between.

OpenBLAS's own threads spin and yield at every product's end: beside a busy neighbour (the API process, a load
generator) each yield gives a whole time slice away, and a step takes ten times as long. These wait on a lock instead,
and take small pieces of work in turn, so that a core that is half lost costs its share and not the whole step.

While a step runs each thread keeps to a core of its own: a thread that wakes another is often joined by it on its own
core, where the two take turns beside an idle one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """``threads`` threads, of which the caller's is one."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._cores = _cores(threads)
        self._others = [_Worker(number, self._cores[number : number + 1]) for number in range(1, threads)]
        weakref.finalize(self, _stop, self._others)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Keep the calling thread on its core; only for a step, as threads and processes that it starts inherit it."""
        if not self._cores:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores[:1])
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def share(self, task: Callable[[T, int], None], items: Sequence[T]) -> None:
        """Call ``task(item, worker number)`` once for every item, in any order; return when all are done."""
        turns = iter(items)
        others = self._others[: len(items) - 1]
        for other in others:
            other.begin(task, turns)
        error: BaseException | None = None
        try:
            _take(task, turns, 0)
        except BaseException as mine:
            error = mine
        for other in others:
            error = other.end() or error
        if error is not None:
            raise error


class _Worker:
    """One thread, its task and the two locks that hand it over."""

    def __init__(self, number: int, cores: Sequence[int]) -> None:
        self._number = number
        self._cores = cores
        self._begun, self._ended = threading.Lock(), threading.Lock()
        self._begun.acquire()
        self._ended.acquire()
        self._work: Callable[[], None] | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._loop, name=f"kernels-{number}", daemon=True).start()

    def begin(self, task: Callable[[T, int], None], turns: Iterator[T]) -> None:
        self._work = lambda: _take(task, turns, self._number)
        self._begun.release()

    def end(self) -> BaseException | None:
        """Wait for the task, or take it back when the thread has not even woken; return what it raised."""
        if self._begun.acquire(blocking=False):
            return None
        self._ended.acquire()
        error, self._error = self._error, None
        return error

    def stop(self) -> None:
        self._work = None
        self._begun.release()

    def _loop(self) -> None:
        if self._cores:
            os.sched_setaffinity(0, self._cores)
        while True:
            self._begun.acquire()
            if self._work is None:
                return
            try:
                self._work()
            except BaseException as error:  # handed to the caller by end()
                self._error = error
            self._ended.release()


def _take(task: Callable[[T, int], None], turns: Iterator[T], number: int) -> None:
    for item in turns:  # next() of a list's iterator is atomic
        task(item, number)


def _cores(threads: int) -> list[int]:
    """Return a core for each thread, or none where the system or other work must choose."""
    if threads == 1 or not hasattr(os, "sched_setaffinity"):
        return []
    mask = sorted(os.sched_getaffinity(0))
    return mask if len(mask) == threads else []


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()
