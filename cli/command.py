"""What every command shares: --config, --json, -v, -q, --debug, one-line errors, exit codes."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import platform
import re
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from histograph_post import __version__
from histograph_post.errors import ConfigError, HistographError, printable, raised_at
from histograph_post.runs.run import EVENTS_NAME
from histograph_post.utils.files import refuse_url
from histograph_post.utils.machine import keep_memory
from histograph_post.utils.text import duration

from .configuration import load_config, resolved_options
from .guidance import COMMANDS, DEFAULT_OUTPUTS, default_output
from .main import raised_once, tell
from .terminal import EventFiles, Terminal

#: The heading of the shared options in a command's help.
_PANEL = "Common options"
#: The heading of options that come as a pair, --this and --no-this: as a column of any other panel,
#: the second name would leave no room for the texts.
_SWITCHES = "On unless switched off"
#: Characters that are quoted of a library's own message.
_LONGEST_QUOTE = 300


class _UntypedFlags:
    """Shows nothing for what a flag takes in the help, where typer would show ``<bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options, ``--help`` included."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class Command(_UntypedFlags, TyperCommand):
    """One command."""


class CommandGroup(_UntypedFlags, TyperGroup):
    """All commands."""


@dataclass(frozen=True)
class OptionGroup:
    """Options that several commands share: the fields of a dataclass, each annotated for typer.

    A command with a parameter of such a type gets its fields as options, in that place. Every field
    has a default; a command that needs another one declares the field again in a subclass.
    """

    #: The heading of these options in a command's help; by default that of its own.
    PANEL: ClassVar[str | None] = None


def register(
    app: typer.Typer,
    function: Callable[..., None],
    *,
    trains: bool = False,
    runs_models: bool = False,
    shares_work: bool = False,
    trains_together: bool = False,
) -> None:
    """Add ``function(terminal, ...)`` to the app as a command with the shared options.

    Args:
        app: The command line.
        function: What the command does; its parameters are the command's own options.
        trains: Whether it trains something, and so can write event files.
        runs_models: Whether it runs a user's model, whose batches may be large.
        shares_work: Whether several processes that ``torchrun`` starts each do a part of it.
        trains_together: Whether such processes train one network together; the first one prints.
    """

    @functools.wraps(function)
    def run(
        ctx: typer.Context,
        *,
        config: Path | None,
        json: bool,
        quiet: bool,
        verbose: bool,
        debug: bool,
        tensorboard: bool = False,
        **own: Any,
    ) -> None:
        if quiet and verbose:
            raise typer.BadParameter("give --verbose or --quiet, not both")
        with _failures_in_one_line(debug=debug), contextlib.ExitStack() as stack:
            if trains_together:
                stack.enter_context(_together(own["device"]))
                quiet = quiet or os.environ.get("RANK", "0") != "0"
            elif not shares_work:
                _refuse_other_processes(command_name)
            is_default = command_name in DEFAULT_OUTPUTS and own["out"] is None
            if is_default:
                own["out"] = ctx.params["out"] = default_output(command_name, own)
            events = None
            if tensorboard:
                events = EventFiles(own["out"])
                stack.callback(events.close)
            for value in own.values():
                if isinstance(value, Path):
                    refuse_url(value)
            options = resolved_options(ctx)
            terminal = Terminal(
                options=options, json=json, quiet=quiet, verbose=verbose, events=events
            )
            started = time.monotonic()
            terminal.detail(f"histograph-post {__version__}, Python {platform.python_version()}")
            for name, value in options.items():
                terminal.detail(f"  {name.replace('_', '-')} = {value}")
            if is_default and not own.get("dry_run"):
                terminal.note(f"writing to {own['out']} (-o chooses another place)")
            if trains or runs_models:
                terminal.load_torch()
            if runs_models:
                keep_memory()
            if own.get("out") is not None:
                _refuse_own_inputs(ctx, own["out"], is_folder=trains or shares_work)
            # What a user's model or data file prints must not mix with the result.
            with contextlib.redirect_stdout(sys.stderr):
                function(terminal, **_grouped(own, groups))
            terminal.detail(f"took {duration(time.monotonic() - started)}")

    command_name = function.__name__.replace("_", "-")
    hints = get_type_hints(function, include_extras=True)
    if command_name in DEFAULT_OUTPUTS:
        hints["out"] = _optional_output(hints["out"], DEFAULT_OUTPUTS[command_name])
    groups: dict[str, type[OptionGroup]] = {}
    own: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(hints[name], type) and issubclass(hints[name], OptionGroup):
            groups[name] = hints[name]
            own += _own_parameters(hints[name])
        elif name != "terminal":
            has_default = name == "out" and command_name in DEFAULT_OUTPUTS
            default = None if has_default else parameter.default
            own.append(parameter.replace(annotation=hints[name], default=default))
    parameters = [
        inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        *_shared_parameters(trains=trains),
    ]
    for parameter in parameters:
        _shorten_help(parameter.annotation)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    text = inspect.cleandoc(function.__doc__ or "")
    panel, example = COMMANDS[command_name]
    app.command(
        name=command_name,
        cls=Command,
        # Lines end where the terminal's do, not where those of the source do.
        help=re.sub(r"(?<!\n)\n(?!\n)", " ", text),
        epilog=f"Example: histograph {example}",
        rich_help_panel=panel,
    )(run)


