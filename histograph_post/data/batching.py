"""Batches: the graphs and label rows of each, and how graphs are joined into one.

:func:`row_batches` is for training, :func:`budget_batches` for running a model over all graphs,
:func:`probe_graphs` for trying it on a few; :func:`make_batch` joins the graphs.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.utils import cumsum, index_to_mask, subgraph

from ..utils.machine import NODE_BUDGET
from .row_blocks import StreamedGraphs

if TYPE_CHECKING:
    from .dataset import GraphDataset


@dataclass(frozen=True)
class RowBatch:
    """The graphs of a batch and the label rows it predicts."""

    #: Graphs, in the order of the batch: ``[num_graphs]``.
    graphs: np.ndarray
    #: Label rows, in the order of the predictions: ``[rows]``.
    rows: np.ndarray
    #: Position of each row's graph in the batch: ``[rows]``.
    owners: np.ndarray
    #: Number of each row within its graph: ``[rows]``.
    within: np.ndarray


def row_batches(
    rows: np.ndarray, label_ptr: np.ndarray, *, batch_size: int, seed: int | None
) -> Iterator[RowBatch]:
    """Cut label rows into batches of at most ``batch_size`` graphs.

    Args:
        rows: Label rows to cover, each once.
        label_ptr: First label row of each graph and the number of rows: ``[num_graphs + 1]``.
        seed: Of the shuffle; None keeps the graphs in order.
    """
    owner = np.searchsorted(label_ptr, rows, side="right") - 1  # graph of each row: [rows]
    graphs = np.unique(owner)
    if seed is not None:
        graphs = np.random.default_rng(seed).permutation(graphs)
    position = np.empty(len(label_ptr), dtype=np.int64)  # of each graph in the shuffled order
    position[graphs] = np.arange(len(graphs))
    order = np.argsort(position[owner], kind="stable")  # rows, by the position of their graph
    rows, owner = rows[order], owner[order]
    positions, within = position[owner], rows - label_ptr[owner]  # [rows]
    for start in range(0, len(graphs), batch_size):
        stop = start + batch_size
        part = slice(*np.searchsorted(positions, [start, stop]))
        yield RowBatch(graphs[start:stop], rows[part], positions[part] - start, within[part])


def count_batches(rows: np.ndarray, label_ptr: np.ndarray, *, batch_size: int) -> int:
    """Return how many batches :func:`row_batches` yields."""
    owners = np.searchsorted(label_ptr, rows, side="right") - 1  # graph of each row: [rows]
    return -(-len(np.unique(owners)) // batch_size)


def budget_batches(num_nodes: Sequence[int] | np.ndarray, node_budget: int) -> Iterator[range]:
    """Cut graphs, in their order, into batches of at most ``node_budget`` nodes.

    A larger graph is a batch of its own, so with a budget of 1 every graph is.
    """
    first, nodes = 0, 0
    for graph, size in enumerate(num_nodes):
        if graph > first and nodes + size > node_budget:
            yield range(first, graph)
            first, nodes = graph, 0
        nodes += int(size)
    if len(num_nodes):
        yield range(first, len(num_nodes))


# --- many graphs as one

#: Attributes with this in their name hold node numbers; PyTorch Geometric's rule.
_NODE_NUMBERS = "index"

#: Attributes with these in their name have rules of their own in PyTorch Geometric.
_SPECIAL_NAMES = ("batch", "ptr", "face", "adj", "num_nodes")

_INTEGERS = {torch.int32, torch.int64}


def make_batch(graphs: Sequence[Data]) -> Batch:
    """Return what ``Batch.from_data_list`` returns, in a fraction of the time.

    It handles one graph after the other, which takes as long as running a small model on them.
    If every graph is a plain ``Data`` of plain tensors on the CPU, each attribute takes a single
    concatenation; anything else is left to PyTorch Geometric.
    """
    columns = _columns(graphs)
    return Batch.from_data_list(list(graphs)) if columns is None else _joined(columns)


def batch_of(graphs: Sequence[Data], members: range) -> Batch:
    """Return neighbouring graphs as a batch; of those that stay on disk, none is made."""
    if isinstance(graphs, StreamedGraphs):
        columns = graphs.columns(members)
        if _can_join(columns):
            return _joined(columns)
    return make_batch(graphs[members.start : members.stop])


def _joined(columns: dict[str, list[Tensor]]) -> Batch:
    num_nodes = _sizes(columns["x"], 0)  # [graphs]
    node_ptr = cumsum(num_nodes)  # [graphs + 1]
    batch: Any = Batch(_base_cls=Data)
    slices, shifts = {}, {}
    for name, values in columns.items():
        counts_nodes = _NODE_NUMBERS in name
        dim = -1 if counts_nodes else 0
        sizes = _sizes(values, dim)  # [graphs]
        joined = torch.cat(values, dim)
        slices[name] = cumsum(sizes)
        shifts[name] = node_ptr[:-1] if counts_nodes else torch.zeros_like(sizes)
        if counts_nodes:
            # By NumPy, in this thread: PyTorch's are slow to synchronize while another thread is
            # busy, such as the one that writes the previous batch.
            joined.numpy()[:] += _repeat(shifts[name].to(joined.dtype), sizes).numpy()
        batch[name] = joined
    batch.batch = _repeat(torch.arange(len(num_nodes)), num_nodes)  # [num_nodes]
    batch.ptr = node_ptr
    batch._num_graphs = len(num_nodes)
    batch._slice_dict = slices
    batch._inc_dict = shifts
    return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device as a whole.

    Memory is pinned for CUDA, which then copies while the host continues; MPS has no double
    precision.
    """
    if device.type == "cpu":
        return batch
    batch = copy.copy(batch)
    if device.type == "mps":
        batch = batch.apply(lambda each: each.float() if each.dtype == torch.float64 else each)
    elif device.type == "cuda":
        batch = batch.apply(lambda each: each if each.is_cuda else each.pin_memory())
    return batch.to(device, non_blocking=True)


