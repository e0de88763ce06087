"""Training that survives a kill: the state is saved now and then, and picked up again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..utils.files import PARTIAL_SUFFIX, atomic_path
from .loop import Trainer

#: The state of a fit that is being trained; the caller removes it once the fit is saved.
STATE_NAME = "state.pt"

#: Seconds between saved states: saving costs a few milliseconds, small fits are over in seconds.
SAVE_EVERY = 1.0


def train_resumably(
    trainer: Trainer,
    folder: Path,
    *,
    on_epoch: Callable[[Trainer], None] | None = None,
    save_every: float = SAVE_EVERY,
) -> float:
    """Train to the end, going on from the state in ``folder``; return the median epoch's seconds.

    A run that was killed and resumed gives the weights of one that was not.

    Args:
        trainer: Made just as it was when the state was saved.
        folder: Where the state is kept; it exists.
        on_epoch: Told after every epoch.
        save_every: Seconds between saved states.
    """
    for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
        leftover.unlink()
    path = folder / STATE_NAME
    if path.exists():
        trainer.restore(torch.load(path, weights_only=True, map_location="cpu"))
    seconds: list[float] = []
    saved = time.perf_counter()
    while not trainer.is_done:
        started = time.perf_counter()
        trainer.run_epoch()
        now = time.perf_counter()
        seconds.append(now - started)
        if now - saved >= save_every:
            with atomic_path(path) as partial:
                torch.save(trainer.state(), partial)
            saved = time.perf_counter()
        if on_epoch is not None:
            on_epoch(trainer)
    trainer.finish()
    return float(np.median(seconds)) if seconds else 0.0
