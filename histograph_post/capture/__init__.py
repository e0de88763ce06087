"""Capture: a model and a batch come in; a plan of its layers goes out, then their activations.

Layer i's activation is what the next layer consumes, the last one's what the readout consumes, and
layer 0's the embedded input. Read ``plan.py`` first: it runs the model once (``probe.py``; what it
did is a ``trace.py``), finds the layers in that (``finding.py``; what passes messages outside of
them: ``hidden.py``), what the readout consumes of them (``readout.py``, ``joins.py``, ``steps.py``)
and which tensor each is given (``layers.py``), and decides where to take it (``points.py``).
``recorder.py`` takes them at run time; ``checks.py`` shows that nothing changed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
