"""Attacks on every command, with counts: ``python -m tests.soak [ATTACK ...]``.

- ``crashes``: a kill before, in the middle of and after every operation on files of every command;
- ``kills``: kills at random times; ``signals``: Ctrl-C and SIGTERM, once or twice;
- ``faults``: each operation fails once with ENOSPC, EIO, EACCES, or is cut short;
- ``writers``: two writers and eight readers of one run;
- ``inputs``: hostile files and absurd options;
- ``large``: a manifest of a million graphs, a sparse cache of 60 GB;
- ``fuzz``: the readers of checkpoints, manifests and shards, guided by coverage.

After each the same command is given again, and what it leaves has to be what an unbroken run
leaves, and nothing else. Markdown on stdout, a row per attack and command; exits with 1 if anything
broke. ``--command`` and ``--every`` with ``--seed`` choose, so that pieces can run at different
times.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# Before torch is loaded: a process that has threads cannot be copied.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[name] = "1"
warnings.simplefilter("ignore")

_OF_COMMANDS = ("crashes", "kills", "faults")
_ATTACKS = (*_OF_COMMANDS, "writers", "signals", "inputs", "large", "fuzz")


def main() -> int:
    """Run the attacks that are asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("attack", nargs="*", help=f"{', '.join(_ATTACKS)}; all by default")
    parser.add_argument("--command", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--kills", type=int, default=15, help="random kills per command")
    parser.add_argument("--every", type=int, default=1, help="take every N-th point or fault")
    parser.add_argument("--rounds", type=int, default=5, help="of writers and readers")
    parser.add_argument("--signals", type=int, default=40, help="Ctrl-C and SIGTERM")
    parser.add_argument("--minutes", type=float, default=10, help="of fuzzing, per reader")
    parser.add_argument("--seed", type=int, default=0, help="from 0 to N - 1: where N-ths begin")
    asked = parser.parse_args()
    if unknown := set(asked.attack) - set(_ATTACKS):
        parser.error(f"found {', '.join(sorted(unknown))}, expected {', '.join(_ATTACKS)}")
    attacks = asked.attack or [*_ATTACKS]

    if "fuzz" in attacks and find_spec("atheris") is None:
        parser.error("found no atheris, expected it for fuzz (pip install atheris)")

    import torch

    from histograph_post.data import streaming
    from histograph_post.training.loop import train_resumably

    from . import attacks as those
    from .commands import COMMANDS, prepare
    from .operations import call_in_child

    torch.set_num_threads(1)
    assert train_resumably.__kwdefaults__ is not None
    train_resumably.__kwdefaults__["save_every"] = 0.0  # these epochs take milliseconds
    streaming.BLOCK_ROWS = 10
    # Only where power fails does it matter what is synced, and a sync takes as long as an epoch.
    os.fsync = lambda descriptor: None

    def outcomes(work: Path) -> Iterator[those.Outcome]:
        of_commands = [each for each in _OF_COMMANDS if each in attacks]
        for command in COMMANDS if of_commands else ():
            if asked.command and command.name not in asked.command:
                continue
            target = those.Target(command, work)
            if "crashes" in attacks and command.alone:
                yield those.crash_points(target, asked.every, asked.seed)
            if "kills" in attacks:
                yield those.random_kills(target, asked.kills, asked.seed)
            if "faults" in attacks and command.alone:
                yield those.faults(target, asked.every, asked.seed)
        if "writers" in attacks:
            yield those.writers_and_readers(work, asked.rounds)
        if "signals" in attacks:
            yield those.random_signals(work, asked.signals, asked.seed)
        if "inputs" in attacks:
            from .inputs import hostile_inputs

            yield from hostile_inputs(work, asked.command)
        if "large" in attacks:
            from .large import large_caches

            yield large_caches(work)
        if "fuzz" in attacks:
            from .fuzz import READERS, fuzz

            for reader in READERS:
                inputs, findings = fuzz(reader, round(60 * asked.minutes), work / reader)
                yield those.Outcome("fuzz", f"reader: {reader}", inputs, findings)

    print("| attack | command | attempts | held | broken | seconds |\n|---|---|---|---|---|---|")
    attempts, broken, started = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        work = Path(folder)
        if call_in_child(lambda: prepare(work), work / "said"):
            print((work / "said").read_text(), file=sys.stderr)
            return 1
        for outcome in outcomes(work):
            wrong, seconds = len(outcome.broken), time.monotonic() - started
            cells = (outcome.attack, outcome.command, outcome.attempts, outcome.attempts - wrong)
            print(f"| {' | '.join(map(str, cells))} | {wrong} | {seconds:.0f} |", flush=True)
            for problem in outcome.broken:
                place = f"{outcome.attack}, {outcome.command}"
                print(f"{place}: {problem}", file=sys.stderr, flush=True)
            attempts, broken = attempts + outcome.attempts, broken + wrong
            started = time.monotonic()
    print(f"| **all** | | {attempts} | {attempts - broken} | {broken} | |")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
