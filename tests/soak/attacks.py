"""The attacks: a kill at every moment, random kills and signals, faults, writers and readers."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import histograph_post as hg
from histograph_post.errors import HistographError

from .commands import TRAIN_HEAD, Command, clear, contents, difference, typed
from .operations import FAULTS, Faults, Snapshots, call_in_child, in_child, wait_for

#: What a command says that finds its own output complete.
_ALREADY = ("found a file; choose another -o", "found an older export", "found an older demo")


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
        self.out = self.folder / f"out{command.suffix}"
        clear(self.folder)
        if command.before is not None:
            self._expect(call_in_child(lambda: command.before(work, self.out), self.said), 0)
        shutil.rmtree(self._before, ignore_errors=True)
        shutil.copytree(self.folder, self._before)
        self.old = contents(self.folder)
        self._load()
        self.reset()
        started = time.monotonic()
        self._expect(call_in_child(lambda: command.run(work, self.out), self.said), 0)
        self.seconds = time.monotonic() - started
        self.whole = contents(self.folder)

    @property
    def said(self) -> Path:
        """What the last process printed."""
        return self.work / "said"

    def _load(self) -> None:
        """Load what the command loads, once for all children."""
        loaded = self.work / "loaded"

        def run() -> None:
            self.command.run(self.work, self.out)
            loaded.write_text(" ".join(sys.modules))

        self._expect(call_in_child(run, self.said), 0)
        for name in loaded.read_text().split():
            with suppress(Exception):  # some are made by their package
                import_module(name)

    def _expect(self, found: int, expected: int) -> None:
        if found != expected:
            raise RuntimeError(f"{self.command.name}: exit code {found}\n{self.said.read_text()}")

    def reset(self, state: Path | None = None) -> None:
        """Put there what was there before the command, or what a kill has left."""
        shutil.rmtree(self.folder)
        shutil.copytree(self._before if state is None else state, self.folder)

    def states(self, copies: Path) -> tuple[int, list[Path]]:
        """Run the command; return its moments, and copies of all that a kill could leave."""
        clear(copies)
        self.reset()
        counted = self.work / "count"

        def run() -> None:
            watch = Snapshots(self.folder, copies)
            with watch.installed():
                self.command.run(self.work, self.out)
            counted.write_text(str(watch.moments))

        self._expect(call_in_child(run, self.said), 0)
        return int(counted.read_text()), sorted(copies.iterdir())

    def operations(self) -> list[str]:
        """Run the command; return its operations."""
        self.reset()
        counted = self.work / "count"

        def run() -> None:
            watch = Faults(self.folder)
            with watch.installed():
                self.command.run(self.work, self.out)
            counted.write_text(" ".join(watch.calls))

        self._expect(call_in_child(run, self.said), 0)
        return counted.read_text().split()

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


def crash_points(target: Target, every: int, seed: int = 0) -> Outcome:
    """Give the command again after a kill at every so-many-th moment.

    A moment is before, in the middle of or after an operation on files. What a kill leaves is a
    copy of the folder then, so that one run shows all moments.
    """
    copies = target.work / "states"
    moments, states = target.states(copies)
    outcome = Outcome(f"{moments} crash points", target.command.name)
    for state in states[seed % every :: every]:
        target.reset(state)
        problem = target.problem_until_done() or target.problem_after()
        outcome.count(None if problem is None else f"state {state.name}: {problem}")
    shutil.rmtree(copies)
    return outcome


def faults(target: Target, every: int, seed: int = 0) -> Outcome:
    """Let every so-many-th operation fail, in each way; give the command again."""
    operations = target.operations()
    outcome = Outcome(f"faults in {len(operations)} operations", target.command.name)
    for number, (fault, error) in enumerate(FAULTS.items()):
        for at in range(1 + (number + seed) % every, len(operations) + 1, every):
            if fault == "short" and operations[at - 1] != "write":
                continue
            target.reset()

            def run(at: int = at, error: int = error) -> None:
                with Faults(target.folder, at, error).installed():
                    target.command.run(target.work, target.out)

            code = call_in_child(run, target.said)
            problem = _unclean(code, target.said.read_text())
            problem = problem or target.problem_until_done() or target.problem_after()
            place = f"{fault} at {at} ({operations[at - 1]})"
            outcome.count(None if problem is None else f"{place}: {problem}")
    return outcome


def _unclean(code: int, said: str) -> str | None:
    """Say what is wrong with how a command ended: it succeeds, or fails in one line with a file."""
    if code == 0:
        return None
    last = (said.strip().splitlines() or [""])[-1]
    is_line = last.startswith("error: ") and "Traceback" not in said and "/" in last
    return None if code == 1 and is_line else f"exit code {code}: {said.strip()[-600:]}"


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


# --- signals

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
