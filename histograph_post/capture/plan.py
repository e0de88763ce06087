"""Decide which tensors of a model to capture, from one probe pass.

Layers are found by themselves (what each message-passing layer consumes, then the readout), or are
asked for by position, name or glob.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn
from torch_geometric.data import Batch

from ..errors import CaptureError
from ..models.model_call import given_to, visible
from ..models.spec import CallForm
from .layers import Layer, Layers, find_layers
from .points import CapturePlan, TimedPoint, anchor_value, module_point
from .readout import find_last_activation
from .tensors import eager_module, frozen
from .trace import ModuleCall, Trace, run_trace

_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?(?::(-?\d+)?)?")
_POSITION = re.compile(r"-?\d+")


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
            buffers, hooks and modes are the same afterwards.
        batch: a few graphs; more than one, if there are more.
        layers: ``auto``, or what to take instead, as a list or separated by commas: positions in
            the automatic list (``0``, ``-1``, ``1:``), names or globs of its layers, or of any
            other module, whose output is then taken on each call; ``name:input`` and
            ``name:output`` take just that.
        no_pass: attributes of the data that the model is not given.

    Raises:
        CaptureError: if the layers cannot be found, or what is named is not there.
    """
    model = eager_module(model)
    seen = visible(batch, ())
    for name in no_pass:
        if name not in seen:
            raise CaptureError(
                f"--no-pass {name}: the data has no such attribute; it has "
                f"{', '.join(sorted(seen.keys()))}"
            )
    probe = _unambiguous(model, batch)
    # Not inference mode: its tensors do not count in-place changes.
    with frozen(model), torch.inference_mode(False), torch.no_grad():
        # Models may write into what they are given.
        trace = run_trace(model, visible(probe.clone(), no_pass))
    parts = _split_layers(layers)
    automatic, notes, problem = _automatic(trace)
    if parts == ["auto"]:
        if problem is not None:
            raise problem
        chosen = automatic
    else:
        if not automatic and problem is not None and _uses_automatic_list(parts):
            raise problem
        chosen, notes = _select_points(trace, automatic, parts), []
    call = CallForm(given_to(model, batch, no_pass), tuple(no_pass))
    return CapturePlan(tuple(timed.point for timed in chosen), tuple(notes), call)


def _unambiguous(model: nn.Module, batch: Batch) -> Batch:
    """Return a batch whose number of nodes is nothing else's size in the pass.

    Node rows are known by their number. If that is also the number of graphs or edges, or the
    width of a layer, one of the graphs is added once more.
    """
    if int(batch.num_nodes) < 2:
        raise CaptureError(
            f"the probe batch has {batch.num_nodes} nodes; expected a graph with two or more"
        )
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    if int(getattr(batch, "num_graphs", 1)) < 2 or _is_unambiguous(batch, sizes):
        return batch
    graphs = batch.to_data_list()
    for extra in graphs:
        if int(extra.num_nodes) < 2:
            continue
        longer = Batch.from_data_list([*graphs, extra])
        if _is_unambiguous(longer, sizes):
            return longer
    if all(int(graph.num_nodes) < 2 for graph in graphs):
        raise CaptureError(
            f"the probe batch has {batch.num_nodes} nodes in {batch.num_graphs} graphs, so node "
            "rows cannot be told from graph rows; expected a graph with two or more nodes"
        )
    return batch


def _is_unambiguous(batch: Batch, sizes: set[int]) -> bool:
    graph_rows = {int(batch.num_graphs), int(batch.batch.max()) + 1}  # the last may be empty
    return int(batch.num_nodes) not in {*sizes, *graph_rows, int(batch.num_edges)}


# --- the automatic list


def _automatic(trace: Trace) -> tuple[list[TimedPoint], list[str], CaptureError | None]:
    """Return the automatic list as far as it goes, and why it goes no further."""
    try:
        layers = find_layers(trace)
        points, notes = _automatic_points(layers)
    except CaptureError as error:
        return [], [], error
    return points, notes, layers.problem


def _automatic_points(layers: Layers) -> tuple[list[TimedPoint], list[str]]:
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


# --- the layers a user asks for


def _split_layers(layers: str | Sequence[str | int]) -> list[str]:
    """Return the parts of a ``layers`` option."""
    parts = layers.split(",") if isinstance(layers, str) else [str(part) for part in layers]
    parts = [part.strip() for part in parts]
    if not parts or not all(parts):
        raise CaptureError(f"--layers {layers!r}: empty; expected names, globs or positions")
    return parts


def _uses_automatic_list(parts: Sequence[str]) -> bool:
    """Whether some part cannot be understood without the automatic list."""
    return any(_SLICE.fullmatch(part) or _POSITION.fullmatch(part) for part in parts)


def _select_points(
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
