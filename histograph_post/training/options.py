"""How to train: the same choices for every network, and the schedules of the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError
from ..utils.decoding import MOST_EPOCHS, require_number

SCHEDULES = ("cosine", "plateau", "none")

#: The lowest learning rate of a schedule, as a fraction of the highest.
LOWEST_LR = 0.01

#: The plateau schedule halves the learning rate after each so many epochs without a better score.
PLATEAU_EPOCHS = 10

#: Beyond all that is of use, and within single precision: a search multiplies it by up to 100.
LARGEST = 1e30


def suggested_lr(most_steps: int, usual: float = 1e-3) -> float:
    """Return the learning rate for epochs of at most so many steps; ``usual`` is that for many.

    An epoch on a single graph is a single step, and a hundred steps have to be larger ones.
    """
    return 1e-2 if most_steps == 1 else usual


@dataclass(frozen=True)
class TrainingOptions:
    """How to train; the same for every network that is compared."""

    epochs: int = 100
    batch_size: int = 64
    lr: float = 1e-3
    weight_decay: float = 1e-4
    schedule: str = "cosine"
    #: Epochs over which the learning rate rises from zero.
    warmup: float = 2.0
    #: Gradients are scaled down to this norm; 0 leaves them alone.
    clip: float = 1.0
    #: Stop after this many epochs without a better validation score; 0 never stops early.
    patience: int = 30
    #: Weigh classes (or positives) by how rare they are in the training part.
    balance: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule: found {self.schedule!r}, expected one of {SCHEDULES}")
        for name, most in (("epochs", MOST_EPOCHS), ("batch_size", 2**31)):
            require_number(name, getattr(self, name), low=1, high=most, whole=True)
        for name in ("weight_decay", "warmup", "clip", "patience"):
            require_number(name, getattr(self, name), low=0, high=LARGEST)
        require_number("lr", self.lr, low=1 / LARGEST, high=LARGEST)

    def lr_factor(self, epochs_done: float, plateau_factor: float) -> float:
        """Return the learning rate of a step as a fraction of the highest.

        Args:
            epochs_done: Epochs of the run when the step ends, with a fraction.
            plateau_factor: The current fraction of the plateau schedule.
        """
        factor = plateau_factor
        if self.schedule == "cosine":
            falling = max(0.0, epochs_done - self.warmup) / max(1e-9, self.epochs - self.warmup)
            factor = LOWEST_LR + (1 - LOWEST_LR) * (1 + math.cos(math.pi * min(1.0, falling))) / 2
        if epochs_done < self.warmup:
            factor *= epochs_done / self.warmup
        return factor
