"""The attacks: crash points, random kills, several writers and readers at once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import histograph_post as hg
from histograph_post.errors import HistographError

from .commands import COMMANDS, TRAIN_HEAD, Command, clear, contents, difference, typed
from .crashing import DIED, CrashPoints, call_in_child, in_child, wait_for

#: What a command says that finds its own output complete.
_ALREADY = ("found a file; choose another -o", "found an older export")


@dataclass
class Outcome:
    """How many attempts there were of an attack on a command, and what came of them."""

    attack: str
    command: str
    attempts: int = 0
    broken: list[str] = field(default_factory=list)

    def count(self, problem: str | None) -> None:
        """Count an attempt."""
        self.attempts += 1
        if problem is not None:
            self.broken.append(problem)


class Target:
    """A command with what it leaves if nothing goes wrong.

    Args:
        command: The command.
        work: The workspace.
    """

    def __init__(self, command: Command, work: Path) -> None:
        self.command, self.work = command, work
        self.folder, self._before = work / "trial", work / "before"
        self.out = self.folder / ("out.html" if command.name == "report" else "out")
        if command.name == "export":
            self.out = self.folder / "out.pt2"
        clear(self.folder)
        if command.before is not None:
            self._expect(call_in_child(lambda: command.before(work, self.out), self.said), 0)
        shutil.rmtree(self._before, ignore_errors=True)
        shutil.copytree(self.folder, self._before)
        self.old = contents(self.folder)
        counted = work / "count"
        started = time.monotonic()
        self._expect(call_in_child(lambda: self._run_counting(counted), self.said), 0)
        self.seconds = time.monotonic() - started
        self.whole, self.moments = contents(self.folder), int(counted.read_text())

    @property
    def said(self) -> Path:
        """What the last process printed."""
        return self.work / "said"

    def _expect(self, found: int, expected: int) -> None:
        if found != expected:
            raise RuntimeError(f"{self.command.name}: exit code {found}\n{self.said.read_text()}")

    def _run_counting(self, counted: Path) -> None:
        points = CrashPoints(self.folder, None)
        points.install()
        self.command.run(self.work, self.out)
        counted.write_text(str(points.count))

    def reset(self) -> None:
        """Put there what was there before the command."""
        shutil.rmtree(self.folder)
        shutil.copytree(self._before, self.folder)

    def crash(self, moment: int) -> int:
        """Give the command to a process that dies at a moment; return how it ended."""

        def run() -> None:
            CrashPoints(self.folder, moment).install()
            self.command.run(self.work, self.out)

        return call_in_child(run, self.said)

    def problem_until_done(self) -> str | None:
        """Say what is wrong with what is there after a kill: neither the old nor the new one."""
        if self.command.before is None or not os.path.lexists(self.out):
            return None
        name = self.out.name
        found, old, new = (
            {path: value for path, value in all_of.items() if path.split("/")[0] == name}
            for all_of in (contents(self.folder), self.old, self.whole)
        )
        found = {path: value for path, value in found.items() if ".histograph-replaced" not in path}
        return None if found in (old, new) else "neither the old output nor the new one is there"

    def problem_after(self) -> str | None:
        """Give the command again; say what differs from a run that nothing broke."""
        code = call_in_child(lambda: self.command.run(self.work, self.out), self.said)
        said = self.said.read_text()
        if code and not (code == 1 and any(text in said for text in _ALREADY)):
            return f"exit code {code}: {said.strip().splitlines()[-1] if said.strip() else ''}"
        return difference(self.whole, contents(self.folder))


def crash_points(target: Target, at_most: int | None, seed: int = 0) -> Outcome:
    """Die before and after every file operation, or some of them; give the command again."""
    outcome = Outcome("crash points", target.command.name)
    moments: Sequence[int] = range(target.moments)
    if at_most is not None and at_most < len(moments):
        moments = sorted(random.Random(seed).sample(moments, at_most))
    for moment in moments:
        target.reset()
        code = target.crash(moment)
        problem = None if code in (DIED, 0) else f"ended with {code}"
        problem = problem or target.problem_until_done() or target.problem_after()
        outcome.count(None if problem is None else f"moment {moment}: {problem}")
    return outcome


def random_kills(target: Target, kills: int, seed: int = 0) -> Outcome:
    """Kill the command at random times, up to three times in a row; give it again."""
    outcome, draw = Outcome("random kills", target.command.name), random.Random(seed)
    for attempt in range(kills):
        target.reset()
        for _ in range(draw.randint(1, 3)):
            child = in_child(lambda: target.command.run(target.work, target.out), target.said)
            time.sleep(draw.uniform(0, target.seconds))
            os.kill(child, signal.SIGKILL)
            wait_for(child)
        problem = target.problem_until_done() or target.problem_after()
        outcome.count(None if problem is None else f"attempt {attempt}: {problem}")
    return outcome


def writers_and_readers(work: Path, rounds: int, *, writers: int = 2, readers: int = 8) -> Outcome:
    """Let several processes replace one run, with other settings each, while others read it."""
    outcome = Outcome(f"{writers} writers, {readers} readers", "train-head --overwrite")
    clear(work / "trial")
    out = work / "trial" / "out"
    commands = [typed(*TRAIN_HEAD, "--overwrite", "--lr", lr) for lr in ("1e-3", "0.5")]
    known: list[dict[str, Any]] = []
    for command in commands:
        if call_in_child(lambda command=command: command(work, out), work / "said"):
            raise RuntimeError((work / "said").read_text())
        known.append(_without_times(json.loads((out / "results.json").read_text())))
    stop = work / "stop"
    for number in range(rounds):
        stop.unlink(missing_ok=True)
        reading = [in_child(lambda: _read_until(stop, out, known)) for _ in range(readers)]
        said = [work / f"said-{writer}" for writer in range(writers)]
        writing = [
            in_child(lambda w=w: commands[w % 2](work, out), said[w]) for w in range(writers)
        ]
        codes = [wait_for(child) for child in writing]
        stop.touch()
        read = [wait_for(child) for child in reading]
        for code, text in zip(codes, said, strict=True):
            told = code == 1 and "found another writer (" in text.read_text()
            problem = None if code == 0 or told else f"writer ended with {code}: {text.read_text()}"
            outcome.count(problem)
        for code in read:
            outcome.count(None if code == 0 else f"round {number}: a reader found another run")
        found = _without_times(json.loads((out / "results.json").read_text()))
        left = sorted(path.name for path in (work / "trial").iterdir())
        mixed = found not in known or left != ["out"] or 0 not in codes
        outcome.count(f"round {number}: mixed, or left behind: {left}" if mixed else None)
    return outcome


def _without_times(results: dict[str, Any]) -> dict[str, Any]:
    return {name: results[name] for name in ("fits", "readouts", "head")}


def _read_until(stop: Path, out: Path, known: list[dict[str, Any]]) -> None:
    while True:
        done = stop.exists()
        try:
            run = hg.Run.open(out)
            if _without_times(dict(run.results)) not in known:
                raise SystemExit(3)
            run.load_ensemble()
        except HistographError:
            pass  # refused in one line, as while one takes the other's place
        if done:
            return


def chosen(names: Sequence[str], *, slow: bool) -> Iterator[Command]:
    """Yield the commands of these names, all by default."""
    for command in COMMANDS:
        if (not names and (slow or not command.slow)) or command.name in names:
            yield command
