"""`histograph export`: a trained head as a program, or the whole model as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .guidance import predict_command
from .terminal import Terminal


def export(
    terminal: Terminal,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
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
