"""Decide which tensors of a model to capture, from one probe pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch_geometric.data import Batch

from ..errors import CaptureError
from .anchors import TimedPoint
from .automatic import automatic_points
from .freeze import eager_module, frozen
from .layers import find_layers
from .points import CapturePlan
from .probe import run_trace
from .selection import select_points, split_layers, uses_automatic_list
from .trace import Trace


def plan_capture(
    model: nn.Module, batch: Batch, *, layers: str | Sequence[str] = "auto"
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

    Raises:
        CaptureError: if the layers cannot be found, or what is named is not there.
    """
    model = eager_module(model)
    probe = _unambiguous(model, batch)
    # Not inference mode: its tensors do not tell when they are changed in place.
    with frozen(model), torch.inference_mode(False), torch.no_grad():
        trace = run_trace(model, probe.clone())  # models may write into what they are given
    parts = split_layers(layers)
    automatic, notes, problem = _automatic(trace)
    if parts == ["auto"]:
        if problem is not None:
            raise problem
        chosen = automatic
    else:
        if not automatic and problem is not None and uses_automatic_list(parts):
            raise problem
        chosen, notes = select_points(trace, automatic, parts), []
    return CapturePlan(tuple(timed.point for timed in chosen), tuple(notes))


def _automatic(trace: Trace) -> tuple[list[TimedPoint], list[str], CaptureError | None]:
    """Return the automatic list as far as it goes, and why it goes no further."""
    try:
        layers = find_layers(trace)
        points, notes = automatic_points(layers)
    except CaptureError as error:
        return [], [], error
    return points, notes, layers.problem


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
