"""`histograph predict`, `embed`, `export` and `report`: what is made of a finished run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from histograph_post.utils.text import plural, score

from . import options as opt
from .flags import NewDataFlags
from .guidance import predict_command
from .terminal import Terminal

if TYPE_CHECKING:
    from histograph_post.runs.predictions import Predictions

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")]

#: Targets that the summary shows; the file has all of them.
_SHOWN_TARGETS = 12


def predict(
    terminal: Terminal,
    run: RunArgument,
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
    used = Run.of(run).with_head(new_data.head)
    stored = used.stored_head
    terminal.info(f"predicted with {predicts_with(used)}")
    show_predictions(terminal, found)
    terminal.result(
        {
            "predictions": str(out),
            "rows": len(found),
            "task": found.task.to_json(),
            "targets": list(found.target_names),
            "scores": dict(found.scores),
            "head": used.head if used.kind != "export" else stored["head"],
            **{name: stored[name] for name in ("fold", "seed")},
            "members": len(stored.get("members", [stored])),
            "notes": list(found.notes),
        },
        next_command=f"less {shlex.quote(str(out))}",
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
            [[score(value) for value in found.scores.values()]],
        )


def embed(
    terminal: Terminal,
    run: RunArgument,
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
    from histograph_post.runs.predicting import embed as embed_graphs

    with terminal.progress("embedding nodes") as update:
        found = embed_graphs(run, data, out, **new_data.options(terminal), on_progress=update)
    for note in found.notes:
        terminal.note(note)
    rows, width = found.vectors.shape
    terminal.table(f"{out}", ["rows", "width"], [[rows, width]])
    terminal.result({"vectors": str(out), "rows": rows, "width": width, "notes": list(found.notes)})


def export(
    terminal: Terminal,
    run: RunArgument,
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE.pt2|DIR",
            help="File for the program; with --whole a folder.",
        ),
    ],
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="Export backbone and head together, for hg.load and histograph predict."
        ),
    ] = False,
    model: opt.MovedModelOption = None,
    head: opt.RunHeadOption = None,
    checkpoint: opt.MovedCheckpointOption = None,
    key_map: opt.KeyMapOption = None,
    in_dim: Annotated[
        int | None,
        typer.Option(
            "--in-dim",
            min=1,
            help="Number of node features, if it cannot be read off the model.",
        ),
    ] = None,
    trust_checkpoint: opt.TrustOption = False,
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Export the head as a torch.export program that runs without this package.

    The program takes the captured activations of any number of graphs of any size. Its outputs are
    checked against those of the head before it is written. With --whole, a folder with the weights
    of backbone and head is written, which needs neither the run nor the cache.
    """
    from histograph_post.runs.exporting import export as export_run

    if not whole and (model or checkpoint or key_map):
        raise typer.BadParameter("--model, --checkpoint and --key-map are for --whole")
    done = export_run(
        run,
        out,
        whole=whole,
        model=model,
        head=head,
        checkpoint=checkpoint,
        key_map=key_map,
        trust=trust_checkpoint,
        in_dim=in_dim,
        overwrite=overwrite,
        config=terminal.options,
    )
    checked = (
        [] if done.difference is None else [["differs from the head by", f"{done.difference:.1e}"]]
    )
    terminal.table(f"{done.path}", ["", ""], [["use it with", done.usage], *checked])
    terminal.result(
        {"exported": str(done.path), "usage": done.usage, "difference": done.difference},
        next_command=predict_command(out) if whole else None,
    )


def report(
    terminal: Terminal,
    run: Annotated[
        Path, typer.Argument(metavar="RUN|COMPARE", help="Folder of a finished run or comparison.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE.html", help="The page; RUN/report.html by default."
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures", metavar="DIR", help="Also save every figure as a file, in this folder."
        ),
    ] = None,
    form: Annotated[
        Literal["png", "svg", "pdf"],
        typer.Option("--format", help="Format of the figures in --figures."),
    ] = "png",
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="CACHE", help="Where the run's cache is, if it was moved."),
    ] = None,
    head: opt.RunHeadOption = None,
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Write the results of a run as one HTML file that works offline.

    It has scores with paired differences, learning curves, layer weights, over-smoothing,
    predictions against labels, graphs with their attention, and how to repeat the run.
    """
    from histograph_post.reporting import report as write_report

    with terminal.progress("reading activations") as update:
        written = write_report(
            run,
            out,
            cache=cache,
            head=head,
            figures=figures,
            form=form,
            overwrite=overwrite,
            on_progress=update,
        )
    for note in written.notes:
        terminal.note(note)
    saved = "" if figures is None else f", also saved in {figures} as {form}"
    terminal.say(f"{written.path}: {plural(len(written.figures), 'figure')}{saved}")
    terminal.result(
        {
            "report": str(written.path),
            "figures": list(written.figures),
            "files": [str(path) for path in written.files],
            "notes": list(written.notes),
        },
        next_command=f"open {written.path} in a browser",
    )
