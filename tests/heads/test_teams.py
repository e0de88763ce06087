"""PyTorch's own threads run loops, and neither errors nor forks get lost in them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

import numba

from histograph_post.heads.compiled.loops import Integers, Parts, take_number
from histograph_post.heads.compiled.teams import TeamLoop
from histograph_post.openmp import team_address

if not team_address():
    pytest.skip("PyTorch was not built with GNU's OpenMP here", allow_module_level=True)

#: A loop that waits for something gives up after so many rounds.
PATIENCE = 10**9


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def count_to(number: int) -> Parts:
    return Parts(np.arange(number + 1), np.zeros(1, np.int64))


@numba.njit(nogil=True)
def meet(parts: Parts, arrived: Integers) -> None:
    """Wait until three threads are there."""
    take_number(arrived)
    while arrived[0] < 3 and take_number(parts.next) < PATIENCE:
        pass


@numba.njit(nogil=True)
def do_parts(parts: Parts, done: Integers) -> None:
    while True:
        number = take_number(parts.next)
        if number >= len(done):
            return
        if done[number]:
            raise ValueError("it is done already")
        done[number] = 1


def test_every_thread_of_pytorch_is_there() -> None:
    arrived = np.zeros(1, np.int64)
    TeamLoop(meet)(count_to(3), arrived)
    assert arrived[0] == 3


def test_every_part_is_done_once_and_pytorch_goes_on() -> None:
    matrix = torch.ones(256, 256)
    for number in (1, 2, 1000):
        done = np.zeros(number, np.int64)
        TeamLoop(do_parts)(count_to(number), done)
        assert done.all()
        assert float((matrix @ matrix)[0, 0]) == 256


@pytest.mark.parametrize("number", [1, 100])
def test_what_fails_in_a_thread_fails_in_the_caller(number: int) -> None:
    done = np.ones(number, np.int64)
    with pytest.raises(MemoryError if number > 1 else ValueError):
        TeamLoop(do_parts)(count_to(number), done)


def test_threads_of_python_have_teams_of_their_own() -> None:
    counts = [np.zeros(500, np.int64) for _ in range(2)]
    loop = TeamLoop(do_parts)
    threads = [threading.Thread(target=loop, args=(count_to(500), own)) for own in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(own.all() for own in counts)


FORKED = """
import os, sys, numpy as np, torch
from histograph_post.heads.compiled.loops import Parts
from histograph_post.heads.compiled.teams import TeamLoop
from histograph_post.openmp import team_address
print(team_address() > 0, flush=True)
torch.set_num_threads(3)
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
started, ended = [], []
def work(parts):
    started.append(len(started))
    try:
        if started[-1] == 0:
            raise ValueError("the first of them")
    finally:
        ended.append(0)
try:
    TeamLoop(work)(Parts(np.arange(9), np.zeros(1, np.int64)))
except ValueError as error:
    print(team_address(), error, 1 <= len(started) == len(ended) <= 3, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_does_without_threads_it_does_not_have() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["True", "0 the first of them True"]
