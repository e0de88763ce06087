"""Every command under one roof, and their reference as Markdown.

    python -m histograph_cli.app > docs/commands.md

Nothing here imports torch; each command imports the library when it runs.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import textwrap
from typing import Annotated, Any

import typer

from . import backbones, bench, cache, demo, heads, inspect, runs, trust
from .command import CommandGroup, register, shared_options

app = typer.Typer(
    name="histograph",
    cls=CommandGroup,
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


register(app, backbones.pretrain, trains=True, runs_models=True, trains_together=True)
register(app, cache.cache, runs_models=True, shares_work=True)
register(app, heads.train_head, trains=True)
register(app, heads.compare, trains=True)
register(app, heads.tune, trains=True)
register(app, backbones.finetune, trains=True, runs_models=True, trains_together=True)
register(app, runs.predict, runs_models=True)
register(app, runs.embed, runs_models=True)
register(app, runs.report)
register(app, runs.export)
register(app, inspect.inspect)
register(app, cache.verify)
register(app, trust.trust)
register(app, inspect.recipes)
register(app, bench.bench)
register(app, demo.demo, runs_models=True)


def run() -> None:
    """Run the command that was typed, or complete it for the shell."""
    if os.environ.get("_HISTOGRAPH_COMPLETE") == "complete_bash":
        _complete_in_bash()
    else:
        app()


def _complete_in_bash() -> None:
    """Print what may be typed next; bash breaks words at colons, and ours have some (`tu:MUTAG`).

    So the words are joined again, and only what is behind the last colon is printed, since bash
    replaces no more than that.
    """
    words = os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]
    joined = re.sub(r"\n?:\n?", ":", "\n".join(words))
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = joined, str(joined.count("\n"))
    before = joined.rpartition("\n")[2].rpartition(":")[0]
    with contextlib.redirect_stdout(io.StringIO()) as offered, contextlib.suppress(SystemExit):
        app()
    for line in offered.getvalue().splitlines():
        print(line.removeprefix(f"{before}:"))


# --- the reference: made from the commands themselves, so the two cannot disagree

_INTRODUCTION = """\
# The commands

Made from the commands themselves; `histograph COMMAND --help` shows the same.
"""


def reference() -> str:
    """Return the page: every command with its arguments and options."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shared = shared_options()
    parts = [_INTRODUCTION, _overview(commands)]
    parts += [_shared(next(iter(commands.values())), shared)]
    parts += [_command(name, command, shared) for name, command in commands.items()]
    return "\n".join(parts)


def _overview(commands: dict[str, Any]) -> str:
    """Return a line per command, under the headings of `histograph --help`."""
    panels: dict[str, list[str]] = {}
    for name, command in commands.items():
        what = command.help.splitlines()[0]
        line = f"| [`histograph {name}`](#histograph-{name}) | {what} |"
        panels.setdefault(command.rich_help_panel, []).append(line)
    tables = (
        "\n".join([f"| {panel} | |", "|---|---|", *lines, ""]) for panel, lines in panels.items()
    )
    return "\n".join(tables)


def _shared(command: Any, shared: set[str]) -> str:
    rows = [_row(parameter) for parameter in command.params if parameter.name in shared]
    return f"## Every command\n\n{_table(rows)}"


def _command(name: str, command: Any, shared: set[str]) -> str:
    own = [
        parameter
        for parameter in command.params
        if parameter.name not in shared and not getattr(parameter, "hidden", False)
    ]
    arguments = [
        parameter.metavar if parameter.required else f"[{parameter.metavar}]"
        for parameter in own
        if parameter.param_type_name == "argument"
    ]
    usage = " ".join(["histograph", name, *arguments, "[OPTIONS]"])
    text = "\n\n".join(textwrap.fill(part, 100) for part in command.help.split("\n\n"))
    return f"## `histograph {name}`\n\n{text}\n\n    {usage}\n\n{_table(map(_row, own))}"


def _table(rows: Any) -> str:
    lines = [f"| {left} | {right} |" for left, right in rows]
    return "\n".join(["| option | |", "|---|---|", *lines, ""])


def _row(parameter: Any) -> tuple[str, str]:
    if parameter.param_type_name == "argument":
        names = [parameter.metavar]
    else:
        value = f" {parameter.metavar}" if parameter.metavar else ""
        names = [f"{name}{value}" for name in (*parameter.opts, *parameter.secondary_opts)]
    help_text = parameter.help + _default(parameter)
    return ", ".join(f"`{_escaped(name)}`" for name in names), _escaped(help_text)


def _default(parameter: Any) -> str:
    default = parameter.default
    if parameter.required:
        return " *Required.*"
    if default is None or default is False or default == []:
        return ""
    if default is True:
        return " On by default."
    return f" Default: `{default}`."


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