def _optional_output(annotation: Any, where: str) -> Any:
    """Return the option for an output that has a place by default, which its help names."""
    kind, option = get_args(annotation)
    option = copy.copy(option)
    option.help = f"{option.help} By default {where}."
    return Annotated[kind | None, option]


def _refuse_own_inputs(ctx: typer.Context, out: Path, *, is_folder: bool) -> None:
    """Refuse an output in the place of something that the command line names as well."""
    from histograph_post.runs.folder import require_apart

    for parameter in ctx.command.params:
        value = None if parameter.name in ("out", "config") else ctx.params.get(str(parameter.name))
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str | Path):
                source = parameter.param_type_name == "argument"
                require_apart(out, each, is_folder=is_folder, within=source)


def _refuse_other_processes(name: str) -> None:
    """Refuse to do all of the work in each of several processes, into one folder."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise ConfigError(
            f"{name}: found WORLD_SIZE={processes}, expected 1: every process would do all of the "
            f"work; run it without torchrun (cache, finetune and pretrain share theirs)"
        )


@contextlib.contextmanager
def _together(device: str) -> Iterator[None]:
    """Meet the other processes of ``torchrun``, if any: one prints, one says what failed."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    from histograph_post.training.ranks import Ranks
    from histograph_post.utils.machine import resolve_device

    ranks = Ranks.start(resolve_device(device))
    assert ranks is not None
    with ranks.failing_together(), contextlib.ExitStack() as stack:
        if not ranks.is_first:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        yield


def _shorten_help(annotation: Any) -> None:
    """Show a letter for what an option takes, and nothing for a flag: the help text needs the room.

    Choices are listed in the text.
    """
    if get_origin(annotation) is not Annotated:
        return
    (kind, option), union = get_args(annotation), get_origin(get_args(annotation)[0])
    if union not in (None, list, Literal):
        kind = next(each for each in get_args(kind) if each is not type(None))
    # In an annotation, typer holds the first name for a default.
    if "/--no-" in " ".join(map(str, (option.default, *(option.param_decls or ())))):
        option.rich_help_panel, option.show_default = _SWITCHES, False
    if option.metavar is not None:
        return
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        option.metavar = "NAME"
        option.help = f"{option.help.removesuffix('.')}: {', '.join(others)} or {last}."
    else:
        option.metavar = {bool: "", int: "N", float: "X", str: "TEXT", Path: "FILE"}.get(kind)


def _own_parameters(group: type[OptionGroup]) -> list[inspect.Parameter]:
    """Return the fields of a group as parameters of a command."""
    hints, defaults = get_type_hints(group, include_extras=True), group()
    return [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(defaults, each.name),
            annotation=_in_panel(hints[each.name], group.PANEL),
        )
        for each in fields(group)
    ]


