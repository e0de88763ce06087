"""Kill every command at every moment: ``python -m tests.soak``.

Every file operation of every command is a crash point: the process dies before and after it, the
same command is given again, and what it leaves has to be what an unbroken run leaves, and nothing
else. Then random kills, and several writers and readers of one run. Markdown on stdout, a row per
attack and command; exits with 1 if anything broke.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

# Before torch is loaded: a process that has threads cannot be copied.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[name] = "1"
warnings.simplefilter("ignore")

_LOADED = (
    *("optuna", "rich.table", "torch._dynamo", "torch_geometric.nn", "pydantic"),
    *(f"histograph_post.experiments.{name}" for name in ("end_to_end", "finetuning", "trials")),
    *("histograph_post.data.synthetic", "histograph_post.heads.set_pooling"),
    *("histograph_post.models.loading", "histograph_post.models.proposals"),
    *("histograph_post.reporting", "histograph_post.runs.exporting"),
)


def main() -> int:
    """Run the attacks that are asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--command", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--no-commands", action="store_true", help="only what is of no command")
    parser.add_argument("--points", type=int, help="crash points per command; all by default")
    parser.add_argument("--kills", type=int, default=15, help="random kills per command")
    parser.add_argument("--rounds", type=int, default=5, help="of writers and readers")
    parser.add_argument("--signals", type=int, default=40, help="Ctrl-C and SIGTERM")
    parser.add_argument("--faults", type=int, default=1, help="every N-th operation fails once")
    parser.add_argument("--fast", action="store_true", help="leave slow commands out")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    import torch

    for module in _LOADED:  # once, for all children
        import_module(module)
    from histograph_post.training.loop import train_resumably

    from .attacks import (
        Outcome,
        Target,
        chosen,
        crash_points,
        random_kills,
        writers_and_readers,
    )
    from .commands import prepare
    from .crashing import call_in_child
    from .signals import random_signals

    torch.set_num_threads(1)
    assert train_resumably.__kwdefaults__ is not None
    train_resumably.__kwdefaults__["save_every"] = 0.0  # these epochs take milliseconds

    def outcomes(work: Path) -> Iterator[Outcome]:
        given = [] if asked.no_commands else chosen(asked.command, slow=not asked.fast)
        for command in given:
            target = Target(command, work)
            yield crash_points(target, asked.points, asked.seed)
            if asked.kills:
                yield random_kills(target, asked.kills, asked.seed)
        if asked.rounds and not asked.command:
            yield writers_and_readers(work, asked.rounds)
        if asked.signals and not asked.command:
            yield random_signals(work, asked.signals, asked.seed)

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
    if asked.faults and not asked.command:
        from .faults import main as faults

        broken += faults(every=asked.faults)
    print(f"| **all** | | {attempts} | {attempts - broken} | {broken} | |")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
