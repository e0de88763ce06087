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
    parser.add_argument("--points", type=int, help="crash points per command; all by default")
    parser.add_argument("--kills", type=int, default=15, help="random kills per command")
    parser.add_argument("--rounds", type=int, default=5, help="of writers and readers")
    parser.add_argument("--fast", action="store_true", help="leave slow commands out")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()

    import torch

    for module in _LOADED:  # once, for all children
        import_module(module)
    from histograph_post.training.loop import train_resumably

    from .attacks import Target, chosen, crash_points, random_kills, writers_and_readers
    from .commands import prepare
    from .crashing import call_in_child

    torch.set_num_threads(1)
    assert train_resumably.__kwdefaults__ is not None
    train_resumably.__kwdefaults__["save_every"] = 0.0  # these epochs take milliseconds
    print("| attack | command | attempts | held | broken | seconds |\n|---|---|---|---|---|---|")
    attempts = broken = 0
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        work = Path(folder)
        if call_in_child(lambda: prepare(work), work / "said"):
            print((work / "said").read_text(), file=sys.stderr)
            return 1
        attacks = []
        for command in chosen(asked.command, slow=not asked.fast):
            target = Target(command, work)
            attacks = [lambda t=target: crash_points(t, asked.points, asked.seed)]
            if asked.kills:
                attacks.append(lambda t=target: random_kills(t, asked.kills, asked.seed))
            for attack in attacks:
                started = time.monotonic()
                outcome = attack()
                attempts += outcome.attempts
                broken += len(outcome.broken)
                _show(outcome, time.monotonic() - started)
        if asked.rounds and not asked.command:
            started = time.monotonic()
            outcome = writers_and_readers(work, asked.rounds)
            attempts += outcome.attempts
            broken += len(outcome.broken)
            _show(outcome, time.monotonic() - started)
    print(f"| **all** | | {attempts} | {attempts - broken} | {broken} | |")
    return 1 if broken else 0


def _show(outcome: object, seconds: float) -> None:
    from .attacks import Outcome

    assert isinstance(outcome, Outcome)
    held = outcome.attempts - len(outcome.broken)
    cells = (outcome.attack, outcome.command, outcome.attempts, held, len(outcome.broken))
    print(f"| {' | '.join(map(str, cells))} | {seconds:.0f} |", flush=True)
    for problem in outcome.broken:
        print(f"{outcome.attack}, {outcome.command}: {problem}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
