"""A part of a large graph: small enough to try a model on, and still a graph of the same kind."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import subgraph

from .batching import sparse_names

#: Steps along edges, at most: a long chain would take thousands.
_HOPS = 8


def surroundings(graph: Data, most: int) -> Data:
    """Return the part of a graph that is around its first node with an edge.

    Nodes come in by their distance, in whichever direction edges point; where edges lead no
    further, the first of the other nodes follow. They keep their order.

    Args:
        graph: Any graph with ``edge_index``.
        most: Nodes of the part.
    """
    edges, size = graph.edge_index, int(graph.num_nodes)
    nodes = edges[0, :1] if edges.numel() else edges.new_zeros(1)  # [found so far]
    for _ in range(_HOPS):
        inside = _marked(nodes, size)  # [num_nodes]
        reached = torch.cat([edges[1][inside[edges[0]]], edges[0][inside[edges[1]]]]).unique()
        reached = reached[~inside[reached]]
        nodes = torch.cat([nodes, reached])[:most]
        if not len(reached) or len(nodes) == most:
            break
    others = (~_marked(nodes, size)).nonzero().view(-1)
    return node_subgraph(graph, torch.cat([nodes, others[: most - len(nodes)]]).sort().values)


def node_subgraph(graph: Data, nodes: Tensor) -> Data:
    """Return some nodes ``[nodes]`` of a graph and the edges between them, numbered anew.

    Labelled pairs, and sparse matrices, which are stored as pairs and values, are cut as well.
    """
    names = [(f"{prefix}_index", f"{prefix}_value") for _, prefix in _sparse(graph)]
    names += [("edge_label_index", "edge_label")] if "edge_label_index" in graph else []
    rest, parts, size = copy.copy(graph), {}, int(graph.num_nodes)
    for places, values in names:
        pairs = rest.pop(places), rest.pop(values, None)
        parts[places, values] = subgraph(nodes, *pairs, relabel_nodes=True, num_nodes=size)
    part = rest.subgraph(nodes)
    for found in parts.items():
        for name, tensor in zip(*found, strict=True):
            if tensor is not None:
                part[name] = tensor
    return part


def _sparse(graph: Data) -> Iterable[tuple[str, str]]:
    return sparse_names(graph.keys()).values()


def _marked(nodes: Tensor, size: int) -> Tensor:
    marks = torch.zeros(size, dtype=torch.bool, device=nodes.device)
    marks[nodes] = True
    return marks  # [num_nodes]
