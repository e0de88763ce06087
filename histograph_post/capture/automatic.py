"""The automatic list of layers: what each message-passing layer consumes, then the readout."""

from __future__ import annotations

from collections import Counter

from .anchors import TimedPoint, anchor_value, module_point
from .layers import Layer, Layers
from .readout import find_last_activation


def automatic_points(layers: Layers) -> tuple[list[TimedPoint], list[str]]:
    """Return the points of the automatic list in execution order, and notes for the user."""
    notes: list[str] = []
    consumers: dict[int, list[Layer]] = {}  # Layers that consume the same value are parallel.
    for layer in layers.layers:
        if layer.input is None:
            notes.append(f"the input of {layer.label!r} is integers: it is left out")
        else:
            consumers.setdefault(layer.input, []).append(layer)
    last = find_last_activation(layers)
    names = _unique([layers.names_of(value) for value in (*consumers, last.value)])
    points = [
        module_point(
            layers.trace,
            fed[0].call,
            "input",
            value,
            name=name,
            consumer=", ".join(layer.label for layer in fed),
        )
        for name, (value, fed) in zip(names, consumers.items(), strict=False)
    ]
    points.append(
        anchor_value(layers.trace, last.value, cut=last.cut, name=names[-1], consumer=last.consumer)
    )
    notes += [
        f"{', '.join(repr(layer.label) for layer in fed)} run side by side: one layer"
        for fed in consumers.values()
        if len(fed) > 1
    ]
    if points[-1].point.width == 1:
        notes.append(
            "the readout consumes one number per node; if that is a prediction already, "
            "leave it out with --layers 0:-1 or name what comes before it"
        )
    return points, notes


def _unique(names: list[str]) -> list[str]:
    """Tell equal names apart: the second ``conv`` that is consumed becomes ``conv~2``."""
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}~{seen[name]}")
    return unique
