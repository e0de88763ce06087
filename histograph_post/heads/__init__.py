"""Readouts: a history of layers goes in, an output per graph, node or pair comes out.

Every one is ``head(history, batch) -> output``, and a graph's output never depends on its
batch-mates. Read ``base.py`` first, then ``histograph/head.py`` for the method of the paper;
``registry.py`` knows them all by name, and ``standardize.py`` is what stands before them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names
from .registry import (
    HEADS,
    HeadInfo,
    build_head,
    head_config,
    head_info,
    head_name,
    head_names,
    register_head,
)

if TYPE_CHECKING:
    from .base import History, Readout
    from .histograph import HistoGraphHead
    from .ragged import Graphs, pool_nodes

#: Module -> public names. Loaded on first use: the registry alone does not need torch.
_LAZY = {
    ".base": ("History", "Readout"),
    ".histograph": ("HistoGraphHead",),
    ".ragged": ("Graphs", "pool_nodes"),
}
__all__ = [
    "HEADS",
    "Graphs",
    "HeadInfo",
    "HistoGraphHead",
    "History",
    "Readout",
    "build_head",
    "head_config",
    "head_info",
    "head_name",
    "head_names",
    "pool_nodes",
    "register_head",
]


__getattr__ = lazy_names(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
