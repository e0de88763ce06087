"""Data: a specification comes in; graphs, labels (NaN is missing) and a fingerprint go out.

Read ``spec.py`` first (a specification becomes a data set, and every form of one), then
``dataset.py`` (what every later stage sees of the data).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