def _in_panel(annotation: Any, panel: str | None) -> Any:
    """Return an annotated option under another heading; others may use the same annotation."""
    kind, option = get_args(annotation)
    option = copy.copy(option)
    option.rich_help_panel = panel
    return Annotated[kind, option]


def _grouped(values: Mapping[str, Any], groups: Mapping[str, type[OptionGroup]]) -> dict[str, Any]:
    """Return the arguments of a command's function: each group's values as one object."""
    members = {name: [each.name for each in fields(kind)] for name, kind in groups.items()}
    taken = {member for names in members.values() for member in names}
    return {name: value for name, value in values.items() if name not in taken} | {
        name: kind(**{member: values[member] for member in members[name]})
        for name, kind in groups.items()
    }


def shared_options() -> set[str]:
    """Return the names of the options that every command has."""
    return {parameter.name for parameter in _shared_parameters(trains=False)}


@contextlib.contextmanager
def _failures_in_one_line(*, debug: bool) -> Iterator[None]:
    """Turn what is known to go wrong into one line and an exit code."""
    try:
        with raised_once():
            yield
    except KeyboardInterrupt as interrupted:
        raise typer.Exit(tell(interrupted)) from None
    except HistographError as error:
        if debug:
            traceback.print_exc()
        if error.details:
            print(printable(error.details), file=sys.stderr)
        raise _failure(printable(" ".join(str(error).split()))) from None
    except BrokenPipeError:
        # The reader of our output went away; keep the interpreter from failing at exit too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except OSError as error:
        if debug:
            traceback.print_exc()
        where = "" if error.filename is None else f"{error.filename}: "
        raise _failure(printable(where + str(error.strerror or error))) from None
    except typer.BadParameter as error:
        error.message = printable(error.message)  # it may quote what was typed
        raise
    except Exception as error:
        if not _is_out_of_memory(error):
            raise  # a mistake of ours
        if debug:
            traceback.print_exc()
        found = printable(" ".join(str(error).split())[:_LONGEST_QUOTE])
        raise _failure(
            f"memory: found too little{found and f' ({found})'}, expected more; smaller batches "
            "need less (--batch-size, --node-budget), and so do fewer --jobs"
        ) from None
    except BaseException as error:
        # Nothing here ends the process by itself: the user's code called sys.exit(), or worse.
        if debug:
            traceback.print_exc()
        found = printable(" ".join(f"{type(error).__name__}({error})".split()))
        where = raised_at(error) or "code that was called"
        raise _failure(f"{where}: found {found}, expected no exit from it") from None


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: Python's, that of a GPU, or what PyTorch takes on a CPU."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)
    )


def _failure(text: str) -> typer.Exit:
    """Print the line of an error, which only a terminal has wrapped, at words; return the exit."""
    line = f"error: {text}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
    print(line, file=sys.stderr)
    return typer.Exit(1)


def _shared_parameters(*, trains: bool) -> list[inspect.Parameter]:
    flags = {
        "json": typer.Option("--json", help="Print the result as JSON.", rich_help_panel=_PANEL),
        "quiet": typer.Option(
            "-q", "--quiet", help="Print no progress and no notes.", rich_help_panel=_PANEL
        ),
        "verbose": typer.Option(
            "-v", "--verbose", help="Also print options, epochs and times.", rich_help_panel=_PANEL
        ),
        "debug": typer.Option(
            "--debug", help="Show the traceback of an error.", rich_help_panel=_PANEL
        ),
    }
    if trains:
        flags["tensorboard"] = typer.Option(
            "--tensorboard",
            help=f"Also write TensorBoard event files, to {EVENTS_NAME}/ in the output.",
            rich_help_panel=_PANEL,
        )
    config = typer.Option(
        help="TOML file with values for any options; flags override it.",
        callback=load_config,
        is_eager=True,
        rich_help_panel=_PANEL,
    )
    annotated: dict[str, tuple[Any, Any]] = {"config": (Annotated[Path | None, config], None)}
    annotated |= {name: (Annotated[bool, option], False) for name, option in flags.items()}
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in annotated.items()
    ]
