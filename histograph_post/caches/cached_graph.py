"""Graphs as a cache hands them out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .layout import Layout
from .shard import Shard

#: A history: ``[num_nodes, num_layers, dim]``, or ``[num_nodes, D_l]`` each where widths differ.
History = Tensor | list[Tensor]


@dataclass(frozen=True)
class CachedGraph:
    """One graph of a cache; ``history``, ``labels`` and ``outputs`` are views of the file.

    The history of a compressed cache is a copy, which has been expanded.
    """

    id: str
    history: History
    edge_index: Tensor | None
    labels: Tensor
    outputs: Tensor | None
    edge_label_index: Tensor | None


@dataclass(frozen=True)
class CachedBatch:
    """Several graphs, their rows one after the other; ``ptr`` says where each begins."""

    history: History
    ptr: Tensor
    edge_index: Tensor | None


def read_graph(shard: Shard, graph: int, layout: Layout) -> CachedGraph:
    """Return graph number ``graph`` of a shard."""
    arrays = shard.arrays
    nodes = slice(*arrays["ptr"][graph : graph + 2].tolist())
    rows = {"graph": slice(graph, graph + 1), "node": nodes}
    if "label_ptr" in arrays:
        rows["link"] = slice(*arrays["label_ptr"][graph : graph + 2].tolist())
    layers = [
        as_tensor(values.read(nodes.start, nodes.stop), layout) for values in shard.activations
    ]
    edge_index = edge_label_index = outputs = None
    if layout.has_edges:
        edges = slice(*arrays["edge_ptr"][graph : graph + 2].tolist())
        edge_index = torch.from_numpy(arrays["edge_index"][:, edges].astype(np.int64))
    if layout.level == "link":
        pairs = arrays["edge_label_index"][:, rows["link"]]
        edge_label_index = torch.from_numpy(pairs.astype(np.int64))
    if layout.output_level is not None:
        outputs = torch.from_numpy(arrays["outputs"][rows[layout.output_level]])
    return CachedGraph(
        id=shard.ids[graph],
        history=layers[0] if layout.is_uniform else layers,
        edge_index=edge_index,
        labels=torch.from_numpy(arrays["labels"][rows[layout.level]]),
        outputs=outputs,
        edge_label_index=edge_label_index,
    )


def as_tensor(values: np.ndarray, layout: Layout) -> Tensor:
    """Return the same memory as a tensor."""
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if layout.dtype == "bfloat16" else tensor
