"""Ctrl-C and SIGTERM at any moment: one line, and the exit code that a shell expects."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..helpers import histograph

#: Sends a signal to itself at each of some moments: when a module is looked for, or at the end.
WORDS = """
import atexit, os, signal, sys
number, *moments = sys.argv.pop(1).split(",")

def send():
    os.kill(os.getpid(), int(number))

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in moments:
            moments.remove(name)
            try:
                send()
            finally:
                if "twice" in moments:
                    send()

sys.meta_path.insert(0, Finder())
if "end" in moments:
    atexit.register(send)
from histograph_cli.main import main
main()
"""

INTERRUPTED = "interrupted; run the same command again to resume\n"
TERMINATED = "terminated; run the same command again to resume\n"


def run(moments: str, *words: str, number: int = signal.SIGINT) -> tuple[int, str]:
    command = [sys.executable, "-c", WORDS, f"{int(number)},{moments}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    return done.returncode, done.stderr


@pytest.mark.parametrize("moments", ["typer", "rich.console", "histograph_cli.app"])
def test_while_python_is_importing(moments: str) -> None:
    assert run(moments, "--help") == (130, INTERRUPTED)


def test_after_the_work_is_done() -> None:
    assert run("end", "--version") == (130, INTERRUPTED)


@pytest.mark.parametrize(
    ("moments", "number", "expected"),
    [("torch,twice", signal.SIGINT, INTERRUPTED), ("torch", signal.SIGTERM, TERMINATED)],
)
def test_while_a_command_is_at_work(
    tmp_path: Path, moments: str, number: signal.Signals, expected: str
) -> None:
    words = ("train-head", str(tmp_path / "a.cache"), "-o", str(tmp_path / "run"))
    assert run(moments, *words, number=number) == (128 + number, expected)
    assert list(tmp_path.iterdir()) == []


def test_a_second_one_after_the_line() -> None:
    words = ("verify", "nowhere.cache")
    assert run("histograph_post.caches,end", *words) == (130, INTERRUPTED)


@pytest.mark.parametrize("ends", ["sys.exit(0)", "raise Odd('\\x1b[2J')"])
def test_code_of_the_user_that_ends_the_process_is_one_line(tmp_path: Path, ends: str) -> None:
    code = f"import sys\nclass Odd(BaseException): pass\ndef graphs():\n    {ends}\n"
    (tmp_path / "mine.py").write_text(code)
    data = f"{tmp_path / 'mine.py'}:graphs"
    done = histograph("pretrain", "--model", "gin", "--data", data, "-o", tmp_path / "out")
    assert done.exit_code == 1
    assert re.search(
        r"^error: mine\.py:4: found (SystemExit\(0\)|Odd\(\?\[2J\))", done.stderr, re.M
    )
    assert not (tmp_path / "out").exists()


def test_a_signal_while_python_ends_changes_nothing() -> None:
    """It has taken its handlers away by then: the process would die of the signal."""
    words = (
        "import os, signal, sys\n"
        "import histograph_cli.main as main\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, number=os.getpid()): kill(number, 15)\n"
        "sys.modules['last'] = Last()\n"
        "main.handle_interrupts()\n"
        "sys.exit(main.tell(main.Interrupted(signal.SIGTERM)))\n"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (143, TERMINATED)


def test_a_stdout_that_is_closed_or_knows_ascii_alone() -> None:
    """As a service manager or an old terminal gives it; the help has signs beyond ASCII."""
    command = f"{sys.executable} -m histograph_cli --help"
    for words, encoding in ((f"{command} >&-", "utf-8"), (command, "ascii")):
        given = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(words, shell=True, capture_output=True, check=False, env=given)
        assert (done.returncode, done.stderr) == (0, b"")
