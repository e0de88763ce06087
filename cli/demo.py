"""`histograph demo`: the whole way on embedded data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .cache import cache
from .terminal import Terminal


def demo(
    terminal: Terminal,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Folder to write.")
    ] = Path("demo"),
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Train a small backbone on data made in code and cache its layers; no downloads.

    Every step is printed as the command that does the same with a checkpoint of your own.
    """
    from histograph_post.demo import DATA, EPOCHS, MODEL, train_demo_backbone
    from histograph_post.errors import OutputExistsError

    checkpoint, cache_folder = out / "backbone.safetensors", out / "demo.cache"
    if checkpoint.exists() and not overwrite:
        raise OutputExistsError(
            f"{checkpoint}: found an older demo; choose another -o, or --overwrite"
        )
    out.mkdir(parents=True, exist_ok=True)
    with terminal.progress("training a small mean-pool GIN: epochs") as update:
        train_demo_backbone(checkpoint, on_epoch=lambda epoch: update(epoch, EPOCHS))
    terminal.say(
        f"$ histograph cache --model {MODEL} --checkpoint {checkpoint} --data {DATA} "
        f"-o {cache_folder}"
    )
    # The configuration that is saved with the cache is that of the command that is printed.
    given = {"model": MODEL, "checkpoint": str(checkpoint), "data": DATA, "out": str(cache_folder)}
    step = Terminal(json=terminal.json, quiet=terminal.quiet, options=given)
    cache(step, cache_folder, model=MODEL, checkpoint=checkpoint, data=DATA, overwrite=overwrite)
