"""Splits: labels, a file or a seed come in; which rows train, validate and test goes out.

Read ``types.py`` first (a split, checked and saved), then ``resolving.py`` (what ``--split`` asks
for) and ``making.py`` (random, stratified, by scaffold, in k folds).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names

if TYPE_CHECKING:
    from .resolving import SPLIT_FORMS, resolve_splits
    from .types import PARTS, Split, Splits

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
        ".resolving": ("SPLIT_FORMS", "resolve_splits"),
        ".types": ("PARTS", "Split", "Splits"),
    },
)
