"""Batches: which graphs and label rows make up each of them, and many graphs as one.

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
from torch_geometric.utils import subgraph

from ..utils import Level
from ..utils.machine import NODE_BUDGET

if TYPE_CHECKING:
    from .dataset import GraphDataset


@dataclass(frozen=True)
class RowBatch:
    """The graphs of a batch and the label rows it predicts."""

    #: Graphs, in the order of the batch: ``[num_graphs]``.
    graphs: np.ndarray
    #: Label rows, in the order of the predictions: ``[rows]``.
    rows: np.ndarray
    #: For node and link rows: the place of the row's graph in the batch, ``[rows]``.
    owners: np.ndarray
    #: For node and link rows: the row's number within its graph, ``[rows]``.
    within: np.ndarray


def row_batches(
    rows: np.ndarray, level: Level, label_ptr: np.ndarray, *, batch_size: int, seed: int | None
) -> Iterator[RowBatch]:
    """Cut label rows into batches of at most ``batch_size`` graphs.

    Args:
        rows: Label rows to cover, each once.
        level: What a row is; a graph is its own row.
        label_ptr: First label row of each graph and the number of rows: ``[num_graphs + 1]``.
        seed: Of the shuffle; None keeps the graphs in order.
    """
    owner = np.searchsorted(label_ptr, rows, side="right") - 1  # graph of each row: [rows]
    graphs = np.unique(owner)
    if seed is not None:
        graphs = np.random.default_rng(seed).permutation(graphs)
    if level == "graph":
        nothing = np.empty(0, dtype=np.int64)
        for start in range(0, len(graphs), batch_size):
            members = graphs[start : start + batch_size]
            yield RowBatch(members, members, nothing, nothing)
        return
    place = np.empty(len(label_ptr), dtype=np.int64)  # of each graph in the shuffled order
    place[graphs] = np.arange(len(graphs))
    order = np.argsort(place[owner], kind="stable")  # rows, by the place of their graph
    rows, owner = rows[order], owner[order]
    for start in range(0, len(graphs), batch_size):
        inside = (place[owner] >= start) & (place[owner] < start + batch_size)  # [rows]
        members = graphs[start : start + batch_size]
        yield RowBatch(
            members,
            rows[inside],
            place[owner[inside]] - start,
            rows[inside] - label_ptr[owner[inside]],
        )


def count_batches(rows: np.ndarray, label_ptr: np.ndarray, *, batch_size: int) -> int:
    """Return how many batches :func:`row_batches` yields."""
    owners = np.searchsorted(label_ptr, rows, side="right") - 1  # graph of each row: [rows]
    return -(-len(np.unique(owners)) // batch_size)


def budget_batches(num_nodes: Sequence[int] | np.ndarray, node_budget: int) -> Iterator[range]:
    """Cut graphs into batches of neighbours with at most ``node_budget`` nodes together.

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

#: What an attribute may be called whose values are node numbers; PyTorch Geometric's rule.
_NODE_NUMBERS = "index"

#: Parts of names for which PyTorch Geometric has other rules than for any attribute.
_SPECIAL_NAMES = ("batch", "ptr", "face", "adj", "num_nodes")

_INTEGERS = {torch.int32, torch.int64}


def make_batch(graphs: Sequence[Data]) -> Batch:
    """Return what ``Batch.from_data_list`` returns, in a fraction of the time.

    It handles one graph after the other, which takes as long as running a small model on them.
    Where every graph is a plain ``Data`` of plain tensors on the CPU, one operation makes an
    attribute of the batch; all others are left to PyTorch Geometric.
    """
    columns = _columns(graphs)
    if columns is None:
        return Batch.from_data_list(list(graphs))
    num_nodes = _sizes(columns["x"], 0)  # [graphs]
    node_ptr = _bounds(num_nodes)  # [graphs + 1]
    batch: Any = Batch(_base_cls=Data)
    slices, shifts = {}, {}
    for name, values in columns.items():
        counts_nodes = _NODE_NUMBERS in name
        dim = -1 if counts_nodes else 0
        sizes = _sizes(values, dim)  # [graphs]
        joined = torch.cat(values, dim)
        slices[name] = _bounds(sizes)
        shifts[name] = node_ptr[:-1] if counts_nodes else torch.zeros_like(sizes)
        if counts_nodes:
            # In this thread, like all of this: PyTorch's own are slow to come together while
            # another thread is busy, such as the one that writes the batch before.
            joined.numpy()[:] += _repeat(shifts[name].to(joined.dtype), sizes).numpy()
        batch[name] = joined
    batch.batch = _repeat(torch.arange(len(graphs)), num_nodes)  # [num_nodes]
    batch.ptr = node_ptr
    batch._num_graphs = len(graphs)
    batch._slice_dict = slices
    batch._inc_dict = shifts
    return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device: made on the CPU, then moved as a whole.

    PyTorch Geometric makes what is new in a batch on the CPU, unless the graphs are on CUDA. Memory
    is pinned for CUDA, which then copies while the host continues; MPS has no double precision.
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
    """Return the values of every attribute; None where not all of them are plain tensors."""
    if not all(type(graph) is Data for graph in graphs):
        return None
    stores = [graph.stores[0] for graph in graphs]
    names = list(stores[0].keys())
    if "x" not in names or any(special in name for name in names for special in _SPECIAL_NAMES):
        return None
    columns = {name: [store.get(name) for store in stores] for name in names}
    plain = all(_are_plain(values, _NODE_NUMBERS in name) for name, values in columns.items())
    return columns if plain else None


