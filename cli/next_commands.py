"""The command to run next, with the flags it needs where model or data are code."""

from __future__ import annotations

import shlex
from pathlib import Path

from histograph_post.heads.registry import registered_heads
from histograph_post.runs.run import Run
from histograph_post.utils.specifications import IN_MEMORY, is_built_in


def predict_command(run: Path, *, named: bool = True) -> str:
    """Return how to predict with a run.

    Args:
        run: The run, or an export of it.
        named: Show the recorded specification of a model that is code, not ``SPEC``: for runs that
            were made just now, not for those that may come from anybody.
    """
    opened = Run.of(run)
    flags = _code({"model": opened.backbone.model.spec}, named=named)
    for info in registered_heads():  # those that this command line has named
        if info.name == opened.stored_head["head"] and info.code is not None:
            flags += f" --head {shlex.quote(info.code)}"
    return f"histograph predict {run}{flags} --data SPEC -o predictions.csv"


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
    flags = _code({"model": model, "data": data}, named=named)
    return f"histograph cache {folder}{flags} -o CACHES"


def _code(specs: dict[str, str], *, named: bool) -> str:
    """Return the flags that name code, which the next command does not take from a file."""
    return "".join(
        f" --{what} {shlex.quote(spec) if named and spec != IN_MEMORY else 'SPEC'}"
        for what, spec in specs.items()
        if not is_built_in(what, spec)  # type: ignore[arg-type]  # model and data
    )
