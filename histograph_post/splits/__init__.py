"""Splits: labels, a file or a seed come in; which rows train, validate and test goes out.

Read ``split.py`` first (a split, checked, saved and read), then ``making.py`` (what ``--split``
asks for: random, stratified, by scaffold, in k folds).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names

if TYPE_CHECKING:
    from .making import SPLIT_FORMS, resolve_splits
    from .split import PARTS, Split, Splits

__all__ = [
    "PARTS",
    "SPLIT_FORMS",
    "Split",
    "Splits",
    "resolve_splits",
]

__getattr__ = lazy_names(
    __name__,
    {
        ".making": ("SPLIT_FORMS", "resolve_splits"),
        ".split": ("PARTS", "Split", "Splits"),
    },
)
