"""The options of every command that trains, declared once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from .command import OptionGroup
from .options import Schedule

if TYPE_CHECKING:
    from histograph_post.caches import Cache
    from histograph_post.training.options import TrainingOptions


@dataclass(frozen=True)
class TrainingFlags(OptionGroup):
    """How to train, but for the learning rate: stages differ in how many there are."""

    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Epochs at most.")] = 100
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Graphs per batch.")] = 64
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0, help="Of AdamW.")] = 1e-4
    schedule: Annotated[
        Schedule, typer.Option("--schedule", help="How the learning rate goes down.")
    ] = Schedule.COSINE
    warmup: Annotated[float, typer.Option("--warmup", min=0, help="Epochs of rising rate.")] = 2.0
    clip: Annotated[float, typer.Option("--clip", min=0, help="Largest gradient norm; 0: any.")] = (
        1.0
    )
    patience: Annotated[
        int,
        typer.Option("--patience", min=0, help="Epochs without a better score before stopping."),
    ] = 30
    balance: Annotated[
        bool, typer.Option("--balance", help="Weigh classes by how rare they are.")
    ] = False

    def options(self, lr: float) -> TrainingOptions:
        """Return what the library takes."""
        from histograph_post.training.options import TrainingOptions

        return TrainingOptions(lr=lr, **asdict(self) | {"schedule": self.schedule.value})

    def options_on(self, cache: Cache, lr: float | None) -> TrainingOptions:
        """Return what the library takes; a learning rate for the cache, unless one is given."""
        from histograph_post.training.options import suggested_lr

        return self.options(suggested_lr(len(cache)) if lr is None else lr)
