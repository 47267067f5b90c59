from __future__ import annotations

import threading

import pytest

from headway.kernels.workers import Workers


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_item_is_done_once(threads: int) -> None:
    workers = Workers(threads)
    done: list[int] = []
    for count in (0, 1, 2, 50):
        done.clear()
        workers.share(lambda item, _: done.append(item), range(count))
        assert sorted(done) == list(range(count))


def test_items_run_at_the_same_time_on_workers_with_different_numbers() -> None:
    meet = threading.Barrier(2, timeout=10)
    numbers = set()

    def task(_: int, number: int) -> None:
        numbers.add(number)
        meet.wait()

    Workers(2).share(task, [0, 1])
    assert numbers == {0, 1}


@pytest.mark.parametrize("bad", range(4))
def test_an_error_in_any_thread_reaches_the_caller_and_the_workers_live_on(bad: int) -> None:
    workers = Workers(2)

    def task(item: int, _: int) -> None:
        if item == bad:
            raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match=f"item {bad}"):
        workers.share(task, range(4))
    done: list[int] = []
    workers.share(lambda item, _: done.append(item), range(4))
    assert sorted(done) == [0, 1, 2, 3]


def test_threads_end_with_their_owner() -> None:
    before = set(threading.enumerate())
    workers = Workers(3)
    started = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("kernels-")]
    assert len(started) == 2
    del workers
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()
