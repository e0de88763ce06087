"""`histograph recipes`: public checkpoints by name, and the command for each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from .terminal import Terminal


def recipes(
    terminal: Terminal,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="One of them, such as pretrain-gnns:gcn, or the beginning of several names.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the public checkpoints that --model knows by name, and where to get their files.

    Each comes with one command that goes from such a file and a csv file of molecules to a report.
    The name also decides how molecules are encoded (mol_features).
    """
    from histograph_post.models.recipes import SAME_NETWORK, one_command, recipes_called

    found = recipes_called(name)
    terminal.table(
        "Public checkpoints by name",
        ["--model", "file", "from", "licence"],
        [[recipe.name, recipe.files, recipe.source, recipe.licence] for recipe in found],
    )
    for paper in dict.fromkeys(recipe.paper for recipe in found):
        terminal.info(f"  {paper}")
    if any(recipe.name.startswith("pretrain-gnns:") for recipe in found):
        for other, source, licence in SAME_NETWORK:
            terminal.note(f"{other} ({source}, {licence}) has the network of pretrain-gnns:gin")
    terminal.result(
        {"recipes": [{**asdict(recipe), "command": recipe.command()} for recipe in found]},
        next_command=found[0].command() if len(found) == 1 else one_command(),
    )
