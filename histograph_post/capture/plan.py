"""Decide which tensors of a model to capture, from one probe pass.

Layers are found by themselves (what each message-passing layer consumes, then the readout), or are
asked for by position, name or glob (``points.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn
from torch_geometric.data import Batch, HeteroData
from torch_geometric.nn import MessagePassing

from ..errors import CaptureError
from ..models.model_call import given_to, visible
from ..models.spec import CallForm
from .finding import find_layers, repeats
from .hidden import refuse_hidden_steps
from .layers import Layer, Layers, choose_inputs, made_by
from .passes import eager_module
from .points import (
    POOLED,
    CapturePlan,
    CapturePoint,
    TimedPoint,
    anchor_value,
    module_point,
    select_points,
    split_layers,
)
from .probe import probe
from .readout import PADDING, BranchEnd, Consumed, find_ends
from .trace import ModuleCall, Trace


def plan_capture(
    model: nn.Module,
    batch: Batch,
    *,
    layers: str | Sequence[str] = "auto",
    no_pass: Sequence[str] = (),
) -> CapturePlan:
    """Run the model once on ``batch`` and decide what to capture.

    Args:
        model: any module :func:`~histograph_post.models.call_model` can call. Its parameters,
            buffers, attributes and modes are the same afterwards.
        batch: a few graphs; more than one, if there are more.
        layers: ``auto``; ``steps``, to take layers that pass messages several times in one call
            apart; or what to take instead, as a list or separated by commas: positions in the
            automatic list (``0``, ``-1``, ``1:``), or names or globs of modules, whose activation
            is taken as the next layer consumes it. ``name:input`` and ``name:output`` take just
            that, ``name:input:1`` the second tensor of it.
        no_pass: attributes of the data that the model is not given.

    Raises:
        CaptureError: if the layers cannot be found, or what is named is not there.
    """
    model = eager_module(model)
    if isinstance(batch, HeteroData):
        raise CaptureError(
            "found graphs with several types of nodes (HeteroData), expected one type: "
            "to_homogeneous() makes one of them, and the model has to be of that kind too"
        )
    seen = visible(batch, ())
    for name in no_pass:
        if name not in seen:
            raise CaptureError(
                f"--no-pass {name}: the data has no such attribute; it has "
                f"{', '.join(sorted(seen.keys()))}"
            )
    call = CallForm(given_to(model, batch, no_pass), tuple(no_pass))
    parts = split_layers(layers)
    trace = probe(model, batch, no_pass)
    automatic = _automatic(trace, steps="steps" in parts)
    if parts in (["auto"], ["steps"]):
        if automatic.problem is not None:
            raise automatic.problem
        points = _in_order(automatic.points)
        return CapturePlan(points, tuple(automatic.notes), automatic.runs, call)

    def named_layers(calls: Sequence[ModuleCall]) -> Sequence[TimedPoint]:
        return _automatic(trace, named=calls).points

    chosen = select_points(trace, automatic.points, automatic.problem, parts, named_layers)
    return CapturePlan(_in_order(chosen), call=call)


def _in_order(points: Sequence[TimedPoint]) -> tuple[CapturePoint, ...]:
    """Return the points with the last state last, where readouts look for it."""
    ordered = list(points)
    states = [timed for timed in ordered if not timed.pooled]
    if states:
        ordered.remove(states[-1])
    return tuple(timed.point for timed in (*ordered, *states[-1:]))


# --- the automatic list


@dataclass(frozen=True)
class _Automatic:
    """The automatic list as far as it goes, and why it goes no further."""

    points: Sequence[TimedPoint] = ()
    notes: Sequence[str] = ()
    problem: CaptureError | None = None
    runs: Mapping[str, int] = field(default_factory=dict)


def _automatic(
    trace: Trace, *, named: Sequence[ModuleCall] = (), steps: bool = False
) -> _Automatic:
    try:
        layers = find_layers(trace, named=named, steps=steps)
        ends = find_ends(layers)
        points, notes = _points(layers, ends)
    except CaptureError as error:
        return _Automatic(problem=error)
    return _Automatic(points, notes, layers.problem, _runs(layers))


def _runs(layers: Layers) -> dict[str, int]:
    """Return how often each layer ran; 0 for a PyG layer that did not."""
    model, *_ = layers.trace.modules
    runs = {
        name: 0
        for name, module in model.module.named_modules()
        if isinstance(module, MessagePassing)
    }
    ran = [call for call in layers.trace.modules if call in layers.calls or call.name in runs]
    return runs | Counter(call.name for call in ran)


def _points(layers: Layers, ends: Sequence[BranchEnd]) -> tuple[list[TimedPoint], list[str]]:
    """Return the points of the automatic list in execution order, and notes for the user."""
    trace = layers.trace
    states = _states(layers, ends)
    consumed = choose_inputs(layers, [state.value for state in states])
    consumers: dict[int, list[ModuleCall]] = {}  # Layers that consume the same value are parallel.
    for layer in layers.layers:
        value = consumed.get(layer.number)
        if value is not None:
            consumers.setdefault(value, []).append(layer.call)
    points: dict[int, TimedPoint] = {}
    for value, calls in consumers.items():
        name, consumer = layers.names_of(value), ", ".join(call.label for call in calls)
        if value in calls[0].inputs and calls[0] in trace.modules:
            points[value] = module_point(trace, calls[0], "input", value, name, consumer)
        else:
            points[value] = anchor_value(trace, value, calls[0].start, name, consumer)
    held = {*points, *(state.value for state in states)}
    pooled = [
        end.pooled
        for end in ends
        if end.pooled is not None
        and not (end.parts and all(layers.is_held(part, held) for part in end.parts))
    ]
    for each in pooled:
        _refuse_other_tensors(layers, states, each, consumers)
    refuse_hidden_steps(layers, [each.value for each in (*states, *pooled)])
    for taken in (*states, *pooled):
        if taken.value not in points:
            name = POOLED if taken in pooled else layers.names_of(taken.value)
            point = anchor_value(trace, taken.value, taken.cut, name, taken.consumer)
            points[taken.value] = replace(point, pooled=taken in pooled)
    # By when they were made; the data's own tensors come up when they are consumed.
    ordered = sorted(points.items(), key=lambda item: trace.producer.get(item[0], item[1]).time)
    named = _named([point for _, point in ordered])
    return named, _notes(layers, states, pooled, consumed, consumers, points)


def _states(layers: Layers, ends: Sequence[BranchEnd]) -> list[Consumed]:
    """Return the last state of every branch: the first, where one layer is read twice."""
    first: dict[tuple[int, int], Consumed] = {}
    for state in sorted((state for end in ends for state in end.states), key=lambda s: s.value):
        mixed = len(layers.frontier(state.value)) > 1
        first.setdefault((layers.lines[state.value], state.value if mixed else -1), state)
    return list(first.values())


def _refuse_other_tensors(
    layers: Layers, states: Sequence[Consumed], pooled: Consumed, inputs: Collection[int]
) -> None:
    """Refuse a readout that consumes more of the last layers than the states, such as vectors."""
    trace = layers.trace
    widths = {trace.values[state.value].width for state in states}
    for layer, value in _beside([pooled.value], {*inputs, *(s.value for s in states)}, layers):
        rows = [each for each in layer.call.outputs if trace.has_node_rows(each)]
        if len(rows) > 1 and value in rows and trace.values[value].width not in widths:
            taken = ", ".join(
                f"{layer.call.label}:output:{place} {list(trace.values[output].shape)}"
                for place, output in enumerate(layer.call.outputs)
                if output in rows
            )
            raise CaptureError(
                f"the readout consumes several node tensors of {layer.call.label!r}: {taken}; "
                "name the ones to capture with --layers"
            )


def _beside(
    ends: Sequence[int], held: Collection[int], layers: Layers
) -> Iterator[tuple[Layer, int]]:
    """Yield what layers returned that leads to the ends on a way beside all that is held."""
    made = {value: layer for layer in layers.layers for value in made_by(layer.call)}
    open_values, seen = list(ends), set(held)
    while open_values:
        value = open_values.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in made:
            yield made[value], value
        else:
            open_values += layers.trace.values[value].parents


def _named(points: Sequence[TimedPoint]) -> list[TimedPoint]:
    """Tell equal names apart: the second ``conv`` that is consumed becomes ``conv~2``."""
    seen: Counter[str] = Counter()
    named = []
    for timed in points:
        seen[timed.point.name] += 1
        count = seen[timed.point.name]
        name = timed.point.name + (f"~{count}" if count > 1 else "")
        named.append(replace(timed, point=replace(timed.point, name=name)))
    return named


def _notes(
    layers: Layers,
    states: Sequence[Consumed],
    pooled: Sequence[Consumed],
    consumed: dict[int, int | None],
    consumers: dict[int, list[ModuleCall]],
    held: Collection[int],
) -> list[str]:
    """Return what a user should know about the automatic list."""
    notes = []
    outputs = [value for value in layers.trace.outputs if layers.trace.values[value].floating]
    beside = {layer.call.label: value for layer, value in _beside(outputs, held, layers)}
    for layer in layers.layers:
        label = layer.call.label
        if label in beside:
            shape = list(layers.trace.values[beside[label]].shape)
            notes.append(
                f"{label!r} leads to the output beside the history, too: {shape} is not in it"
            )
        elif layer.number not in consumed:
            notes.append(f"{label!r} ran, but no readout consumes it: not in the history")
        elif consumed[layer.number] is None:
            notes.append(
                f"the input of {label!r} is left out: integers, or zeros before the first step"
            )
        if steps := repeats(layers.trace, layer.call):
            notes.append(
                f"{label!r} passes messages {len(steps)} times in one call: "
                "--layers steps takes each of them"
            )
    notes += [
        f"{call.label!r} passes messages to something else than the nodes: not in the history"
        for call in layers.readouts
    ]
    for calls in consumers.values():
        if len(calls) > 1:
            labels = ", ".join(repr(call.label) for call in calls)
            notes.append(f"{labels} run side by side, on the same input")
    names = ", ".join(repr(layers.names_of(state.value)) for state in states)
    if len(states) > 1:
        notes.append(f"the readout consumes {len(states)} branches, which end in {names}")
    ends = [each.cut for each in (*states, *pooled) if each.consumer == PADDING]
    notes += [
        f"{call.label!r} works on the padded rows with weights of its own: not in the history"
        for call in layers.trace.modules[1:]
        if any(call.start > end for end in ends)
        and call.parent is layers.trace.modules[0]
        and any(True for _ in call.module.parameters())
        and any(layers.made[v] and len(layers.trace.values[v].shape) > 2 for v in call.inputs)
    ]
    if pooled:
        notes.append(
            f"{POOLED!r} is what the readout consumes, kept beside the last state, {names}"
        )
    return notes
