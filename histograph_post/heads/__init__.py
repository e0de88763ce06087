"""Readouts: HistoGraph and its rivals, all of them ``head(history, batch) -> output``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_names
from .registry import HEADS, HeadInfo, build_head, head_config, head_info, head_names

if TYPE_CHECKING:
    from .base import History as History
    from .base import Readout as Readout
    from .histograph import HistoGraphHead as HistoGraphHead

#: Public name -> module. Loaded on first use: the registry alone does not need torch.
_LAZY = {"HistoGraphHead": ".histograph", "History": ".base", "Readout": ".base"}
__all__ = [
    "HEADS",
    "HeadInfo",
    "HistoGraphHead",
    "History",
    "Readout",
    "build_head",
    "head_config",
    "head_info",
    "head_names",
]


__getattr__ = lazy_names(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