def _are_plain(values: list[Any], are_numbers: bool) -> bool:
    """Return whether these are tensors that can be concatenated as they are."""
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


def _bounds(sizes: Tensor) -> Tensor:
    """Return where parts of these sizes begin, and their sum: ``[parts + 1]``."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


# --- sparse matrices of graphs, which are stored as the places and values of what is not zero

#: What the layout of a sparse matrix is called in the names of the tensors it is stored as.
SPARSE_LAYOUTS = {torch.sparse_csr: "csr", torch.sparse_csc: "csc", torch.sparse_coo: "coo"}

_STORED_SPARSE = re.compile(r"(.+)_(csr|csc|coo)_index")


def sparse_names(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the sparse matrices that are stored among these attributes: name -> layout, prefix."""
    found = (_STORED_SPARSE.fullmatch(name) for name in names)
    return {match[1]: (match[2], f"{match[1]}_{match[2]}") for match in found if match is not None}


def with_sparse(batch: Batch) -> Batch:
    """Return the batch with its sparse matrices put together, block by block: as a model is given.

    A batch without any is returned as it is.
    """
    stored = sparse_names(batch.keys())
    if not stored:
        return batch
    batch, size = copy.copy(batch), int(batch.num_nodes)
    for name, (layout, prefix) in stored.items():
        index, values = batch[f"{prefix}_index"], batch[f"{prefix}_value"]  # [2, pairs], [pairs]
        del batch[f"{prefix}_index"], batch[f"{prefix}_value"]
        with warnings.catch_warnings():  # that it is new, and that it could be checked
            warnings.filterwarnings("ignore", message="Sparse")
            matrix = torch.sparse_coo_tensor(index, values, (size, size)).coalesce()
            if layout != "coo":
                matrix = matrix.to_sparse_csr() if layout == "csr" else matrix.to_sparse_csc()
        batch[name] = matrix  # [num_nodes, num_nodes]
    return batch


# --- a few graphs of a data set, on which a model is tried out

#: How many: enough to distinguish graph rows from node rows, few enough to be quick.
PROBE_GRAPHS = 4


def probe_numbers(dataset: GraphDataset) -> list[int]:
    """Return which graphs to try a model on."""
    # Spread over the data: neighbours in a sorted data set look alike.
    spread = np.linspace(0, len(dataset) - 1, PROBE_GRAPHS).astype(int)
    return np.unique(spread).tolist()


#: Graphs with more nodes are large: what is learned of a model on one is learned on a part of it.
LARGE_GRAPH = NODE_BUDGET

#: Nodes of such a part.
PROBE_NODES = 2048


def probe_graphs(dataset: GraphDataset, *, whole: bool = True) -> list[Data]:
    """Return the graphs to try a model on, copied.

    Args:
        whole: Whether large graphs are to be as large as they are, and not a part of them.
    """
    graphs = [dataset.graphs[number] for number in probe_numbers(dataset)]
    return [
        surroundings(graph, PROBE_NODES)
        if not whole and int(graph.num_nodes) > LARGE_GRAPH
        else graph.clone()
        for graph in graphs
    ]


#: Steps along edges, at most: a long chain would take thousands.
_HOPS = 8


def surroundings(graph: Data, most: int) -> Data:
    """Return the part of a graph that is around its first node with an edge.

    Nodes come in by their distance, in whichever direction edges point; where edges lead no
    further, the first of the other nodes follow. They keep their order.
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


def _marked(nodes: Tensor, size: int) -> Tensor:
    marks = torch.zeros(size, dtype=torch.bool, device=nodes.device)
    marks[nodes] = True
    return marks  # [num_nodes]
