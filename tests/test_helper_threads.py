"""Helpers do what they are given once, whatever becomes of threads and processes."""

from __future__ import annotations

import os
import subprocess
import sys
from threading import Event, Semaphore

import pytest

from histograph_post.helper_threads import MOST_HELPERS, start_helper


def run(code: str) -> list[str]:
    """Return what a process of its own prints, word by word."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_helper_hands_results_and_errors_on() -> None:
    found: list[int] = []
    start_helper(found.append, 3).result()
    assert found == [3]

    def fail() -> None:
        raise ValueError("the graph is too large")

    with pytest.raises(ValueError, match="too large"):
        start_helper(fail).result()


def test_what_waits_can_be_cancelled_and_what_runs_cannot() -> None:
    started, going, done = Semaphore(0), Event(), []

    def work() -> None:
        started.release()
        going.wait()
        done.append("busy")

    busy = [start_helper(work) for _ in range(MOST_HELPERS)]
    for _ in busy:
        started.acquire()
    waiting = start_helper(done.append, "waiting")
    try:
        assert not any(helper.cancel() for helper in busy)
        assert waiting.cancel()
    finally:
        going.set()
    for helper in busy:
        helper.result()
    start_helper(done.append, "next").result()  # after what has been waiting
    assert done == ["busy"] * MOST_HELPERS + ["next"]


NO_MORE_THREADS = """
import atexit, threading
from histograph_post.helper_threads import start_helper
going, done = threading.Event(), []
busy = start_helper(going.wait)
def refuse(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse  # as on a machine that has none left
helped = start_helper(done.append, "done")
print(len(done), helped.done())
going.set()
busy.result()
atexit.register(lambda: print(*done))  # after the one thread has seen all of its queue
"""


def test_without_a_new_thread_the_work_is_done_once() -> None:
    assert run(NO_MORE_THREADS) == ["1", "True", "done"]


AT_THE_END = """
import atexit
from histograph_post.helper_threads import start_helper
start_helper(print, "helped").result()
atexit.register(lambda: start_helper(print, "alone").result())
"""


def test_at_the_end_of_a_process_the_caller_does_the_work() -> None:
    assert run(AT_THE_END) == ["helped", "alone"]


FORKED = """
import os, sys, threading
from histograph_post.helper_threads import start_helper
def work():
    print(threading.current_thread() is not threading.main_thread(), flush=True)
start_helper(work).result()
child = os.fork()
start_helper(work).result(timeout=60)
if child:
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_has_helpers_of_its_own() -> None:
    assert run(FORKED) == ["True"] * 3
