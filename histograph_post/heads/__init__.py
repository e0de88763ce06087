"""Readouts: a history of layers goes in, an output per graph, node or pair comes out.

Every one is ``head(history, batch) -> output``, and a graph's output never depends on its
batch-mates. Read ``base.py`` first, then ``histograph/head.py`` for the method of the paper;
``registry.py`` knows them all by name, and ``standardize.py`` is what stands before them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
