"""Capture points: where a tensor is taken, the plan of all, and those that ``--layers`` names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from ..errors import CaptureError
from ..models.spec import ALL_OF_IT, CallForm
from ..utils.decoding import Count, Positive, decode

if TYPE_CHECKING:
    from .trace import FunctionCall, ModuleCall, Trace

Kind = Literal["input", "output", "function"]

#: The name of what is pooled, where that is another tensor than the last layer's state.
POOLED = "pooled"


@dataclass(frozen=True)
class CapturePoint:
    """One tensor of a forward pass, named by where it appears."""

    #: What is shown: ``input``, or the layer that made the tensor.
    name: str
    #: An argument of a module, an output of a module, or the tensor of a function call.
    kind: Kind
    #: The module; for a function call the module whose end the call is counted from.
    module: str
    #: Which call of the module in a forward pass, from 1.
    call: Positive
    #: Which tensor, among the arguments or outputs; for a function its outputs, then arguments.
    index: Count
    #: Numbers per node.
    width: Positive
    #: What consumes the tensor, for the table.
    consumer: str
    #: The function calls from the end of the module to the tensor, checked at run time.
    calls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.calls) != (self.kind == "function"):
            raise CaptureError(
                f"found calls = {self.calls}, expected "
                f"{'at least one' if self.kind == 'function' else 'none'} for kind {self.kind!r}"
            )

    @property
    def function(self) -> str | None:
        """The function whose tensor is taken, if it is not a module's."""
        return self.calls[-1] if self.calls else None

    @property
    def place(self) -> str:
        """Where the tensor is taken, as a text."""
        module = (self.module or "the model") + (f" (call {self.call})" if self.call > 1 else "")
        if self.kind == "function":
            return f"{' > '.join(self.calls)} after {module}"
        return f"{self.kind} of {module}"