def _columns(graphs: Sequence[Data]) -> dict[str, list[Tensor]] | None:
    """Return the values of every attribute; None unless all of them are plain tensors."""
    if not all(type(graph) is Data for graph in graphs):
        return None
    stores = [graph.stores[0] for graph in graphs]
    names = list(stores[0].keys())
    columns = {name: [store.get(name) for store in stores] for name in names}
    return columns if _can_join(columns) else None


def _can_join(columns: dict[str, list[Any]]) -> bool:
    """Whether each of these attributes takes a single concatenation."""
    if "x" not in columns or any(name in each for each in columns for name in _SPECIAL_NAMES):
        return False
    return all(_are_plain(values, _NODE_NUMBERS in name) for name, values in columns.items())


def _are_plain(values: list[Any], are_numbers: bool) -> bool:
    """Whether these are tensors that can be concatenated as they are."""
    return (
        {type(value) for value in values} == {Tensor}
        and {value.device.type for value in values} == {"cpu"}
        and {value.layout for value in values} == {torch.strided}
        and all(value.ndim for value in values)
        and (not are_numbers or {value.dtype for value in values} <= _INTEGERS)
    )


def _repeat(values: Tensor, times: Tensor) -> Tensor:
    """Repeat each value; ``np.repeat`` with tensors."""
    return torch.from_numpy(np.repeat(values.numpy(), times.numpy()))


def _sizes(values: Sequence[Tensor], dim: int) -> Tensor:
    return torch.tensor([value.size(dim) for value in values])


# --- sparse matrices of graphs, which are stored as the positions and values of their entries

#: The suffix of the tensors that a sparse matrix is stored as, by its layout.
SPARSE_LAYOUTS = {torch.sparse_csr: "csr", torch.sparse_csc: "csc", torch.sparse_coo: "coo"}

