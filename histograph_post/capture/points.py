"""Capture points: where in a forward pass a tensor is taken, and the plan of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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

    def renamed(self, name: str) -> TimedPoint:
        """Return the same point under another name."""
        return replace(self, point=replace(self.point, name=name))


def module_point(
    trace: Trace,
    call: ModuleCall,
    kind: Literal["input", "output"],
    value: int,
    *,
    name: str,
    consumer: str,
) -> TimedPoint:
    """Take a value where it goes into, or comes out of, a module."""
    values, time = (call.inputs, call.start) if kind == "input" else (call.outputs, call.end)
    point = CapturePoint(
        name=name,
        kind=kind,
        module=call.name,
        call=call.number,
        index=values.index(value),
        width=trace.values[value].width,
        consumer=consumer,
    )
    return TimedPoint(time, point, value)


def anchor_value(trace: Trace, value: int, *, cut: int, name: str, consumer: str) -> TimedPoint:
    """Take a value at the last place it passes before it is consumed at the time ``cut``.

    The last, because what leaves a tensor alone in the probe pass may not in training: dropout.
    """
    ends = [call for call in trace.modules if value in call.outputs and call.end <= cut]
    passes = [call for call in trace.functions if value in call.outputs and call.time < cut]
    last_end = max(ends, key=lambda call: call.end, default=None)
    last_pass = passes[-1] if passes else None
    if last_end is not None and (last_pass is None or last_end.end > last_pass.time):
        return module_point(trace, last_end, "output", value, name=name, consumer=consumer)
    since = last_pass.time if last_pass is not None else 0
    for call in trace.modules:
        if since < call.start <= cut and value in call.inputs:
            return module_point(trace, call, "input", value, name=name, consumer=consumer)
    for function in trace.functions:
        if since <= function.time <= cut and function.counted and value in function.slots:
            return _function_point(trace, function, value, name=name, consumer=consumer)
    raise CaptureError(
        f"what the readout consumes after {name!r} is neither a module's nor a torch function's "
        "tensor (scripted code?); name a module to capture instead with --layers"
    )


def _function_point(
    trace: Trace, function: FunctionCall, value: int, *, name: str, consumer: str
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
