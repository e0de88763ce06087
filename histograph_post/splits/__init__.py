"""Splits: labels, a file or a seed come in; which rows train, validate and test goes out.

Read ``split.py`` first (a split, checked, saved and read), then ``making.py`` (what ``--split``
asks for: random, stratified, by scaffold, in k folds).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
