"""`histograph embed`: what a trained head reads out of new graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from histograph_post.utils.machine import NODE_BUDGET

from . import options as opt
from .terminal import Terminal


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
    checkpoint: opt.MovedCheckpointOption = None,
    model: opt.MovedModelOption = None,
    head: opt.RunHeadOption = None,
    key_map: opt.KeyMapOption = None,
    data_root: opt.DataRootOption = None,
    data_args: opt.DataArgsOption = [],  # noqa: B006  # typer copies it
    node_budget: opt.NodeBudgetOption = NODE_BUDGET,
    device: opt.DeviceOption = "auto",
    trust_checkpoint: opt.TrustOption = False,
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Write one vector per graph (or node): what the head reads out before it classifies.

    It is the best head of the run by validation. The file has ids, vectors, the rows of the source
    and, of molecules, SMILES: for nearest neighbours, clusters, or a model of your own.
    """
    from histograph_post.models import parse_args
    from histograph_post.runs.embedding import embed as embed_graphs

    with terminal.progress("embedding nodes") as update:
        found = embed_graphs(
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
            on_progress=update,
        )
    for note in found.notes:
        terminal.note(note)
    rows, width = found.vectors.shape
    terminal.table(f"{out}", ["rows", "width"], [[rows, width]])
    terminal.result({"vectors": str(out), "rows": rows, "width": width, "notes": list(found.notes)})
