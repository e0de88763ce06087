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

from .parity import LayerParity, Parity, check_parity
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
