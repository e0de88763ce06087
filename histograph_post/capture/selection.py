"""The layers a user asks for: positions, slices, names and globs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from ..errors import CaptureError
from .anchors import TimedPoint, module_point
from .trace import ModuleCall, Trace

_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?(?::(-?\d+)?)?")
_POSITION = re.compile(r"-?\d+")


def split_layers(layers: str | Sequence[str | int]) -> list[str]:
    """Return the parts of a ``layers`` option."""
    parts = layers.split(",") if isinstance(layers, str) else [str(part) for part in layers]
    parts = [part.strip() for part in parts]
    if not parts or not all(parts):
        raise CaptureError(f"--layers {layers!r}: empty; expected names, globs or positions")
    return parts


def uses_automatic_list(parts: Sequence[str]) -> bool:
    """Whether some part cannot be understood without the automatic list."""
    return any(_SLICE.fullmatch(part) or _POSITION.fullmatch(part) for part in parts)


def select_points(
    trace: Trace, automatic: Sequence[TimedPoint], parts: Sequence[str]
) -> list[TimedPoint]:
    """Return the points that are asked for, in execution order, each once."""
    chosen = {timed for part in parts for timed in _select(trace, automatic, part)}
    return sorted(chosen, key=lambda timed: timed.time)


def _select(trace: Trace, automatic: Sequence[TimedPoint], part: str) -> Sequence[TimedPoint]:
    if match := _SLICE.fullmatch(part):
        bounds = [int(bound) if bound else None for bound in match.groups()]
        if bounds[2] == 0:
            raise CaptureError(f"--layers {part}: a step of 0")
        selected = automatic[slice(*bounds)]
        if not selected:
            raise CaptureError(f"--layers {part}: selects none of {len(automatic)} layers")
        return selected
    if _POSITION.fullmatch(part):
        position = int(part)
        if not -len(automatic) <= position < len(automatic):
            raise CaptureError(
                f"--layers {part}: no such position, there are {len(automatic)} layers "
                f"(0 to {len(automatic) - 1}, or negative from the end)"
            )
        return [automatic[position]]
    by_name = [timed for timed in automatic if _matches(timed.point.name, part)]
    return by_name or _module_points(trace, automatic, part)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _module_points(trace: Trace, automatic: Sequence[TimedPoint], part: str) -> list[TimedPoint]:
    """Return the inputs or outputs of the modules a part names, on each of their calls."""
    pattern, _, end = (
        part.rpartition(":") if part.endswith((":input", ":output")) else (part, "", "")
    )
    kind: Literal["input", "output"] = "input" if end == "input" else "output"
    calls = [
        call
        for call in trace.modules
        if call.name and (_matches(call.name, pattern) or _matches(call.label, pattern))
    ]
    if not calls:
        raise _unknown(trace, automatic, part, pattern)
    points = [point for call in calls for point in _node_rows(trace, call, kind)]
    if not points:
        values = [value for call in calls for value in _values(call, kind)]
        shapes = ", ".join(str(list(trace.values[value].shape)) for value in values)
        raise CaptureError(
            f"--layers {part}: the {kind} of {calls[0].label!r} is {shapes or 'no tensor'}; "
            f"expected floating point with {trace.num_nodes} rows, one per node of the probe batch"
        )
    return points


def _values(call: ModuleCall, kind: str) -> tuple[int, ...]:
    return call.inputs if kind == "input" else call.outputs


def _node_rows(
    trace: Trace, call: ModuleCall, kind: Literal["input", "output"]
) -> list[TimedPoint]:
    """Return the point of the first tensor with node rows, if there is one."""
    rows = [value for value in _values(call, kind) if trace.has_node_rows(value)]
    rows = [value for value in rows if not trace.edge_only(value)] or rows
    name, consumer = f"{call.label}:{kind}", "chosen by name"
    return [
        module_point(trace, call, kind, value, name=name, consumer=consumer) for value in rows[:1]
    ]


def _unknown(
    trace: Trace, automatic: Sequence[TimedPoint], part: str, pattern: str
) -> CaptureError:
    names = [timed.point.name for timed in automatic]
    names += [call.label for call in trace.modules if call.name]
    near = difflib.get_close_matches(pattern, dict.fromkeys(names), n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(names[:8])}, ..."
    return CaptureError(f"--layers {part}: no layer and no module that ran is called that; {hint}")
