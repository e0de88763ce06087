"""Which rows train, validate and test: read with the data, from a file, or made; always saved.

types       Split and Splits, checked and saved
resolving   what --split asks for
files       folders of index files, as OGB and DGCNN lay them out
making      random, stratified, k-fold
scaffold    molecules by their scaffold
"""

from __future__ import annotations

from .resolving import SPLIT_FORMS, resolve_splits
from .types import PARTS, Split, Splits

__all__ = ["PARTS", "SPLIT_FORMS", "Split", "Splits", "resolve_splits"]
