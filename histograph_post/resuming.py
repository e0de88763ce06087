"""Training that survives a kill: the state is saved now and then, and picked up again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from .files import PARTIAL_SUFFIX, atomic_path
from .stacking import run_epoch_together
from .training import Trainer

#: The state of fits that are being trained; gone once they are done.
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
    """Train to the end, going on from the state in ``folder``; return the median epoch's seconds.

    A run that was killed and resumed gives the weights of one that was not. The caller removes
    the state, after it has saved what came out.

    Args:
        trainers: Made just as they were when the state was saved; of different seeds, as many
            as can be trained as one; the seconds are the share of one of them.
        folder: Where the state is kept; it exists.
        on_epoch: Told of every trainer after each of its epochs.
        save_every: Seconds between saved states.
    """
    for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
        leftover.unlink()
    state = folder / STATE_NAME
    if state.exists():
        saved_states = torch.load(state, weights_only=True, map_location="cpu")
        for trainer in trainers:
            trainer.restore(saved_states[trainer.seed])
    seconds: list[float] = []
    saved = time.perf_counter()
    while going := [trainer for trainer in trainers if not trainer.is_done]:
        started = time.perf_counter()
        if len(going) == 1:
            going[0].run_epoch()
        else:
            run_epoch_together(going)
        now = time.perf_counter()
        seconds.append((now - started) / len(going))
        if now - saved >= save_every * len(trainers):
            with atomic_path(state) as partial:
                torch.save({trainer.seed: trainer.state() for trainer in trainers}, partial)
            saved = time.perf_counter()
        for trainer in going:
            if on_epoch is not None:
                on_epoch(trainer)
    for trainer in trainers:
        trainer.finish()
    return float(np.median(seconds)) if seconds else 0.0
