"""Checks of every graph before anything else uses it.

Each error names the graph. Harmless differences (a float64 ``x``, a numpy array) are converted and
noted; anything that would change what a model computes is refused. Graphs without node features
(IMDB, REDDIT, COLLAB) get some.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import degree

from ..errors import DataError
from ..utils.machine import machine_memory
from .batching import SPARSE_LAYOUTS, sparse_names

#: Numeric attributes a model may be called with, and what has a row in them.
MODEL_INPUTS = {"x": "node", "pos": "node", "edge_attr": "edge", "edge_weight": "edge"}

#: Attributes that all graphs have or none has; some labels may be missing.
_ALL_OR_NONE = (*MODEL_INPUTS, "edge_label_index")
_LABELS = ("y", "edge_label")
_TENSORS = (*MODEL_INPUTS, "edge_index", "edge_label_index")


def prepare_graphs(
    graphs: Sequence[Data], ids: Sequence[str], *, spec: str
) -> tuple[list[Data], list[str]]:
    """Return checked copies of the graphs with the same attributes, and notes on what changed."""
    notes: Counter[str] = Counter()
    prepared = [
        prepare_graph(graph, f"{spec}: graph {name}", notes)
        for graph, name in zip(graphs, ids, strict=True)
    ]
    _share_attributes(prepared, ids, spec, notes)
    _share_widths(prepared, ids, spec)
    return prepared, [f"{note} in {count} graphs" for note, count in notes.items()]


def check_links(graphs: Sequence[Data], ids: Sequence[str], *, spec: str) -> None:
    """Raise :class:`DataError` unless every graph names pairs of its own nodes."""
    for graph, name in zip(graphs, ids, strict=True):
        where = f"{spec}: graph {name}"
        if "edge_label_index" not in graph:
            raise DataError(f"{where}: no edge_label_index, expected one in link-level data")
        _check_node_pairs(graph.edge_label_index, "edge_label_index", graph.num_nodes, where)


def prepare_graph(given: Data, where: str, notes: Counter[str]) -> Data:
    """Return a checked copy of one graph, counting in ``notes`` what changed."""
    refuse_hetero(given, where)
    if not isinstance(given, Data):
        raise DataError(
            f"{where}: found {type(given).__name__}, expected torch_geometric.data.Data"
        )
    graph = copy.copy(given)  # shallow: attributes are replaced, never written to
    _unpack_sparse(graph, where, notes)
    for name, value in graph.to_dict().items():
        plain = _plain(value, name)
        if plain is not None:
            graph[name] = plain
        elif name in (*_TENSORS, *_LABELS) or (name == "num_nodes" and isinstance(value, int)):
            found = _odd_kind(value)
            raise DataError(f"{where}: {name} is {found}, expected a dense tensor of numbers")
        else:
            del graph[name]
            notes[f"attribute {name} ({type(value).__name__}) left out"] += 1
    for name, value in graph.to_dict().items():
        if isinstance(value, Tensor):
            _check_memory(value.numel() * value.itemsize, f"{where}: {name} is {_kind(value)}")
        if name in _LABELS:
            _check_labels(torch.as_tensor(value), name, where)
    _check_edges(graph, where)
    num_nodes = _num_nodes(graph, where, notes)
    _check_memory(num_nodes * torch.int64.itemsize, f"{where}: found {num_nodes} nodes")
    _check_node_pairs(graph.edge_index, "edge_index", num_nodes, where)
    for _, prefix in sparse_names(graph.keys()).values():
        _check_node_pairs(graph[f"{prefix}_index"], prefix, num_nodes, where)
    rows = {"node": num_nodes, "edge": graph.edge_index.size(1)}
    for name, unit in MODEL_INPUTS.items():
        if name in graph:
            graph[name] = _model_input(graph[name], name, where, notes)
            _check_values(graph[name], name, rows[unit], unit, where)
    return graph


def refuse_hetero(given: object, where: str) -> None:
    """Refuse heterogeneous graphs: a layer has no single tensor for all types of nodes."""
    if isinstance(given, HeteroData):
        types = ", ".join(map(str, given.node_types))
        shown = f" (node types {types})" if types else ""
        raise DataError(
            f"{where}: found HeteroData{shown}, expected graphs with one type of nodes and edges; "
            "data.to_homogeneous() makes one, if the model can take it"
        )


def _from_torch_sparse(matrix: Any, where: str) -> Tensor:
    """Return a matrix of torch_sparse as a sparse tensor of torch, with ones for no values."""
    try:
        row, column, values = matrix.coo()
        size = [int(length) for length in matrix.sizes()][:2]
        values = torch.ones(len(row)) if values is None else values  # [number of pairs]
        index = torch.stack([row, column])  # [2, number of pairs]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse")
            pairs = torch.sparse_coo_tensor(index, values, size, check_invariants=True)
            return pairs.coalesce().to_sparse_csr()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"{where} is a SparseTensor that cannot be read ({error}); expected one of "
            "torch_sparse, or adj_t.to_torch_sparse_csr_tensor()"
        ) from None


def _unpack_sparse(graph: Data, where: str, notes: Counter[str]) -> None:
    """Store sparse matrices as plain tensors, which can be batched, sliced and hashed.

    :func:`~histograph_post.data.batching.with_sparse` rebuilds them for the model. Without an
    ``edge_index``, a sparse matrix such as ``adj_t`` provides the edges.
    """
    for name, value in graph.to_dict().items():
        if type(value).__name__ == "SparseTensor":  # of torch_sparse, which may not be installed
            value = _from_torch_sparse(value, f"{where}: {name}")
            notes[f"{name}, a SparseTensor of torch_sparse, read as a sparse CSR tensor"] += 1
        if not isinstance(value, Tensor) or value.layout not in SPARSE_LAYOUTS:
            continue
        if name in (*_TENSORS, *_LABELS):
            continue  # refused by the caller
        if value.dim() != 2 or value.size(0) != value.size(1):
            raise DataError(f"{where}: {name} is sparse {list(value.shape)}, expected it square")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse")
            pairs = value.detach().cpu().to_sparse_coo().coalesce()
        index = pairs.indices()  # [2, number of pairs]: row, column
        layout = SPARSE_LAYOUTS[value.layout]
        del graph[name]
        graph[f"{name}_{layout}_index"] = index
        graph[f"{name}_{layout}_value"] = pairs.values()
        if "num_nodes" not in graph and "x" not in graph and "pos" not in graph:
            graph.num_nodes = value.size(0)
        if "edge_index" not in graph:
            # Row i of a transposed matrix has the edges that end in node i.
            graph.edge_index = index.flip(0) if name.endswith("_t") else index
            notes[f"edge_index read off {name}"] += 1


def _plain(value: object, name: str) -> Tensor | bool | int | float | str | None:
    """Return a value in a form that can be batched, saved and hashed; None if it has none."""
    if isinstance(value, Tensor):
        dense = value.layout == torch.strided and not (value.is_nested or value.is_quantized)
        return value.detach().cpu() if dense and not value.is_meta else None
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value) if value.dtype.kind in "biuf" else None
    if name in _LABELS and isinstance(value, list | tuple):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError):
            return None
    if isinstance(value, int) and value.bit_length() > 63:  # Python's have any length
        return None
    numbers_only = name in (*_TENSORS, *_LABELS)
    wanted = (bool, int, float) if numbers_only else (bool, int, float, str)
    return value if isinstance(value, wanted) and name not in _TENSORS else None


def _odd_kind(value: object) -> str:
    """Say what a value is that :func:`_plain` has refused."""
    if isinstance(value, int):
        return f"a whole number of {value.bit_length()} bits"
    if not isinstance(value, Tensor):
        return type(value).__name__
    odd = {
        "nested": value.is_nested,
        "quantized": value.is_quantized,
        "without values": value.is_meta,
    }
    return next((name for name, holds in odd.items() if holds), str(value.layout))


def _check_labels(labels: Tensor, name: str, where: str) -> None:
    """Refuse labels that no loss can take; NaN stands for one that is missing."""
    if labels.is_complex():
        raise DataError(f"{where}: {name} is {_kind(labels)}, expected real numbers")
    # As float64: not every type can be compared.
    sizes = labels.to(torch.float64).abs()
    if (sizes > torch.finfo(torch.float32).max).any():
        found = "infinite" if sizes.isinf().any() else f"{float(sizes.nan_to_num().max()):g}"
        raise DataError(f"{where}: {name} is {found}, expected finite labels, NaN for none")


def _check_memory(num_bytes: int, claim: str) -> None:
    """Refuse what does not fit in memory before it is touched: a small file can claim 2^40 rows."""
    if num_bytes > _memory():
        raise DataError(f"{claim}, expected no more than fits in {_memory()} bytes of memory")


_memory = cache(machine_memory)


def _check_edges(graph: Data, where: str) -> None:
    if "edge_index" not in graph:
        raise DataError(
            f"{where}: no edge_index, expected int64 [2, num_edges], or a sparse adj_t, as "
            "ToSparseTensor(layout=torch.sparse_csr) makes it"
        )
    if graph.edge_index.shape == (2, 0):
        # torch.tensor([[], []]) is float; without edges nothing is lost.
        graph.edge_index = graph.edge_index.to(torch.int64)


def _num_nodes(graph: Data, where: str, notes: Counter[str]) -> int:
    """Return the number of nodes, and store it if no tensor has a row per node."""
    stored = graph.to_dict()
    if "num_nodes" in stored:
        count = stored["num_nodes"]
        if isinstance(count, Tensor) and count.numel() == 1:
            count = graph.num_nodes = int(count)
        if type(count) is not int:
            raise DataError(f"{where}: num_nodes is {count!r}, expected a whole number")
    elif "x" in graph or "pos" in graph:
        tensor = graph["x" if "x" in graph else "pos"]
        count = tensor.size(0) if tensor.dim() else 0
    else:
        count = int(graph.edge_index.max()) + 1 if graph.edge_index.numel() else 0
        notes["number of nodes read off the edges (no x, no num_nodes)"] += 1
        graph.num_nodes = count
    if count < 1:
        raise DataError(f"{where}: no nodes, expected at least one (leave such graphs out)")
    return count


def _check_node_pairs(pairs: Tensor, name: str, num_nodes: int, where: str) -> None:
    if pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.size(0) != 2:
        raise DataError(f"{where}: {name} is {_kind(pairs)}, expected int64 [2, number of pairs]")
    if not pairs.numel():
        return
    low, high = int(pairs.min()), int(pairs.max())
    if low < 0 or high >= num_nodes:
        raise DataError(
            f"{where}: {name} names node {low if low < 0 else high}, expected 0 to {num_nodes - 1}"
        )


def _model_input(values: Tensor, name: str, where: str, notes: Counter[str]) -> Tensor:
    """Return integers as int64 and other numbers as float32, as layers expect them."""
    if values.is_complex():
        raise DataError(f"{where}: {name} is {_kind(values)}, expected real numbers")
    whole = not values.is_floating_point() and values.dtype != torch.bool
    wanted = torch.int64 if whole else torch.float32
    if values.dtype != wanted:
        notes[f"{name} converted from {_name(values.dtype)} to {_name(wanted)}"] += 1
    return values.to(wanted)


def _check_values(values: Tensor, name: str, rows: int, unit: str, where: str) -> None:
    if values.dim() == 0 or values.size(0) != rows:
        raise DataError(f"{where}: {name} is {_kind(values)}, expected {rows} rows, one per {unit}")
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad):
        raise DataError(
            f"{where}: {name} has {len(bad)} values that are not finite, "
            f"the first at {unit} {int(bad[0, 0])}; expected finite numbers"
        )


def _share_attributes(
    graphs: Sequence[Data], ids: Sequence[str], spec: str, notes: Counter[str]
) -> None:
    """Keep the attributes that every graph has: PyG cannot batch graphs that differ in them."""
    counts = Counter(name for graph in graphs for name in graph.to_dict())
    partial = {name: count for name, count in counts.items() if count < len(graphs)}
    for name, count in partial.items():
        if name in _ALL_OR_NONE:
            lacking = next(i for graph, i in zip(graphs, ids, strict=True) if name not in graph)
            raise DataError(
                f"{spec}: graph {lacking}: no {name}, but {count} of {len(graphs)} graphs have it; "
                "expected all or none"
            )
        if name not in (*_LABELS, "num_nodes"):
            for graph in graphs:
                if name in graph:
                    del graph[name]
            notes[f"attribute {name} left out, not in all graphs: found"] += count


def _share_widths(graphs: Sequence[Data], ids: Sequence[str], spec: str) -> None:
    for name in MODEL_INPUTS:
        if name not in graphs[0]:
            continue
        expected = (graphs[0][name].dtype, graphs[0][name].shape[1:])
        for graph, graph_id in zip(graphs, ids, strict=True):
            if (graph[name].dtype, graph[name].shape[1:]) != expected:
                raise DataError(
                    f"{spec}: graph {graph_id}: {name} is {_kind(graph[name])}, but "
                    f"{_kind(graphs[0][name])} in graph {ids[0]}; expected one type and width"
                )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(values: Tensor) -> str:
    return f"{_name(values.dtype)} {list(values.shape)}"


# --- node features for graphs without any

FEATURES = ("auto", "onehot-degree", "degree", "log-degree", "constant")

#: Hubs such as REDDIT's have thousands of neighbours: most one-hot columns would be all zeros.
_AUTO_ONEHOT_BELOW = 1000

#: One-hot columns are dense, so a mistaken request is refused before it fills the memory.
_MAX_BYTES = 4 * 2**30


def add_features(
    graphs: Sequence[Data], kind: str = "auto", *, max_degree: int | None = None, spec: str
) -> list[str]:
    """Set ``x`` of graphs that have none; return a note on what was added."""
    if kind not in FEATURES:
        raise DataError(
            f"{spec}: features={kind} is unknown, expected one of {', '.join(FEATURES)}"
        )
    if max_degree is not None and (max_degree < 1 or kind not in ("auto", "onehot-degree")):
        raise DataError(
            f"{spec}: max_degree={max_degree} with features={kind}, "
            "expected at least 1 and features=onehot-degree"
        )
    if "x" in graphs[0]:
        if kind != "auto" or max_degree is not None:
            columns = graphs[0].x.size(1) if graphs[0].x.dim() > 1 else 1
            raise DataError(
                f"{spec}: the graphs have features of their own ({columns} columns); "
                "expected no features= or max_degree="
            )
        return []
    degrees = [degree(graph.edge_index[0], graph.num_nodes, torch.long) for graph in graphs]
    highest = max(int(counts.max()) for counts in degrees)
    if kind == "auto":
        onehot = max_degree is not None or highest < _AUTO_ONEHOT_BELOW
        kind = "onehot-degree" if onehot else "log-degree"
    if kind != "onehot-degree":
        for graph, counts in zip(graphs, degrees, strict=True):
            graph.x = _column(counts, kind)  # [num_nodes, 1]
        return [f"no node features: x = {kind} (1 column; highest degree {highest})"]
    limit = max_degree if max_degree is not None else max(highest, 1)
    num_nodes = sum(map(len, degrees))
    size = 4 * num_nodes * (limit + 1)
    if size > _MAX_BYTES:
        raise DataError(
            f"{spec}: one-hot degrees would take {size / 2**30:.1f} GiB ({num_nodes:,} nodes x "
            f"{limit + 1:,} columns); expected a smaller max_degree= or features=log-degree"
        )
    for graph, counts in zip(graphs, degrees, strict=True):
        columns = torch.nn.functional.one_hot(counts.clamp(max=limit), limit + 1)
        graph.x = columns.to(torch.float32)  # [num_nodes, max_degree + 1]
    clipped = sum(int((counts > limit).sum()) for counts in degrees)
    beyond = f"; {clipped} nodes of higher degree in the last column" if clipped else ""
    return [
        f"no node features: x = one-hot degree ({limit + 1} columns, max_degree={limit}{beyond})"
    ]


def _column(counts: Tensor, kind: str) -> Tensor:
    values = counts.to(torch.float32).unsqueeze(1)  # [num_nodes, 1]
    if kind == "constant":
        return torch.ones_like(values)
    return values.log1p() if kind == "log-degree" else values