_STORED_SPARSE = re.compile(r"(.+)_(csr|csc|coo)_index")


def sparse_names(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the sparse matrices stored in these attributes: name -> layout, prefix."""
    found = (_STORED_SPARSE.fullmatch(name) for name in names)
    return {match[1]: (match[2], f"{match[1]}_{match[2]}") for match in found if match is not None}


def with_sparse(batch: Batch) -> Batch:
    """Return the batch as models get it: with block-diagonal sparse matrices, if it has any."""
    stored = sparse_names(batch.keys())
    if not stored:
        return batch
    batch, size = copy.copy(batch), int(batch.num_nodes)
    for name, (layout, prefix) in stored.items():
        index, values = batch[f"{prefix}_index"], batch[f"{prefix}_value"]  # [2, pairs], [pairs]
        del batch[f"{prefix}_index"], batch[f"{prefix}_value"]
        with warnings.catch_warnings():  # that they are in beta, and their invariants unchecked
            warnings.filterwarnings("ignore", message="Sparse")
            matrix = torch.sparse_coo_tensor(index, values, (size, size)).coalesce()
            if layout != "coo":
                matrix = matrix.to_sparse_csr() if layout == "csr" else matrix.to_sparse_csc()
        batch[name] = matrix  # [num_nodes, num_nodes]
    return batch


# --- a few graphs of a data set, on which a model is tried out

#: How many: enough to distinguish graph rows from node rows, few enough to be quick.
_PROBE_GRAPHS = 4

#: Graphs with more nodes are large: a model is tried on a subgraph.
LARGE_GRAPH = NODE_BUDGET

#: Nodes of such a subgraph.
PROBE_NODES = 2048


def probe_numbers(dataset: GraphDataset) -> list[int]:
    """Return which graphs to try a model on."""
    # Spread over the data: neighbours in a sorted data set look alike.
    spread = np.linspace(0, len(dataset) - 1, _PROBE_GRAPHS).astype(int)
    return np.unique(spread).tolist()


def probe_graphs(dataset: GraphDataset, *, whole: bool = True) -> list[Data]:
    """Return the graphs to try a model on, copied.

    Args:
        whole: Whether large graphs are kept whole, instead of a subgraph of them.
    """
    graphs = [dataset.graphs[number] for number in probe_numbers(dataset)]
    return [
        surroundings(graph, PROBE_NODES)
        if not whole and int(graph.num_nodes) > LARGE_GRAPH
        else graph.clone()
        for graph in graphs
    ]


#: Hops at most: a long chain would take thousands.
_HOPS = 8


def surroundings(graph: Data, most: int) -> Data:
    """Return the subgraph of at most so many nodes around the first node with an edge.

    Nodes are added by their distance, whichever way edges point; if these are too few, the first
    of the other nodes follow. All keep their order.
    """
    edges, size = graph.edge_index, int(graph.num_nodes)
    nodes = edges[0, :1] if edges.numel() else edges.new_zeros(1)  # [nodes so far]
    for _ in range(_HOPS):
        inside = index_to_mask(nodes, size)  # [num_nodes]
        reached = torch.cat([edges[1][inside[edges[0]]], edges[0][inside[edges[1]]]]).unique()
        reached = reached[~inside[reached]]
        nodes = torch.cat([nodes, reached])[:most]
        if not len(reached) or len(nodes) == most:
            break
    others = (~index_to_mask(nodes, size)).nonzero().view(-1)
    return _node_subgraph(graph, torch.cat([nodes, others[: most - len(nodes)]]).sort().values)


def _node_subgraph(graph: Data, nodes: Tensor) -> Data:
    """Return the subgraph of some nodes ``[nodes]``, relabelled.

    Labelled pairs, and sparse matrices, which are stored as pairs and values, are cut as well.
    """
    sparse = sparse_names(graph.keys()).values()
    names = [(f"{prefix}_index", f"{prefix}_value") for _, prefix in sparse]
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
