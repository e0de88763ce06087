"""Training that survives a kill: the state is saved now and then, and picked up again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .files import PARTIAL_SUFFIX, atomic_path
from .training import Trainer, run_epoch

#: The states of fits that are being trained, by seed; gone once they are done.
STATE_NAME = "state.pt"

#: Seconds between saved states: saving costs a few milliseconds, small fits are over in seconds.
SAVE_EVERY = 1.0


def train_resumably(
    trainers: Sequence[Trainer],
    folder: Path,
    *,
    on_epoch: Callable[[Trainer], None] | None = None,
    save_every: float = SAVE_EVERY,
) -> float:
    """Train to the end, going on from the states in ``folder``; return the median epoch's seconds.

    A run that was killed and resumed gives the weights of one that was not. All states are in one
    file, which is replaced as a whole: trainers that were at the same epoch are so again. It may
    have been written by others that were trained as one; the states that are not asked for stay.
    The caller removes the states, after it has saved what came out.

    Args:
        trainers: Made just as they were when the states were saved; of different seeds, as many
            as can be trained as one; the seconds are the share of one of them.
        folder: Where the states are kept; it exists.
        on_epoch: Told of every trainer after each of its epochs.
        save_every: Seconds between saved states.
    """
    for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
        leftover.unlink()
    others = _read_states(folder)
    for trainer in trainers:
        if (state := others.pop(trainer.seed, None)) is not None:
            trainer.restore(state)

    def save() -> None:
        _write_states(folder, others | {trainer.seed: trainer.state() for trainer in trainers})

    seconds: list[float] = []
    saved = time.perf_counter()
    while waiting := [trainer for trainer in trainers if not trainer.is_done]:
        # Those that were trained apart before wait until the others have caught up.
        epoch = min(trainer.progress.epoch for trainer in waiting)
        going = [trainer for trainer in waiting if trainer.progress.epoch == epoch]
        started = time.perf_counter()
        run_epoch(going)
        now = time.perf_counter()
        seconds.append((now - started) / len(going))
        if now - saved >= save_every * len(trainers):
            save()
            saved = time.perf_counter()
        for trainer in going:
            if on_epoch is not None:
                on_epoch(trainer)
    if seconds and len(trainers) > 1:
        save()  # they end as one: a kill while the fits are saved must not train some of them again
    for trainer in trainers:
        trainer.finish()
    return float(np.median(seconds)) if seconds else 0.0


def drop_states(folder: Path, seeds: Collection[int]) -> None:
    """Forget the states of fits that are saved; with the last one goes the folder they are in.

    Args:
        folder: Where the states are kept, and nothing else; it may be gone.
        seeds: Of the fits.
    """
    left = {seed: state for seed, state in _read_states(folder).items() if seed not in seeds}
    if left:
        _write_states(folder, left)
    elif folder.exists():
        shutil.rmtree(folder)


def _read_states(folder: Path) -> dict[int, Any]:
    path = folder / STATE_NAME
    if not path.exists():
        return {}
    states: dict[int, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return states


def _write_states(folder: Path, states: Mapping[int, Any]) -> None:
    with atomic_path(folder / STATE_NAME) as partial:
        torch.save(dict(states), partial)
