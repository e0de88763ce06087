"""Batches: which graphs and label rows make up each of them, and many graphs as one.

:func:`row_batches` is for training, :func:`budget_batches` for running a model over all graphs;
:func:`make_batch` joins the graphs, and :class:`LinkNegatives` draws pairs for links that train.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from ..tasks import Task
from ..utils import Level
from .links import NonEdges


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
        batch_size: Graphs per batch.
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

    Args:
        num_nodes: Nodes of each graph: ``[num_graphs]``.
        node_budget: Nodes of a batch at most.
    """
    first, nodes = 0, 0
    for graph, size in enumerate(num_nodes):
        if graph > first and nodes + size > node_budget:
            yield range(first, graph)
            first, nodes = graph, 0
        nodes += int(size)
    if len(num_nodes):
        yield range(first, len(num_nodes))


class Negatives(NamedTuple):
    """Pairs that are no links, drawn for one batch."""

    #: Nodes numbered within their graph: ``[2, negatives]``.
    pairs: Tensor
    #: Place of each pair's graph in the batch: ``[negatives]``.
    owners: np.ndarray


class LinkNegatives:
    """Draws negatives for links that train without any, anew in every epoch.

    A batch gets as many pairs as it has links, from the same graphs, by the seed of the epoch.

    Args:
        task: What is predicted.
        targets: Of every label row, ``[rows]`` or ``[rows, targets]``.
        non_edges: The pairs of a graph that neither an edge joins nor a label names.
    """

    def __init__(self, task: Task, targets: Tensor, non_edges: Callable[[int], NonEdges]) -> None:
        self._links = task.level == "link" and task.kind == "binary"
        self._targets = targets
        self._non_edges = non_edges

    def generator(self, rows: np.ndarray, seed: int | None) -> np.random.Generator | None:
        """Return what to draw with; None where these rows need no negatives."""
        lacking = self._links and not bool((self._targets.numpy()[rows] == 0).any())
        # A stream of its own: the seed itself shuffles the graphs.
        return np.random.default_rng([seed, 1]) if lacking and seed is not None else None

    def draw(self, members: RowBatch, random: np.random.Generator) -> Negatives:
        """Draw as many pairs in each graph as it has links; a graph that is too dense has fewer."""
        targets = self._targets[members.rows]  # [rows, 1]
        links = members.owners[targets[:, 0].numpy() == 1]  # graph in the batch: [links]
        counts = np.bincount(links, minlength=len(members.graphs))  # [num_graphs]
        drawn = [
            self._non_edges(graph).draw(int(count), random)
            for graph, count in zip(members.graphs, counts, strict=True)
        ]
        sizes = [pairs.shape[1] for pairs in drawn]
        return Negatives(
            pairs=torch.from_numpy(np.concatenate(drawn, axis=1)),
            owners=np.repeat(np.arange(len(drawn)), sizes),
        )


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

    Args:
        graphs: At least one.
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
    is pinned for CUDA, which then copies while the host goes on; MPS has no double precision.
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
