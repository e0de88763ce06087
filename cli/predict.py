"""`histograph predict`: a trained head on new graphs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from histograph_post.utils.machine import NODE_BUDGET

from . import options as opt
from .terminal import Terminal
from .terminal import metric as shown

if TYPE_CHECKING:
    from histograph_post.runs.predictions import Predictions

#: Targets that the summary shows; the file has all of them.
_SHOWN_TARGETS = 12


def predict(
    terminal: Terminal,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    data: opt.DataOption,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE.csv", help="File for the predictions.")
    ],
    checkpoint: opt.MovedCheckpointOption = None,
    model: opt.MovedModelOption = None,
    head: opt.RunHeadOption = None,
    key_map: opt.KeyMapOption = None,
    data_root: opt.DataRootOption = None,
    data_args: opt.DataArgsOption = [],  # noqa: B006  # typer copies it
    node_budget: opt.NodeBudgetOption = NODE_BUDGET,
    workers: opt.WorkersOption = None,
    device: opt.DeviceOption = "auto",
    trust_checkpoint: opt.TrustOption = False,
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Predict new graphs with a trained head; if they have labels, score the predictions.

    The predictions of all seeds (and folds) are averaged, and the file says how much they differ.
    The backbone is loaded again, and must have the weights that the heads were trained on.
    """
    from histograph_post.models import parse_args
    from histograph_post.runs.predicting import predict as predict_graphs
    from histograph_post.runs.run import Run
    from histograph_post.runs.summary import predicts_with

    with terminal.steps("reading rows", "predicting nodes") as (reading, update):
        found = predict_graphs(
            run,
            data,
            out,
            data_root=data_root,
            data_args=parse_args(data_args),
            model=model,
            head=head,
            checkpoint=checkpoint,
            key_map=key_map,
            trust=trust_checkpoint,
            node_budget=node_budget,
            device=device,
            overwrite=overwrite,
            config=terminal.options,
            workers=workers,
            on_progress=update,
            on_reading=reading,
        )
    for note in found.notes:
        terminal.note(note)
    stored = Run.of(run).with_head(head).stored_head
    terminal.info(f"predicted with {predicts_with(stored)}")
    show_predictions(terminal, found)
    terminal.result(
        {
            "predictions": str(out),
            "rows": len(found),
            "task": found.task.to_json(),
            "targets": list(found.target_names),
            "scores": dict(found.scores),
            **{name: stored[name] for name in ("head", "fold", "seed")},
            "members": len(stored.get("members", [stored])),
            "notes": list(found.notes),
        },
        next_command=f"head {shlex.quote(str(out))}",
    )


def show_predictions(terminal: Terminal, found: Predictions) -> None:
    """Print what was predicted, in a few lines, and its scores if there are labels."""
    title = f"{len(found)} {found.task.level}s predicted"
    if found.classes is not None:
        counts = [(value, int((found.classes == value).sum())) for value in found.task.classes]
        terminal.table(
            title,
            ["class", "predicted", "share"],
            [[f"{value:g}", n, f"{100 * n / max(len(found), 1):.1f} %"] for value, n in counts],
        )
    else:
        values = found.probabilities  # [rows, targets]
        names = found.target_names[:_SHOWN_TARGETS]
        if len(names) < len(found.target_names):
            title += f", {len(names)} of {len(found.target_names)} targets"
        terminal.table(
            title,
            ["target", "mean", "lowest", "highest"],
            [
                [name, *(f"{number:.4g}" for number in (column.mean(), column.min(), column.max()))]
                for name, column in zip(names, values.T, strict=False)
            ],
        )
    if found.scores:
        terminal.table(
            "Scores on the labelled rows",
            list(found.scores),
            [[shown(value) for value in found.scores.values()]],
        )
