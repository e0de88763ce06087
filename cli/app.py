"""Every command under one roof.

Nothing here imports torch; each command imports the library when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from . import (
    bench,
    cache,
    compare,
    demo,
    embed,
    export,
    finetune,
    inspect,
    predict,
    pretrain,
    recipes,
    report,
    train_head,
    tune,
    verify,
)
from .command import register

app = typer.Typer(
    name="histograph",
    help="A better readout for a trained graph neural network, without retraining it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from histograph_post import __version__

        typer.echo(f"histograph-post {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


register(app, pretrain.pretrain, trains=True, runs_models=True)
register(app, cache.cache, runs_models=True, shares_work=True)
register(app, train_head.train_head, trains=True)
register(app, compare.compare, trains=True)
register(app, tune.tune, trains=True)
register(app, finetune.finetune, trains=True, runs_models=True)
register(app, predict.predict, runs_models=True)
register(app, embed.embed, runs_models=True)
register(app, report.report)
register(app, export.export)
register(app, inspect.inspect)
register(app, verify.verify)
register(app, recipes.recipes)
register(app, bench.bench)
register(app, demo.demo, runs_models=True)
