"""Probe batches in which rows of nodes cannot be mistaken for rows of anything else."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch_geometric.data import Batch, Data

from ..errors import CaptureError
from .tensors import tensors_in


def probe_batches(model: nn.Module, batch: Batch) -> Iterator[Batch]:
    """Yield batches to probe the model with, the best first.

    Node rows are known by their number. Where that is also the number of graphs or edges, the
    width of a layer or a size of the data (steps in time), a graph is added once more, or a node
    or an edge is left out. A batch with as many edges as nodes is never among them: edge states
    would be taken for node states.

    Raises:
        CaptureError: if no graph has two nodes.
    """
    if batch.num_nodes is None:
        raise CaptureError(
            "the graphs do not say how many nodes they have: found "
            f"{', '.join(sorted(map(str, batch.keys())))}; expected one set of nodes per graph, "
            "with features x, positions pos or num_nodes"
        )
    if int(batch.num_nodes) < 2:
        raise CaptureError(
            f"the probe batch has {batch.num_nodes} nodes; expected a graph with two or more"
        )
    weights, data = (*model.parameters(), *model.buffers()), tensors_in(batch)
    sizes = {size for tensor in weights for size in tensor.shape}
    dense = (tensor for tensor in data if tensor.layout == torch.strided)
    sizes |= {size for tensor in dense for size in tensor.shape[1:]}
    if _is_unambiguous(batch, sizes):
        yield batch
        return
    graphs = batch.to_data_list() if hasattr(batch, "ptr") else [batch]
    if len(graphs) > 1 and all(int(graph.num_nodes) < 2 for graph in graphs):
        raise CaptureError(
            f"the probe batch has {batch.num_nodes} nodes in {batch.num_graphs} graphs, so node "
            "rows cannot be told from graph rows; expected a graph with two or more nodes"
        )
    changed = list(_changed(graphs))
    yield from (other for other in changed if _is_unambiguous(other, sizes))
    # A number that a weight happens to have is less of a danger than a batch that does not run.
    yield from (other for other in (batch, *changed) if not _edges_like_nodes(other))


def _changed(graphs: list[Data]) -> Iterator[Batch]:
    """Yield the graphs with one of them once more, or a node less, and with an edge less."""
    # What is made for a batch is made on the CPU, unless the graphs are on CUDA.
    device = tensors_in(graphs[0])[0].device
    if len(graphs) > 1:
        for extra in graphs:
            if int(extra.num_nodes) > 1:
                yield Batch.from_data_list([*graphs, extra]).to(device)
    elif (nodes := int(graphs[0].num_nodes)) > 2:
        kept = torch.arange(nodes - 1, device=device)
        yield Batch.from_data_list([graphs[0].subgraph(kept)]).to(device)
    for at, graph in enumerate(graphs):
        if (shorter := _without_an_edge(graph)) is not None:
            others = [*graphs[:at], shorter, *graphs[at + 1 :]]
            yield Batch.from_data_list(others).to(device)


def _without_an_edge(graph: Data) -> Data | None:
    """Return the graph without its last edge, in both directions."""
    edges = graph.get("edge_index")
    if not isinstance(edges, torch.Tensor) or edges.dim() != 2 or edges.shape[1] < 3:
        return None
    source, target = edges[0, -1], edges[1, -1]
    same = (edges[0] == source) & (edges[1] == target)
    back = (edges[0] == target) & (edges[1] == source)
    return graph.edge_subgraph(~(same | back))


def _is_unambiguous(batch: Batch, sizes: set[int]) -> bool:
    graphs = {int(getattr(batch, "num_graphs", 1))}
    if (numbers := getattr(batch, "batch", None)) is not None and len(numbers):
        graphs.add(int(numbers.max()) + 1)  # the last may be empty
    return int(batch.num_nodes) not in {*sizes, *graphs} and not _edges_like_nodes(batch)


def _edges_like_nodes(batch: Batch) -> bool:
    """Whether there are as many edges as nodes, counted in one direction or in both."""
    nodes, edges = int(batch.num_nodes), int(batch.num_edges)
    return nodes in (edges, edges / 2)
