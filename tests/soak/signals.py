"""Ctrl-C and SIGTERM at random moments of a real process, once or twice."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from .attacks import Outcome
from .commands import TRAIN_HEAD, clear

#: Seconds in which such a command is done, about.
_LONGEST = 8.0


def random_signals(work: Path, tries: int, seed: int = 0) -> Outcome:
    """Interrupt a command anywhere between its first line and its last."""
    outcome, draw = Outcome("random signals", "train-head"), random.Random(seed)
    words = [word.replace("{work}", str(work)) for word in TRAIN_HEAD]
    command = [sys.executable, "-W", "ignore", "-m", "histograph_cli", *words]
    for number in range(tries):
        out = clear(work / "trial") / "out"
        sent = draw.choice((signal.SIGINT, signal.SIGTERM))
        process = subprocess.Popen(
            [*command, "-o", str(out)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        _wait_for_handlers(process)
        time.sleep(draw.choice((0.0, 1.0)) * draw.uniform(0, _LONGEST))
        for _ in range(draw.choice((1, 2))):
            process.send_signal(sent)
            time.sleep(draw.uniform(0, 0.2))
        _, said = process.communicate()
        name = "interrupted" if sent is signal.SIGINT else "terminated"
        expected = (128 + sent, f"{name}; run the same command again to resume\n")
        right = (process.returncode, said) in (expected, (0, ""))
        outcome.count(None if right else f"try {number}: exit code {process.returncode}: {said}")
    return outcome


def _wait_for_handlers(process: subprocess.Popen[str]) -> None:
    """Wait until the first line of the command has run: before it, Python itself is in charge."""
    caught = 1 << (signal.SIGTERM - 1)
    while process.poll() is None:
        found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
        if found is not None and int(found[1], 16) & caught:
            return
        os.sched_yield()
