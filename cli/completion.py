"""What the shell offers for the values of options: nothing here loads torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

#: Sets of each kind of data that most people ask for.
_DATA = (
    *("tu:MUTAG", "tu:PROTEINS", "tu:NCI1", "tu:IMDB-BINARY", "planetoid:Cora"),
    *("planetoid:CiteSeer", "planetoid:PubMed", "actor:", "wiki:chameleon", "wiki:squirrel"),
    *("ogbg:molhiv", "ogbg:molbbbp", "smiles:", "demo:"),
)


def heads(incomplete: str) -> list[str]:
    """Return readouts by name."""
    from histograph_post.heads.registry import HEADS

    return _beginning(HEADS, incomplete)


def several_heads(incomplete: str) -> list[str]:
    """Return readouts behind those that a list has already."""
    from histograph_post.heads.registry import HEADS, RIVALS

    before, comma, last = incomplete.rpartition(",")
    names = [*HEADS, *RIVALS] if comma else ["all", *HEADS, *RIVALS]
    return [f"{before}{comma}{name}" for name in _beginning(names, last)]


def metrics(incomplete: str) -> list[str]:
    """Return the metrics of all tasks."""
    from .options import METRICS

    return _beginning(METRICS, incomplete)


def models(incomplete: str) -> list[str]:
    """Return the built-in models, and the Python files of this folder."""
    from histograph_post.utils.specifications import BUILT_IN_MODELS, PUBLIC_MODELS

    names = (*BUILT_IN_MODELS, *PUBLIC_MODELS)
    files = [f"{path.name}:" for path in Path().glob("*.py")]
    return _beginning([*names, *sorted(files)], incomplete)


def data(incomplete: str) -> list[str]:
    """Return data sets, and those below the folder that the environment names."""
    root = Path(os.environ.get("HISTOGRAPH_DATA_ROOT", ""))
    local = [f"tu:{path.parent.name}" for path in root.glob("tu/*/raw")] if root.name else []
    return _beginning(dict.fromkeys([*_DATA, *sorted(local)]), incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
