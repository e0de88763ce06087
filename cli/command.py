"""What every command shares: --config, --json, --quiet, --debug, one-line errors, exit codes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import tomllib
import traceback
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from histograph_post.errors import ConfigError, HistographError

from .terminal import Terminal, printable

#: Options that say how to run, not what to make: they stay out of the saved configuration.
_NOT_SAVED = {"config", "debug", "dry_run", "json", "overwrite", "quiet", "shard"}


def register(app: typer.Typer, function: Callable[..., None]) -> None:
    """Add ``function(terminal, ...)`` to the app as a command with the shared options."""

    @functools.wraps(function)
    def run(
        ctx: typer.Context, *, config: Path | None, json: bool, quiet: bool, debug: bool, **own: Any
    ) -> None:
        terminal = Terminal(json=json, quiet=quiet, options=_resolved_options(ctx))
        try:
            # What a user's model or data file prints must not mix with the result.
            with contextlib.redirect_stdout(sys.stderr):
                function(terminal, **own)
        except KeyboardInterrupt:
            terminal.say("interrupted; run the same command again to go on")
            raise typer.Exit(130) from None
        except HistographError as error:
            if debug:
                traceback.print_exc()
            if error.details:
                print(printable(error.details), file=sys.stderr)
            print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
            raise typer.Exit(1) from None
        except BrokenPipeError:
            # The reader of our output went away; keep the interpreter from failing at exit too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except OSError as error:
            if debug:
                traceback.print_exc()
            where = "" if error.filename is None else f"{error.filename}: "
            print(f"error: {printable(where + str(error.strerror or error))}", file=sys.stderr)
            raise typer.Exit(1) from None

    hints = get_type_hints(function, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "terminal"
    ]
    parameters = [
        inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        *_shared_parameters(),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name=function.__name__.replace("_", "-"))(run)


def _shared_parameters() -> list[inspect.Parameter]:
    group = "Common options"
    shared = {
        "config": (
            Annotated[
                Path | None,
                typer.Option(
                    help="A TOML file that sets any option; flags win.",
                    callback=_load_config,
                    is_eager=True,
                    rich_help_panel=group,
                ),
            ],
            None,
        ),
        "json": (
            Annotated[
                bool,
                typer.Option("--json", help="Print one JSON object.", rich_help_panel=group),
            ],
            False,
        ),
        "quiet": (
            Annotated[
                bool,
                typer.Option("-q", "--quiet", help="No progress or notes.", rich_help_panel=group),
            ],
            False,
        ),
        "debug": (
            Annotated[
                bool,
                typer.Option(
                    "--debug", help="Show the traceback of an error.", rich_help_panel=group
                ),
            ],
            False,
        ),
    }
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in shared.items()
    ]


def _load_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a TOML file the defaults of this command."""
    if path is None:
        return None
    try:
        values = read_config(path, command=ctx.info_name or "")
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    known = {parameter.name for parameter in ctx.command.params}
    unknown = sorted(set(values) - known)
    if unknown:
        raise typer.BadParameter(f"{path}: {unknown[0]!r} is not an option of {ctx.info_name}")
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return path


def read_config(path: Path, *, command: str) -> dict[str, Any]:
    """Read options from a TOML file: top-level keys, or those under the command's own table."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not a readable TOML file ({error})") from None
    values = document.get(command, document)
    return {name.replace("-", "_"): value for name, value in values.items()}


def _resolved_options(ctx: typer.Context) -> dict[str, Any]:
    """Return every option of this call as plain TOML values, ready to be given as --config."""
    return {
        name: _plain(value)
        for name, value in ctx.params.items()
        if value is not None and name not in _NOT_SAVED
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
