"""How the loops are compiled and kept, and how threads share them out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from histograph_post.heads.compiled import loops


def test_code_of_other_loops_is_dropped_and_that_of_these_is_kept(tmp_path: Path) -> None:
    old = [tmp_path / name for name in ("products.dot-1.py3.nbi", "row_loops.clear-2.py3.1.nbc")]
    other = tmp_path / "strange.f-3.py3.nbi"
    for path in (*old, other):
        path.touch()
    loops.forget_old_code(tmp_path)
    assert not any(path.exists() for path in old)
    assert other.exists()
    old[0].touch()  # as if it was compiled now
    loops.forget_old_code(tmp_path)
    assert old[0].exists()
    (tmp_path / "loops.sha256").write_text("of other loops")
    loops.forget_old_code(tmp_path)
    assert not old[0].exists()


BROKEN = """
import sys, torch
from histograph_post.heads import compiled
from histograph_post.heads.histograph import HistoGraphHead
print(HistoGraphHead([4, 4], 1, dim=8)(torch.randn(5, 2, 4)).shape, compiled.available())
"""


@pytest.mark.parametrize("how", ["import fails", "switched off"])
def test_a_numba_that_does_not_work_is_done_without(tmp_path: Path, how: str) -> None:
    environment = dict(os.environ)
    if how == "import fails":
        (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 1.0 or less')")
        environment["PYTHONPATH"] = str(tmp_path)
    else:
        environment["NUMBA_DISABLE_JIT"] = "1"
    command = [sys.executable, "-c", BROKEN]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["torch.Size([1,", "1])", "False"]


AT_EXIT = """
import atexit, torch
from histograph_post.heads.compiled import loops
from histograph_post.heads.histograph import HistoGraphHead
loops.SMALL_WORK = 0
torch.set_num_threads(3)
head = HistoGraphHead([6] * 4, 1, dim=8, heads=2)
history, batch = torch.randn(40, 4, 6), torch.arange(4).repeat_interleave(10)
before = head(history, batch)
atexit.register(lambda: print(torch.equal(head(history, batch), before)))
"""


def test_a_head_still_runs_when_a_process_ends() -> None:
    command = [sys.executable, "-c", AT_EXIT]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True"]
