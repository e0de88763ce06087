"""Capture: find the layers of any model, and record what they hand on.

    probe.py      one probe pass, recorded as a trace:
    trace.py      which calls made which tensors from what
    layers.py     the message-passing layers in it
    readout.py    what the readout consumes
    anchors.py    where every later pass goes through the same tensors
    plan.py       all of it: model and batch in, CapturePlan out
    recorder.py   the hooks at run time
    parity.py     proof that nothing changed

Layer i's activation is what the next layer consumes, the last one what the readout consumes, and
layer 0 the embedded input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_names

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
