"""`histograph predict` and `embed`: a trained head on new graphs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as opt
from .flags import NewDataFlags
from .formatting import metric as shown
from .terminal import Terminal

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
    *,
    new_data: NewDataFlags,
    workers: opt.WorkersOption = None,
) -> None:
    """Predict new graphs with a trained head; if they have labels, score the predictions.

    The predictions of all seeds (and folds) are averaged, and the file says how much they differ.
    The backbone is loaded again, and must have the weights that the heads were trained on.
    """
    from histograph_post.runs.predicting import predict as predict_graphs
    from histograph_post.runs.run import Run
    from histograph_post.runs.summary import predicts_with

    with terminal.steps("reading rows", "predicting nodes") as (reading, update):
        found = predict_graphs(
            run,
            data,
            out,
            **new_data.options(terminal),
            workers=workers,
            on_progress=update,
            on_reading=reading,
        )
    for note in found.notes:
        terminal.note(note)
    stored = Run.of(run).with_head(new_data.head).stored_head
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


def embed(
    terminal: Terminal,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    data: opt.DataOption,
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", metavar="FILE", help="File for the vectors: .npz, or .parquet."
        ),
    ],
    *,
    new_data: NewDataFlags,
) -> None:
    """Write one vector per graph (or node): what the head computes just before its classifier.

    The head is the best of the run by validation. The file has ids, vectors, the rows of the source
    and, for molecules, SMILES: for nearest neighbours, clusters, or a model of your own.
    """
    from histograph_post.runs.embedding import embed as embed_graphs

    with terminal.progress("embedding nodes") as update:
        found = embed_graphs(run, data, out, **new_data.options(terminal), on_progress=update)
    for note in found.notes:
        terminal.note(note)
    rows, width = found.vectors.shape
    terminal.table(f"{out}", ["rows", "width"], [[rows, width]])
    terminal.result({"vectors": str(out), "rows": rows, "width": width, "notes": list(found.notes)})
