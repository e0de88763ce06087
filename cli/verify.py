"""`histograph verify`: check every byte of a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .terminal import Terminal


def verify(
    terminal: Terminal,
    cache: Annotated[Path, typer.Argument(metavar="CACHE", help="Folder of a cache.")],
) -> None:
    """Check a cache: every checksum, its structure, its values and its splits."""
    from histograph_post.errors import CacheError
    from histograph_post.storage import verify_cache

    with terminal.progress("verifying bytes") as update:
        report = verify_cache(cache, progress=update)
    terminal.table(
        f"{cache}",
        ["file", "checked", "found"],
        [[row.file, row.checked, row.problem or "ok"] for row in report.rows],
    )
    if not report.ok:
        if terminal.json:
            terminal.result({"ok": False, "problems": list(report.problems)})
        raise CacheError(f"{cache}: {len(report.problems)} of {len(report.rows)} files are damaged")
    terminal.result(
        {"ok": True, "files": len(report.rows)}, next_command=f"histograph inspect {cache}"
    )
