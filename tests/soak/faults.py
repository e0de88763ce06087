"""Faults of the file system: every write, sync, rename and so on of a command fails once.

A command runs in a forked process in which the ``k``-th call raises ENOSPC, EIO or EACCES, or is
cut short. It must end with one line that names a file, and the same command must succeed
afterwards, with the output of one that was never disturbed::

    python -m tests.soak.faults [COMMAND ...] [EVERY]
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: What goes wrong: an error, or 0 for a write that takes only a part.
FAULTS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES, "short": 0}

#: Functions of ``os`` that change the file system.
CALLS = ("fsync", "replace", "rename", "unlink", "mkdir", "truncate", "ftruncate")


@dataclass
class Faults:
    """Counts the calls that change files under a folder; the ``k``-th one fails."""

    folder: Path
    at: int = 0
    error: int = 0
    calls: list[str] = field(default_factory=list)

    def due(self, call: str, place: Any) -> bool:
        """Take note of a call; say whether it is the one to fail."""
        with contextlib.suppress(TypeError, ValueError):
            if isinstance(place, int):
                place = os.readlink(f"/proc/self/fd/{place}")
            if not Path(os.fsdecode(place)).absolute().is_relative_to(self.folder):
                return False
        self.calls.append(call)
        return len(self.calls) == self.at

    def raise_if_due(self, call: str, place: Any) -> None:
        if self.due(call, place) and self.error:
            named = () if isinstance(place, int) or call == "write" else (os.fspath(place),)
            raise OSError(self.error, os.strerror(self.error), *named)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Patch Python's own calls: libraries must go through them."""
        faults, real_open = self, io.open

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                if faults.due("write", self.name):
                    if faults.error:
                        raise OSError(faults.error, os.strerror(faults.error))
                    data = memoryview(data).cast("B")
                    data = data[: max(1, len(data) // 2)]
                return super().write(data)

            def truncate(self, size: int | None = None) -> int:
                faults.raise_if_due("write", self.name)
                return super().truncate(size)

        def open_file(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any):
            if isinstance(file, int) or more.get("opener") or not set(mode) & set("wax+"):
                return real_open(file, mode, buffering, *rest, **more)
            faults.raise_if_due("open", file)
            raw = File(file, mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, *rest, **more)

        def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(path: Any, *rest: Any, **more: Any) -> Any:
                if more.get("dir_fd") is None:
                    faults.raise_if_due(name, path)
                return call(path, *rest, **more)

            return wrapped

        saved = {name: getattr(os, name) for name in CALLS}
        io.open = builtins.open = open_file
        for name, call in saved.items():
            setattr(os, name, counted(name, call))
        try:
            yield
        finally:
            io.open = builtins.open = real_open
            for name, call in saved.items():
                setattr(os, name, call)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    errors: str
    calls: int

    @property
    def is_clean(self) -> bool:
        """Whether it succeeded, or failed in one line that names a file."""
        lines = self.errors.strip().splitlines()
        if self.code == 0:
            return True
        return (
            self.code == 1
            and "Traceback" not in self.errors
            and lines[-1].startswith("error: ")
            and ("/" in lines[-1] or "." in lines[-1])
        )


def run_forked(command: Sequence[str], folder: Path, at: int = 0, error: int = 0) -> Ended:
    """Run a command in a forked process, its ``at``-th call under ``folder`` failing."""
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as counts:
        process = os.fork()
        if not process:
            code = 70
            try:
                code = _run_here(command, Faults(folder, at, error), errors.fileno(), counts)
            except BaseException:
                os.write(errors.fileno(), traceback.format_exc().encode())
            finally:
                os._exit(code)
        _, status = os.waitpid(process, 0)
        errors.seek(0)
        counts.seek(0)
        text = errors.read().decode(errors="replace")
        number = int(counts.read() or b"0")
        return Ended(os.waitstatus_to_exitcode(status), text, number)


def _run_here(command: Sequence[str], faults: Faults, errors: int, counts: Any) -> int:
    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout, sys.stderr = (io.TextIOWrapper(open(fd, "wb", 0)) for fd in (1, 2))  # noqa: SIM115
    from cli.app import app

    code: Any = 0
    with faults.installed():
        try:
            app(list(command))
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
            code = 1
    counts.write(str(len(faults.calls)).encode())
    counts.flush()
    sys.stderr.flush()
    return int(code or 0)


# --- what is attacked


def materials(folder: Path) -> dict[str, list[str]]:
    """Make a backbone, a cache and a run; return the commands to attack, without ``-o``."""
    backbone, cache, run = (folder / name for name in ("backbone", "cache", "run"))
    model = ["--model", "gin", "--model-args", "num_layers=2", "--model-args", "hidden=32"]
    data = ["--data", "demo:"]
    fit = ["--seeds", "0", "--epochs", "2", "--jobs", "1", "--quiet"]
    small = ["--node-budget", "2000", "--shard-mb", "1", "--quiet"]
    commands = {
        "pretrain": ["pretrain", *model, *data, "--split", "random", *fit[2:]],
        "cache": ["cache", str(backbone), *small],
        "cache-gzip": ["cache", str(backbone), *small, "--compress"],
        "train-head": ["train-head", str(cache), "--dim", "8", *fit],
        "compare": ["compare", str(cache), "--heads", "mean,probe", *fit],
        "finetune": ["finetune", str(run), *fit],
        "predict": ["predict", str(run), *data, "--quiet"],
        "export": ["export", str(run), "--quiet"],
        "export-whole": ["export", str(run), "--whole", "--quiet"],
        "report": ["report", str(run), "--quiet"],
        "tune": ["tune", str(cache), "--trials", "2", *fit],
    }
    for name, out in (("pretrain", backbone), ("cache", cache), ("train-head", run)):
        ended = run_forked([*commands[name], "-o", str(out)], folder)
        if ended.code:
            raise RuntimeError(f"{name}: {ended.errors}")
    return commands


@dataclass
class Attack:
    """Attacks on one command, and how it held."""

    name: str
    command: Sequence[str]
    folder: Path
    attempts: int = 0
    broken: list[str] = field(default_factory=list)

    def run(self, faults: Sequence[str] = tuple(FAULTS), every: int = 1, first: int = 1) -> Attack:
        """Let every ``every``-th call fail, from the ``first`` one on."""
        whole = self.folder / "whole"
        ended = self._run(whole)
        if ended.code:
            self.broken.append(f"undisturbed: {ended.errors}")
            return self
        expected = contents(whole)
        for fault in faults:
            for at in range(first, ended.calls + 1, every):
                self.attempts += 1
                self._attack(fault, at, expected)
        return self

    def _run(self, out: Path, at: int = 0, error: int = 0) -> Ended:
        return run_forked([*self.command, "-o", str(out / "out")], out, at, error)

    def _attack(self, fault: str, at: int, expected: dict[str, bytes]) -> None:
        place = self.folder / "attacked"
        shutil.rmtree(place, ignore_errors=True)
        ended, where = self._run(place, at, FAULTS[fault]), f"{self.name}, {fault} at {at}"
        if not ended.is_clean:
            self.broken.append(f"{where}: exit {ended.code}: {ended.errors.strip()[-600:]}")
            return
        again = self._run(place)
        if again.code:
            self.broken.append(f"{where}: not repeated: {again.errors.strip()[-600:]}")
            return
        found = contents(place)
        if found.keys() != expected.keys():
            self.broken.append(f"{where}: other files: {sorted(found.keys() ^ expected.keys())}")
        changed = [name for name in found if found[name] != expected.get(name)]
        if changed:
            self.broken.append(f"{where}: other contents: {changed[:4]}")


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file whose bytes must not depend on interruptions, by its name."""
    return {
        str(path.relative_to(folder)): b"" if _has_times(path) else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _has_times(path: Path) -> bool:
    """Whether a file holds clock times or its own place."""
    return path.name in ("fit.json", "study.log", "SHA256SUMS", "report.html") or (
        path.suffix in (".toml", ".pt2") or path.name in ("out", "head.json")
    )


def main(names: Sequence[str] = (), every: int = 1) -> int:
    """Attack every command, or those that are named; print the counts; return how many broke."""
    import torch

    import histograph_post.experiments.head_training
    import histograph_post.experiments.pretraining  # noqa: F401

    torch.set_num_threads(1)
    broken = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, command in materials(folder).items():
            if names and name not in names:
                continue
            attack = Attack(name, command, folder / f"attack-{name}").run(every=every)
            broken += len(attack.broken)
            print(f"{name:15}{attack.attempts:6} attempts{len(attack.broken):5} broken", flush=True)
            for line in attack.broken[:10]:
                print(f"  {line}", flush=True)
    return broken


if __name__ == "__main__":
    every = next((int(word) for word in sys.argv[1:] if word.isdigit()), 1)
    sys.exit(1 if main([word for word in sys.argv[1:] if not word.isdigit()], every) else 0)
