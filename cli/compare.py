"""`histograph compare`: every readout on the same cache, ranked."""

from __future__ import annotations

from typing import Annotated

import typer

import histograph_post as hg

from . import completion
from . import options as opt
from .flags import ExperimentFlags, TrainingFlags
from .next_commands import command
from .results import show_run
from .terminal import Terminal


def compare(
    terminal: Terminal,
    cache: opt.CacheArgument,
    out: opt.RunOption,
    heads: Annotated[
        str,
        typer.Option(
            "--heads",
            metavar="NAMES",
            autocompletion=completion.several_heads,
            help="The readouts, separated by commas: all, or any of those of train-head --head; "
            "svm and boosting are compared only.",
        ),
    ] = "all",
    dim: Annotated[int, typer.Option(min=1, help="Width of every head.")] = 64,
    *,
    experiment: ExperimentFlags,
    lr: opt.LrOption = None,
    training: TrainingFlags,
) -> None:
    """Train every readout on the same cache in the same way, and rank them."""
    with terminal.watch_experiment() as watch:
        run = hg.compare(
            cache,
            out,
            heads=None if heads == "all" else [name.strip() for name in heads.split(",")],
            dim=dim,
            options=experiment.options(terminal, watch, training.options(lr)),
        )
    found = show_run(terminal, run, watch, ranked=True)
    terminal.result(found, next_command=command("report", out))
