"""Capture: a model and a batch come in; a plan of its layers goes out, then their activations.

Layer i's activation is what the next layer consumes, the last one's what the readout consumes, and
layer 0's the embedded input. Read ``plan.py`` first: it runs the model once (``probe.py``; what it
did is a ``trace.py``), finds the layers in that (``finding.py``), what the readout consumes of them
(``readout.py``, ``tail.py``) and which tensor each is given (``layers.py``), and decides where to
take it (``points.py``). ``recorder.py`` takes them at run time; ``checks.py`` shows that nothing
changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names

if TYPE_CHECKING:
    from .checks import LayerParity, Parity, check_parity
    from .plan import plan_capture
    from .points import CapturePlan, CapturePoint
    from .recorder import Capture, Captured

__all__ = [
    "Capture",
    "CapturePlan",
    "CapturePoint",
    "Captured",
    "LayerParity",
    "Parity",
    "check_parity",
    "plan_capture",
]

__getattr__ = lazy_names(
    __name__,
    {
        ".checks": ("LayerParity", "Parity", "check_parity"),
        ".plan": ("plan_capture",),
        ".points": ("CapturePlan", "CapturePoint"),
        ".recorder": ("Capture", "Captured"),
    },
)
