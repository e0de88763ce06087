"""`histograph train-head`: train a readout on a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

import histograph_post as hg

from . import options as opt
from .flags import ExperimentFlags, HeadFlags, TrainingFlags
from .next_commands import predict_command
from .results import show_run
from .terminal import Terminal


@dataclass(frozen=True)
class WideHeadFlags(HeadFlags):
    """The options of a head that is 64 wide by default, as is the baseline beside it."""

    dim: Annotated[int | None, typer.Option(min=1, help="Width of the head.")] = 64


def train_head(
    terminal: Terminal,
    cache: opt.CacheArgument,
    out: opt.RunOption,
    head: opt.HeadOption = "histograph",
    *,
    head_flags: WideHeadFlags,
    experiment: ExperimentFlags,
    lr: opt.LrOption = None,
    training: TrainingFlags,
    warm_start: opt.WarmStartOption = False,
) -> None:
    """Train a readout on cached activations; the backbone is neither needed nor changed.

    A mean pool of the last layer is trained beside it, as the baseline to beat.
    """
    with terminal.watch_experiment() as watch:
        run = hg.train_head(
            cache,
            out,
            head=head,
            head_options=head_flags.options(),
            options=experiment.options(
                terminal, watch, training.options(lr), warm_start=warm_start
            ),
        )
    terminal.result(show_run(terminal, run, watch), next_command=predict_command(out))
