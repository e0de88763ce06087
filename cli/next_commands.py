"""The command to run next, with the flags it needs where model or data are code."""

from __future__ import annotations

import shlex
from pathlib import Path

from histograph_post.runs.run import Run
from histograph_post.utils.specifications import IN_MEMORY, is_built_in


def predict_command(run: Path, *, named: bool = True) -> str:
    """Return how to predict with a run.

    Args:
        run: The run, or an export of it.
        named: Show the recorded specification of a model that is code, not ``SPEC``: for runs that
            were made just now, not for those that may come from anybody.
    """
    flags = _code({"model": Run.of(run).backbone.model.spec}, named=named)
    return f"histograph predict {run}{flags} --data SPEC -o predictions.csv"


def cache_command(folder: Path, model: str, data: str, *, named: bool = True) -> str:
    """Return how to cache the backbones that were trained in a folder."""
    return (
        f"histograph cache {folder}{_code({'model': model, 'data': data}, named=named)} -o CACHES"
    )


def _code(specs: dict[str, str], *, named: bool) -> str:
    """Return the flags that name code, which the next command does not take from a file."""
    return "".join(
        f" --{what} {shlex.quote(spec) if named and spec != IN_MEMORY else 'SPEC'}"
        for what, spec in specs.items()
        if not is_built_in(what, spec)  # type: ignore[arg-type]  # model and data
    )
