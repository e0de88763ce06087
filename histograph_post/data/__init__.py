"""Data: a specification comes in; graphs, labels (NaN is missing) and a fingerprint go out.

Read ``spec.py`` first (a specification becomes a data set, and every form of one), then
``dataset.py`` (what every later stage sees of the data).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names

if TYPE_CHECKING:
    from ..utils.levels import Level as Level
    from .dataset import GraphDataset as GraphDataset
    from .dataset import from_graphs as from_graphs
    from .links import LinkOptions as LinkOptions
    from .spec import DataSpec as DataSpec
    from .spec import load_data as load_data

__all__ = ["DataSpec", "GraphDataset", "Level", "LinkOptions", "from_graphs", "load_data"]

__getattr__ = lazy_names(
    __name__,
    {
        "DataSpec": ".spec",
        "GraphDataset": ".dataset",
        "Level": "..utils.levels",
        "LinkOptions": ".links",
        "from_graphs": ".dataset",
        "load_data": ".spec",
    },
)
