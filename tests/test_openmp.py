"""PyTorch's own threads run what they are given, and errors and forks do not get lost in them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from histograph_post.openmp import run_in_team

if not run_in_team(lambda: None, 1):
    pytest.skip("PyTorch was not built with GNU's OpenMP here", allow_module_level=True)


def test_every_thread_does_the_work_and_the_caller_is_one_of_them() -> None:
    barrier, seen = threading.Barrier(3), []

    def work() -> None:
        barrier.wait(timeout=60)  # nobody is through before all three are there
        seen.append(threading.get_ident())

    assert run_in_team(work, 3)
    assert len(set(seen)) == 3
    assert threading.get_ident() in seen


@pytest.mark.parametrize("error", [ValueError("too large"), KeyboardInterrupt()])
def test_an_error_in_any_thread_is_raised_in_the_caller(error: BaseException) -> None:
    def fail_elsewhere() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise error

    with pytest.raises(type(error)):
        run_in_team(fail_elsewhere, 2)


def test_threads_of_python_have_teams_of_their_own() -> None:
    counts: list[int] = []

    def count() -> None:
        counts.append(0)
        assert run_in_team(lambda: counts.append(1), 2)

    threads = [threading.Thread(target=count) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counts) == [0, 0, 1, 1, 1, 1]


FORKED = """
import os, sys
from histograph_post.openmp import run_in_team
print(run_in_team(lambda: None, 2), flush=True)
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
print(run_in_team(lambda: None, 2), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_does_not_wait_for_threads_it_does_not_have() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["True", "False"]


def test_pytorch_goes_on_in_the_same_threads() -> None:
    matrix = torch.ones(256, 256)
    for _ in range(3):
        assert run_in_team(lambda: None, torch.get_num_threads())
        assert float((matrix @ matrix)[0, 0]) == 256
