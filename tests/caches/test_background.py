"""Jobs in a thread: in order, within bounds, and no error is lost."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from histograph_post.caches.shard_thread import Background


def test_jobs_run_in_order_in_one_other_thread() -> None:
    ran: list[int] = []
    threads: set[int] = set()

    def job(number: int) -> None:
        ran.append(number)
        threads.add(threading.get_ident())

    with Background(2) as background:
        for number in range(50):
            background.run(job, number)
    assert ran == list(range(50))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_one_job_too_many_waits_for_the_first() -> None:
    started, go = threading.Semaphore(0), threading.Event()

    def job() -> None:
        started.release()
        go.wait()

    with Background(2) as background:
        background.run(job)
        background.run(job)
        third = threading.Thread(target=background.run, args=(job,))
        third.start()
        assert started.acquire(timeout=10)
        assert third.is_alive()
        go.set()
        third.join(timeout=10)
        assert not third.is_alive()


def test_a_failed_job_is_the_last_and_its_error_reaches_the_caller() -> None:
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("disk")

    def hand_over() -> None:
        with Background(3) as background:
            background.run(fail)
            for _ in range(10):
                background.run(ran.append, "later")

    with pytest.raises(ValueError, match="disk"):
        hand_over()
    assert ran == []

    def fail_at_the_end() -> None:
        with Background(3) as background:
            background.run(fail)

    with pytest.raises(ValueError, match="disk"):
        fail_at_the_end()


def test_waiting_ends_with_the_last_job_or_with_an_error() -> None:
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("disk")

    with Background(5) as background:
        for number in range(5):
            background.run(ran.append, number)
        background.wait()
        assert ran == list(range(5))
        background.run(fail)
        with pytest.raises(ValueError, match="disk"):
            background.wait()


@pytest.mark.parametrize("waiting", [1, 3])
def test_an_interrupt_does_not_leave_a_job_half_done(waiting: int) -> None:
    steps: list[int] = []

    def job() -> None:
        os.kill(os.getpid(), signal.SIGINT)  # which the main thread takes while this goes on
        steps.extend(step for step in range(1_000_000) if step % 100_000 == 0)

    def hand_over() -> None:
        with Background(waiting) as background:
            for _ in range(3):
                background.run(job)

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        hand_over()
    assert len(steps) % 10 == 0
    assert steps
    assert threading.active_count() == before
