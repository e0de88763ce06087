"""`histograph report`: a run or a comparison as one page."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from histograph_post.utils.text import plural

from . import options as opt
from .terminal import Terminal


class FigureFormat(StrEnum):
    """How figures are saved."""

    PNG = "png"
    SVG = "svg"
    PDF = "pdf"


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
        FigureFormat, typer.Option("--format", help="Format of the figures in --figures.")
    ] = FigureFormat.PNG,
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
            form=form.value,
            overwrite=overwrite,
            on_progress=update,
        )
    for note in written.notes:
        terminal.note(note)
    saved = "" if figures is None else f", also saved in {figures} as {form.value}"
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
