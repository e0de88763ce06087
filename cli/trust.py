"""`histograph trust`: approve the code that a run names, once for all later commands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from histograph_post.errors import ConfigError, NotFoundError

from .terminal import Terminal

if TYPE_CHECKING:
    from histograph_post.utils.trust import Trusted


def trust(
    terminal: Terminal,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN|CACHE",
            help="Folder of a run, an export, a pretraining, or one or more caches. Without it, "
            "all that you trust is listed.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    revoke: Annotated[
        str | None,
        typer.Option(
            "--revoke",
            metavar="TEXT",
            help="Revoke trust, by specification, file or hash.",
        ),
    ] = None,
) -> None:
    """Trust the code that a run, a cache or a pretraining names as its model, data or readout.

    A file does not decide what runs on your machine: commands refuse such code unless you name it.
    This shows the code, without running it, and asks. Later commands then import it without
    --model, --data or --head, as long as its files are neither moved nor changed.
    """
    from histograph_post.experiments.checkpoints import recorded_code
    from histograph_post.utils.trust import all_trusted, trust_file
    from histograph_post.utils.trust import revoke as forget
    from histograph_post.utils.trust import trust as remember

    if folder is not None and revoke is not None:
        raise typer.BadParameter("give a folder or --revoke, not both")
    if revoke is not None:
        gone = forget(revoke)
        if not gone:
            raise NotFoundError(f"{trust_file()}: found no {revoke!r}, expected one of its entries")
        _show(terminal, "No longer trusted", gone)
        terminal.result({"revoked": _plain(gone)})
        return
    if folder is None:
        known = all_trusted()
        if known:
            _show(terminal, f"Trusted ({trust_file()})", known)
        else:
            terminal.info(f"You have not trusted any code yet ({trust_file()}).")
        terminal.result({"trusted": _plain(known)})
        return
    code = recorded_code(folder)
    if not code:
        terminal.note(
            f"{folder} names no code: its model, data and readouts are built in or installed, or "
            "come from Python, and then are named by --model, --data and --head"
        )
        terminal.result({"trusted": []})
        return
    _show(terminal, f"{folder} names this code", code)
    if not yes and not _agreed():
        raise ConfigError(
            f"{folder}: found no approval, expected yes, or --yes; nothing was trusted"
        )
    remember(code)
    terminal.result(
        {"trusted": _plain(code)},
        next_command=f"histograph inspect {shlex.quote(str(folder))}",
    )


def _agreed() -> bool:
    """Ask on the terminal; without one, --yes is needed."""
    if not sys.stdin.isatty():
        return False
    print("Trust it, and run it in later commands? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _show(terminal: Terminal, title: str, entries: Sequence[Trusted]) -> None:
    terminal.table(
        title,
        ["what", "specification", "file", "sha256"],
        [[each.what, _spelled(each), each.file, each.sha256[:12]] for each in entries],
    )


def _spelled(entry: Trusted) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in entry.args.items())
    return f"{entry.spec} ({arguments})" if arguments else entry.spec


def _plain(entries: Sequence[Trusted]) -> list[dict[str, object]]:
    return [{**vars(entry), "args": dict(entry.args)} for entry in entries]
