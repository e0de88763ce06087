"""The reference of all commands as Markdown.

    python -m histograph_cli.reference > docs/commands.md

It is made from the commands themselves, so the two cannot disagree.
"""

from __future__ import annotations

import textwrap
from enum import Enum
from typing import Any

import typer

from .app import app
from .command import shared_options

_INTRODUCTION = """\
# The commands

Made from the commands themselves; `histograph COMMAND --help` shows the same.
"""


def reference() -> str:
    """Return the page: every command with its arguments and options."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shared = shared_options()
    parts = [_INTRODUCTION, _shared(next(iter(commands.values())), shared)]
    parts += [_command(name, command, shared) for name, command in commands.items()]
    return "\n".join(parts)


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
    return f" Default: `{default.value if isinstance(default, Enum) else default}`."


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
