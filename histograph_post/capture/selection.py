"""The layers a user asks for with ``--layers``.

A name says the same whether or not the layers were found by themselves: the activation of a module
as the next layer consumes it, on each call of the module. Of modules inside each other that a glob
matches, the outermost are meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Literal, cast

from ..errors import CaptureError
from .points import TimedPoint, module_point
from .trace import ModuleCall, Trace

_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?(?::(-?\d+)?)?")
_POSITION = re.compile(r"-?\d+")
_TENSOR = re.compile(r"(?P<module>.*):(?P<kind>input|output)(?::(?P<place>\d+))?")

#: Finds the points of a model whose layers are these calls.
NamedLayers = Callable[[Sequence[ModuleCall]], Sequence[TimedPoint]]


def split_layers(layers: str | Sequence[str | int]) -> list[str]:
    """Return the parts of a ``layers`` option."""
    parts = layers.split(",") if isinstance(layers, str) else [str(part) for part in layers]
    parts = [part.strip() for part in parts]
    if not parts or not all(parts):
        raise CaptureError(f"--layers {layers!r}: empty; expected names, globs or positions")
    return parts


def asks_for_steps(parts: Sequence[str]) -> bool:
    """Whether layers that pass messages several times are to be taken apart."""
    if "steps" in parts and len(parts) > 1:
        raise CaptureError(
            f"--layers {','.join(parts)}: found steps beside others, expected steps alone"
        )
    return "steps" in parts


def select_points(
    trace: Trace,
    automatic: Sequence[TimedPoint],
    problem: CaptureError | None,
    parts: Sequence[str],
    named_layers: NamedLayers,
) -> list[TimedPoint]:
    """Return the points that are asked for, in execution order, each tensor once.

    Args:
        trace: The probe pass.
        automatic: The automatic list, as far as it goes.
        problem: Why it goes no further.
        parts: What is asked for.
        named_layers: Called where no layers were found, with the calls that are.
    """
    by_position = [part for part in parts if _SLICE.fullmatch(part) or _POSITION.fullmatch(part)]
    if by_position and not automatic and problem is not None:
        raise problem
    others = [part for part in parts if part not in by_position]
    handed_on = automatic
    if not automatic and (calls := _outermost(trace, others)):
        handed_on = named_layers(calls)
    chosen: dict[int, TimedPoint] = {}
    for part in parts:
        if part in by_position:
            found = _by_position(automatic, part)
        else:
            found = _by_name(trace, automatic, handed_on, part, named_layers)
        for timed in found:
            chosen.setdefault(timed.value, timed)
    return sorted(chosen.values(), key=lambda timed: (timed.time, timed.point.name))


def _by_position(automatic: Sequence[TimedPoint], part: str) -> Sequence[TimedPoint]:
    if match := _SLICE.fullmatch(part):
        bounds = [int(bound) if bound else None for bound in match.groups()]
        if bounds[2] == 0:
            raise CaptureError(f"--layers {part}: a step of 0")
        selected = automatic[slice(*bounds)]
        if not selected:
            raise CaptureError(f"--layers {part}: selects none of {len(automatic)} layers")
        return selected
    position = int(part)
    if not -len(automatic) <= position < len(automatic):
        raise CaptureError(
            f"--layers {part}: no such position, there are {len(automatic)} layers "
            f"(0 to {len(automatic) - 1}, or negative from the end)"
        )
    return [automatic[position]]


def _by_name(
    trace: Trace,
    automatic: Sequence[TimedPoint],
    handed_on: Sequence[TimedPoint],
    part: str,
    named_layers: NamedLayers,
) -> list[TimedPoint]:
    """Return the points of a name or glob: of layers, or of modules that ran."""
    by_name = [timed for timed in automatic if _matches(timed.point.name, part)]
    if by_name and not _TENSOR.fullmatch(part):
        return by_name
    calls = _outermost(trace, [part])
    if not calls:
        raise _unknown(trace, automatic, part)
    if match := _TENSOR.fullmatch(part):
        kind = cast(Literal["input", "output"], match["kind"])
        points = [point for call in calls for point in _tensors(trace, call, kind, match["place"])]
    else:
        kind = "output"
        points = [
            point
            for call in calls
            for point in _as_consumed(trace, handed_on, call)
            or _as_consumed(trace, named_layers(calls), call)
            or _tensors(trace, call, kind, None)
        ]
    if not points:
        values = [value for call in calls for value in _values(call, kind)]
        shapes = ", ".join(str(list(trace.values[value].shape)) for value in values)
        raise CaptureError(
            f"--layers {part}: the {kind} of {calls[0].label!r} is {shapes or 'no tensor'}; "
            f"expected floating point with {trace.num_nodes} rows, one per node of the probe batch"
        )
    return points


def _outermost(trace: Trace, parts: Sequence[str]) -> list[ModuleCall]:
    """Return the calls that the parts name and that no other call they name contains."""
    patterns = [match["module"] if (match := _TENSOR.fullmatch(part)) else part for part in parts]
    named = [
        call
        for call in trace.modules
        if call.name
        and any(_matches(call.name, each) or _matches(call.label, each) for each in patterns)
    ]
    inside = {id(call) for call in named}
    return [call for call in named if not any(id(outer) in inside for outer in call.enclosing())]


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _as_consumed(
    trace: Trace, handed_on: Sequence[TimedPoint], call: ModuleCall
) -> list[TimedPoint]:
    """Return the first activation that comes of a call: what the next layer consumes of it."""
    for timed in sorted(handed_on, key=lambda timed: timed.value):
        outputs = [output for output in call.outputs if trace.has_node_rows(output)]
        if any(trace.derives(timed.value, output) for output in outputs):
            return [timed]
    return []


def _values(call: ModuleCall, kind: str) -> tuple[int, ...]:
    return call.inputs if kind == "input" else call.outputs


def _tensors(
    trace: Trace, call: ModuleCall, kind: Literal["input", "output"], place: str | None
) -> list[TimedPoint]:
    """Return the point of the tensor at a place, or of the first with node rows, if any."""
    values = _values(call, kind)
    if place is not None:
        rows = [value for value in values[int(place) :][:1] if trace.has_node_rows(value)]
    else:
        rows = [value for value in values if trace.has_node_rows(value)]
        rows = [value for value in rows if not trace.edge_only(value)] or rows
    name = f"{call.label}:{kind}" + ("" if place is None else f":{place}")
    return [
        module_point(trace, call, kind, value, name=name, consumer="chosen by name")
        for value in rows[:1]
    ]


def _unknown(trace: Trace, automatic: Sequence[TimedPoint], part: str) -> CaptureError:
    match = _TENSOR.fullmatch(part)
    names = [timed.point.name for timed in automatic]
    names += [call.label for call in trace.modules if call.name]
    near = difflib.get_close_matches(
        match["module"] if match else part, dict.fromkeys(names), n=3, cutoff=0.5
    )
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(names[:8])}, ..."
    return CaptureError(f"--layers {part}: no layer and no module that ran is called that; {hint}")
