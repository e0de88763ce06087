"""The entry point: signals first, then what has to be so before torch is imported.

Ctrl-C and SIGTERM may come at any moment and any number of times: one line, and 130 or 143. While
a command is at work, the first one is raised, so that what is half done is put away. Before (Python
is still importing), after, and the second time, the process just ends: whatever it leaves behind,
the same command resumes. Imports nothing that takes time.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: What the line calls a signal.
_NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

#: Whether the next signal is raised, and whether the line has been printed.
_raises = _told = False


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.number = number

    @property
    def exit_code(self) -> int:
        """What a shell calls a process that ended by it."""
        return 128 + self.number


def handle_interrupts() -> None:
    """Let signals end this process with a line; for the process of a command alone."""
    for number in _NAMES:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks for
            signal.signal(number, _handle)
    atexit.register(_end_as_told)


def _end_as_told() -> None:
    """Keep the exit code that was announced: Python removes its handlers before it has ended."""
    for number in _NAMES if _told else ():
        signal.signal(number, signal.SIG_IGN)


def _handle(number: int, frame: FrameType | None) -> None:
    global _raises
    interrupted = Interrupted(number)
    if _raises:
        _raises = False
        raise interrupted
    tell(interrupted)
    os._exit(interrupted.exit_code)


def tell(interrupted: KeyboardInterrupt) -> int:
    """Print the line, once; return the exit code."""
    global _told
    if not isinstance(interrupted, Interrupted):
        interrupted = Interrupted()
    if not _told:
        _told = True
        line = f"{_NAMES[signal.Signals(interrupted.number)]}; run the same command again to resume"
        try:
            # Not by its own write: a signal may have come in the middle of another one.
            os.write(sys.stderr.fileno(), f"{line}\n".encode())
        except (OSError, ValueError, AttributeError):  # no file behind it: a test, or closed
            print(line, file=sys.stderr)
    return interrupted.exit_code


@contextmanager
def raised_once() -> Iterator[None]:
    """Let the first signal be raised as a :class:`KeyboardInterrupt`."""
    global _raises, _told
    before, _raises, _told = _raises, True, False
    try:
        yield
    finally:
        _raises = before


def _have_streams() -> None:
    """Let results be printed where there is no stdout, or one that does not know all signs."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for the whole process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main() -> None:
    """Run the command line."""
    handle_interrupts()
    _have_streams()
    # Threads of OpenMP wait by spinning. On a machine with other things to do each then waits for
    # one that is not running, and small batches take ten times as long; threads that sleep at once
    # double the time on a quiet machine. So they spin for a moment. Read when torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Not that all parameters are used, after it was asked to look for others; nor who hung up.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from .app import run

    run()
