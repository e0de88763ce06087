"""The command to run next, ready to be copied: with the flags it needs, quoted for the shell."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from histograph_post.heads.registry import registered_heads
from histograph_post.runs.run import Run
from histograph_post.utils.specifications import IN_MEMORY, is_built_in


def command(*words: object, **flags: Any) -> str:
    """Return a command as the shell takes it.

    Args:
        words: The command and its arguments; paths and globs are quoted.
        flags: Options by the names of their parameters: those that are on, given, and not "auto".
    """
    return " ".join(["histograph", *(shlex.quote(str(word)) for word in words), *_shown(flags)])


def _shown(flags: Mapping[str, Any]) -> list[str]:
    parts = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            parts.append(flag)
        elif value not in (None, False, "auto"):
            values = value if isinstance(value, (list, tuple)) else [value]
            parts += [f"{flag} {shlex.quote(str(each))}" for each in values]
    return parts


def predict_command(run: Path, *, named: bool = True) -> str:
    """Return how to predict with a run.

    Args:
        run: The run, or an export of it.
        named: Show the recorded specification of a model that is code, not ``SPEC``: for runs that
            were made just now, not for those that may come from anybody.
    """
    opened = Run.of(run)
    backbone = opened.backbone
    flags: dict[str, Any] = _code({"model": backbone.model.spec}, named=named)
    for info in registered_heads():  # those that this command line has named
        if info.name == opened.stored_head["head"] and info.code is not None:
            flags["head"] = info.code
    if named and not backbone.in_run:
        # Not --trust-checkpoint: what the user trusts is remembered, and a cache may come from
        # anybody.
        flags["key_map"] = backbone.option_path("key_map")
    return command("predict", run, **flags, data="SPEC") + " -o predictions.csv"


def cache_command(
    folder: Path, *, model: str | None = None, data: str | None = None, named: bool = True
) -> str:
    """Return how to cache the backbones that were trained in a folder.

    Args:
        folder: What ``pretrain`` or ``finetune`` wrote.
        model: How the model was named, if not as it is recorded.
        data: How the data were named, if not as they are recorded.
        named: Show recorded specifications that are code, not ``SPEC``.
    """
    if model is None or data is None:
        recorded = Run.of(folder).backbone
        model, data = model or recorded.model.spec, data or recorded.data.spec
    return command("cache", folder, **_code({"model": model, "data": data}, named=named)) + (
        " -o CACHES"
    )


def _code(specs: dict[str, str], *, named: bool) -> dict[str, str]:
    """Return the flags that name code, which the next command does not take from a file."""
    return {
        what: spec if named and spec != IN_MEMORY else "SPEC"
        for what, spec in specs.items()
        if not is_built_in(what, spec)  # type: ignore[arg-type]  # model and data
    }
