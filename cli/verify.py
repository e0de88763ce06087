"""`histograph verify`: check every byte of a cache."""

from __future__ import annotations

from . import options as opt
from .next_commands import command
from .terminal import Terminal


def verify(
    terminal: Terminal,
    cache: opt.CacheArgument,
) -> None:
    """Check the checksums, the structure, the values and the splits of a cache."""
    from histograph_post.caches import verify_cache
    from histograph_post.caches.manifest import is_begun, read_manifest
    from histograph_post.errors import CacheError
    from histograph_post.experiments.folds import cache_folders

    folders = cache_folders(cache)
    reports = []
    for folder in folders:
        if not is_begun(folder):
            read_manifest(folder)  # says what it is instead
        with terminal.progress("verifying bytes") as update:
            report = verify_cache(folder, progress=update)
        reports.append(report)
        terminal.table(
            f"{folder}",
            ["file", "checked", "found"],
            [[row.file, row.checked, row.problem or "ok"] for row in report.rows],
        )
    problems = [problem for report in reports for problem in report.problems]
    files = sum(len(report.rows) for report in reports)
    if problems:
        if terminal.json:
            terminal.result({"ok": False, "problems": problems})
        raise CacheError(f"{cache}: {len(problems)} of {files} files are damaged")
    terminal.result({"ok": True, "files": files}, next_command=command("inspect", cache))