@dataclass(frozen=True)
class CapturePlan:
    """The tensors that make up a model's history, in execution order, the last state last.

    Readouts take the last one for the state of the last layer: what is pooled, where that is
    another tensor, stands before it.
    """

    points: tuple[CapturePoint, ...]
    #: What a user should know about them.
    notes: tuple[str, ...] = ()
    #: How often each layer ran in the probe pass; another pass must not run more of them.
    runs: Mapping[str, Count] = field(default_factory=dict)
    #: What the model's ``forward`` is given; whatever the data have, in caches of version 1.0.
    call: CallForm = ALL_OF_IT

    #: The columns of :meth:`table`.
    COLUMNS: ClassVar[tuple[str, ...]] = ("layer", "name", "width", "taken at", "consumed by")

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each layer."""
        return tuple(point.name for point in self.points)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers per node of each layer."""
        return tuple(point.width for point in self.points)

    def table(self) -> list[tuple[str, ...]]:
        """Return a row per layer, with the columns :attr:`COLUMNS`."""
        return [
            (str(position), point.name, str(point.width), point.place, point.consumer)
            for position, point in enumerate(self.points)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        points = [{**asdict(point), "calls": list(point.calls)} for point in self.points]
        call = {"given": self.call.given, "no_pass": self.call.no_pass}
        lists = {name: None if names is None else list(names) for name, names in call.items()}
        notes = {"points": points, "notes": list(self.notes)}
        return {**notes, "runs": dict(self.runs), "call": lists}

    @classmethod
    def from_json(cls, value: Any) -> CapturePlan:
        """Return the plan stored by :meth:`to_json`.

        Raises:
            CaptureError: if the value is anything else.
        """
        if isinstance(value, dict):  # an earlier version recorded neither
            value = {"runs": {}, "call": {"given": None, "no_pass": []}, **value}
        plan = decode(cls, value, "capture plan", error=CaptureError)
        if not plan.points:
            raise CaptureError("capture plan: found no points, expected a list of them")
        return plan


# --- from a value of the probe pass to the point by which every later pass finds it again


@dataclass(frozen=True)
class TimedPoint:
    """A capture point, and when in the probe pass its tensor was there."""

    time: int
    point: CapturePoint
    value: int = -1  #: the value of the probe pass
    pooled: bool = False  #: whether it is what the readout consumes, beside the last state


def module_point(
    trace: Trace,
    call: ModuleCall,
    kind: Literal["input", "output"],
    value: int,
    name: str,
    consumer: str,
) -> TimedPoint:
    """Take a value where it goes into, or comes out of, a module."""
    point = CapturePoint(
        name=name,
        kind=kind,
        module=call.name,
        call=call.number,
        index=call.tensors(kind).index(value),
        width=trace.values[value].width,
        consumer=consumer,
    )
    return TimedPoint(call.start if kind == "input" else call.end, point, value)


def anchor_value(trace: Trace, value: int, cut: int, name: str, consumer: str) -> TimedPoint:
    """Take a value at the last place it passes before it is consumed at the time ``cut``.

    The last, because what leaves a tensor alone in the probe pass may not in training: dropout.
    """
    ends = [call for call in trace.modules if value in call.outputs and call.end <= cut]
    passes = [call for call in trace.functions if value in call.outputs and call.time < cut]
    last_end = max(ends, key=lambda call: call.end, default=None)
    last_pass = passes[-1] if passes else None
    if last_end is not None and (last_pass is None or last_end.end > last_pass.time):
        return module_point(trace, last_end, "output", value, name, consumer)
    since = last_pass.time if last_pass is not None else 0
    for call in trace.modules:
        if since < call.start <= cut and value in call.inputs:
            return module_point(trace, call, "input", value, name, consumer)
    for function in trace.functions:
        if since <= function.time <= cut and function.counted and value in function.slots:
            return _function_point(trace, function, value, name, consumer)
    raise CaptureError(
        f"what the readout consumes after {name!r} is neither a module's nor a torch function's "
        "tensor (scripted code?); name a module to capture instead with --layers"
    )


def _function_point(
    trace: Trace, function: FunctionCall, value: int, name: str, consumer: str
) -> TimedPoint:
    """Take a value from a function call, counted from the end of the last module before it."""
    before = [call for call in trace.modules if 0 <= call.end < function.time]
    start = max(before, key=lambda call: call.end)
    calls = [
        call.name
        for call in trace.functions
        if call.counted and start.end < call.time <= function.time
    ]
    point = CapturePoint(
        name=name,
        kind="function",
        module=start.name,
        call=start.number,
        index=function.slots.index(value),
        width=trace.values[value].width,
        consumer=consumer,
        calls=tuple(calls),
    )
    return TimedPoint(function.time, point, value)


# --- the points a user asks for with ``--layers``
#
# A name says the same whether or not the layers were found by themselves: the activation of a
# module as the next layer consumes it, on each call of the module. Of modules inside each other
# that a glob matches, the outermost are meant.


_SLICE = re.compile(r"(-?\d{1,9})?:(-?\d{1,9})?(?::(-?\d{1,9})?)?")
_POSITION = re.compile(r"-?\d{1,9}")
_TENSOR = re.compile(r"(?P<module>.*):(?P<kind>input|output)(?::(?P<place>\d+))?")

#: Finds the points of a model whose layers are these calls.
NamedLayers = Callable[[Sequence["ModuleCall"]], Sequence[TimedPoint]]


def split_layers(layers: str | Sequence[str | int]) -> list[str]:
    """Return the parts of a ``layers`` option."""
    parts = layers.split(",") if isinstance(layers, str) else [str(part) for part in layers]
    parts = [part.strip() for part in parts]
    if not parts or not all(parts):
        raise CaptureError(f"--layers {layers!r}: empty; expected names, globs or positions")
    if "steps" in parts and len(parts) > 1:
        raise CaptureError(
            f"--layers {','.join(parts)}: found steps beside others, expected steps alone"
        )
    return parts


def select_points(
    trace: Trace,
    automatic: Sequence[TimedPoint],
    problem: CaptureError | None,
    parts: Sequence[str],
    named_layers: NamedLayers,
) -> list[TimedPoint]:
    """Return the points that are asked for, in execution order, each tensor once.

    ``automatic`` is the automatic list as far as it goes, ``problem`` why it goes no further;
    ``named_layers`` is called where no layers were found, with the calls that are.
    """
    by_position = [part for part in parts if _SLICE.fullmatch(part) or _POSITION.fullmatch(part)]
    if by_position and not automatic and problem is not None:
        raise problem
    calls = [] if automatic else _outermost(trace, [p for p in parts if p not in by_position])
    handed_on = named_layers(calls) if calls else automatic
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
        values = [value for call in calls for value in call.tensors(kind)]
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


def _tensors(
    trace: Trace, call: ModuleCall, kind: Literal["input", "output"], place: str | None
) -> list[TimedPoint]:
    """Return the point of the tensor at a place, or of the first with node rows, if any."""
    values = call.tensors(kind)
    if place is not None:
        rows = [value for value in values[int(place) :][:1] if trace.has_node_rows(value)]
    else:
        rows = [value for value in values if trace.has_node_rows(value)]
        rows = [value for value in rows if not trace.edge_only(value)] or rows
    name = f"{call.label}:{kind}" + ("" if place is None else f":{place}")
    return [module_point(trace, call, kind, value, name, "chosen by name") for value in rows[:1]]


def _unknown(trace: Trace, automatic: Sequence[TimedPoint], part: str) -> CaptureError:
    match = _TENSOR.fullmatch(part)
    names = [timed.point.name for timed in automatic]
    names += [call.label for call in trace.modules if call.name]
    near = difflib.get_close_matches(
        match["module"] if match else part, dict.fromkeys(names), n=3, cutoff=0.5
    )
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(names[:8])}, ..."
    return CaptureError(f"--layers {part}: no layer and no module that ran is called that; {hint}")
