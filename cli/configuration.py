"""Options from a TOML file, and back to one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from histograph_post.errors import ConfigError
from histograph_post.utils.decoding import read_toml_file

#: Options on how to run, not on what to make: they stay out of the saved configuration.
_NOT_SAVED = {
    *("backend", "config", "debug", "dry_run", "fits", "jobs", "json", "overwrite", "quiet"),
    *("scheduler", "shard", "tensorboard", "verbose"),
}


#: Options that are one text with commas, and a list or a number in a file.
_LISTS = ("seeds", "trial_seeds", "layers")


def load_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a TOML file the defaults of this command."""
    if path is None:
        return None
    group = ctx.parent.command if ctx.parent is not None else None
    commands = {
        name: {parameter.name for parameter in command.params}
        for name, command in getattr(group, "commands", {}).items()
    }
    try:
        values = _read(path, ctx.info_name or "", commands)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return path


def _read(
    path: Path, command: str, commands: Mapping[str, Collection[str | None]]
) -> dict[str, Any]:
    """Read the options of a command from a TOML file.

    A file without tables belongs to one command, and has nothing but its options. In a file with
    tables, ``[train-head]`` and so on, each table belongs to a command, and what stands above them
    goes to every command that has such an option.

    Args:
        path: The file.
        command: The command to read for.
        commands: The names of every command's options, as Python spells them.
    """
    document = read_toml_file(path)
    tables = {name: value for name, value in document.items() if isinstance(value, dict)}
    shared = {name: value for name, value in document.items() if name not in tables}
    for name in tables:
        if name not in commands:
            raise ConfigError(f"{path}: [{name}] is no command{_did_you_mean(name, commands)}")
    values = {}
    for name, value in shared.items():
        owners = [owner for owner, known in commands.items() if _spelled(name) in known]
        if not owners or (command not in owners and not tables):
            raise ConfigError(_no_option(path, name, command, commands))
        if command in owners:
            values[_spelled(name)] = _as_typed(name, value)
    for name, value in tables.get(command, {}).items():
        if _spelled(name) not in commands[command]:
            raise ConfigError(_no_option(path, name, command, commands))
        values[_spelled(name)] = _as_typed(name, value)
    return values


def _as_typed(name: str, value: Any) -> Any:
    """Return a value as the command line has it: seeds and readouts may be lists in a file."""
    if _spelled(name) in _LISTS and isinstance(value, (list, int)) and value is not True:
        return ",".join(map(str, value if isinstance(value, list) else [value]))
    return value


def _spelled(name: str) -> str:
    return name.replace("-", "_")


def _no_option(
    path: Path, name: str, command: str, commands: Mapping[str, Collection[str | None]]
) -> str:
    known = [str(option) for option in commands[command]]
    return f"{path}: {name!r} is not an option of {command}{_did_you_mean(_spelled(name), known)}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0].replace('_', '-')}?" if near else ""


def resolved_options(ctx: typer.Context) -> dict[str, Any]:
    """Return every option of this call as plain TOML values, ready to be given as --config."""
    return {
        name: _plain(value)
        for name, value in ctx.params.items()
        if value is not None and name not in _NOT_SAVED
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    text = str(value) if isinstance(value, Path) else value
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # bytes of the command line that are no text
            raise ConfigError(f"found {text!r} among the options, expected UTF-8") from None
    return text
