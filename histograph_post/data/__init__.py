"""Data: a specification comes in; graphs, labels (NaN is missing) and a fingerprint go out.

Read ``spec.py`` first (a specification becomes a data set, and every form of one), then
``dataset.py`` (what every later stage sees of the data).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names

if TYPE_CHECKING:
    from ..utils import Level
    from .dataset import GraphDataset, from_graphs
    from .labels import LinkOptions
    from .spec import DataSpec, load_data

__all__ = ["DataSpec", "GraphDataset", "Level", "LinkOptions", "from_graphs", "load_data"]

__getattr__ = lazy_names(
    __name__,
    {
        "..utils": ("Level",),
        ".dataset": ("GraphDataset", "from_graphs"),
        ".labels": ("LinkOptions",),
        ".spec": ("DataSpec", "load_data"),
    },
)
