"""Capture: a model and a batch come in; a plan of its layers goes out, then their activations.

Layer i's activation is what the next layer consumes, the last one's what the readout consumes, and
layer 0's the embedded input. Read ``plan.py`` first: it runs the model once (``trace.py``), finds
the layers in what it did (``layers.py``, ``readout.py``) and decides where to take each
(``points.py``). ``recorder.py`` takes them at run time; ``parity.py`` shows that nothing changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names

if TYPE_CHECKING:
    from .parity import LayerParity as LayerParity
    from .parity import Parity as Parity
    from .parity import check_parity as check_parity
    from .plan import plan_capture as plan_capture
    from .points import CapturePlan as CapturePlan
    from .points import CapturePoint as CapturePoint
    from .recorder import Capture as Capture
    from .recorder import Captured as Captured

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
        "Capture": ".recorder",
        "CapturePlan": ".points",
        "CapturePoint": ".points",
        "Captured": ".recorder",
        "LayerParity": ".parity",
        "Parity": ".parity",
        "check_parity": ".parity",
        "plan_capture": ".plan",
    },
)
