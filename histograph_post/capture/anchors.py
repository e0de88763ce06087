"""Tie values of a probe pass to places that every later pass goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import CaptureError
from .points import CapturePoint
from .trace import FunctionCall, ModuleCall, Trace


@dataclass(frozen=True)
class TimedPoint:
    """A capture point, and when in the probe pass its tensor was there."""

    time: int
    point: CapturePoint


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
    return TimedPoint(time, point)


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
    return TimedPoint(function.time, point)
