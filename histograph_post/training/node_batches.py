"""Batches of some nodes of one large graph, for training a readout at node level.

A step on all of a million nodes to learn from a few takes minutes; here it takes as long as those
few. A summary of all the others, which a head needs, is taken once and comes with every batch: see
:class:`~histograph_post.heads.histograph.large_graphs.WholeGraph`. So a batch has the outputs and
gradients that a pass over the whole graph has for its nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ..heads.base import History, Readout
from ..heads.histograph import HistoGraphHead
from ..heads.histograph.large_graphs import WholeGraph, attend_along_edges
from ..heads.histograph.node_attention import EXACT_NODES
from ..heads.ragged import Graphs, ranges
from ..tasks import Task
from ..utils.machine import send
from .batches import HeadBatches, HeadInputs
from .history_rows import HistoryRows
from .loaded_cache import LoadedCache
from .loop import Step

#: Nodes of a batch whose outputs are needed.
NODES_PER_BATCH = 8192

#: The cost of attention is noted for graphs of more nodes.
NOTED_NODES = EXACT_NODES // 2

#: Time of a step, in forward passes.
STEP_PASSES = 3.5

#: Queries and keys whose attention is timed.
_TIMED = 1024, 4096


def goes_by_nodes(head: Readout, loaded: LoadedCache) -> bool:
    """Say whether a head is trained on some nodes of one large graph at a time."""
    if not is_one_large_graph(loaded):
        return False
    if isinstance(head, HistoGraphHead):
        return head.options.node_attention != "exact"
    return type(head).forward is Readout.forward  # the output of a node depends on no other


def is_one_large_graph(loaded: LoadedCache) -> bool:
    """Say whether a cache has the labels of nodes of one graph, and that is large."""
    return loaded.level == "node" and len(loaded.cache) == 1 and loaded.ptr[-1] > EXACT_NODES


def most_steps(loaded: LoadedCache, rows: np.ndarray) -> int:
    """Return the most steps an epoch on these rows may have, each on a graph or some nodes."""
    return -(-len(rows) // NODES_PER_BATCH) if is_one_large_graph(loaded) else len(loaded.cache)


def whole_graph(
    head: Readout, loaded: LoadedCache, rows: np.ndarray | None, history: HistoryRows
) -> WholeGraph | None:
    """Return the summary of all nodes that a head needs, made once for all seeds."""
    if not isinstance(head, HistoGraphHead):
        return None
    options = head.options

    def pieces() -> Iterator[History]:
        stop = int(history.ptr[-1])
        for first in range(0, stop, NODES_PER_BATCH):
            yield history.nodes(np.arange(first, min(first + NODES_PER_BATCH, stop)))

    key = ("whole", options.history_layers, options.node_attention, options.landmarks)
    return loaded.once(rows, key, lambda: WholeGraph.of(pieces, head.kept_dims, head.landmarks))


class NodeBatches(HeadBatches):
    """A :class:`~histograph_post.training.loop.Source` over nodes of the one graph of a cache.

    Args:
        loaded: The cache.
        history: Its activations, standardised or not.
        task: Gives the targets.
        device: Where batches go.
        edges: Whether a batch includes the nodes with an edge to one of its own, and those edges.
        whole: Summary of all nodes, for a head that needs it.
    """

    def __init__(
        self,
        loaded: LoadedCache,
        history: HistoryRows,
        task: Task,
        device: torch.device,
        *,
        edges: bool = False,
        whole: WholeGraph | None = None,
    ) -> None:
        super().__init__(loaded, history, task, device)
        self._incoming = _Incoming(loaded) if edges else None
        self._whole = None if whole is None else whole.to(device)

    def num_batches(self, rows: np.ndarray, *, batch_size: int) -> int:
        """Return how many batches these rows make, whatever the batch size in graphs."""
        return -(-len(rows) // NODES_PER_BATCH)

    def batches(self, rows: np.ndarray, *, batch_size: int, seed: int | None) -> Iterator[Step]:
        """Yield the rows in batches of nodes, shuffled if there is a seed."""
        if seed is not None:
            rows = np.random.default_rng(seed).permutation(rows)
        for start in range(0, len(rows), NODES_PER_BATCH):
            # Sorted: read in the order of the table.
            yield self._nodes_step(np.sort(rows[start : start + NODES_PER_BATCH]))

    def _nodes_step(self, nodes: np.ndarray) -> Step:
        found, numbers = nodes, [nodes, np.arange(len(nodes))]
        if self._incoming is not None:
            found, own, edges = self._incoming.around(nodes)
            numbers = [nodes, own, edges.reshape(-1)]
        rows, positions, *joined = send(numbers, self._device)  # [rows] twice, [2 * edges]
        inputs = HeadInputs(
            history=self._history.nodes(found),
            batch=Graphs.of_sizes(np.array([len(found)]), self._device),
            num_graphs=1,
            edge_index=joined[0].view(2, -1) if joined else None,
            positions=positions,
            whole=self._whole,
        )
        targets = self._targets_there.index_select(0, rows)  # [rows] or [rows, targets]
        return Step(inputs, targets, nodes, self._task.missing(self._targets[nodes]))


class _Incoming:
    """The edges of the one graph of a cache, by target node."""

    def __init__(self, loaded: LoadedCache) -> None:
        assert loaded.edge_ptr is not None  # raises for a cache without edges
        assert loaded.edge_index is not None
        source, target = loaded.edge_index.numpy()
        self._source = source[np.argsort(target, kind="stable")]  # [num_edges]
        degrees = np.bincount(target, minlength=int(loaded.ptr[-1]))
        self._ptr = np.concatenate([[0], np.cumsum(degrees)])  # [num_nodes + 1]

    def around(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return nodes and their neighbours, the places of the former among them, and the edges."""
        starts, stops = self._ptr[nodes], self._ptr[nodes + 1]
        sources = self._source[ranges(starts, stops)]  # [their edges]
        found, places = np.unique(np.concatenate([nodes, sources]), return_inverse=True)
        own, others = places[: len(nodes)], places[len(nodes) :]
        return found, own, np.stack([others, np.repeat(own, stops - starts)])  # [2, their edges]


# --- the cost of node attention over a large graph, noted before training


def attention_note(head: nn.Module, loaded: LoadedCache) -> str | None:
    """Note the kind of attention in the largest graph and the cost of a step; None if small."""
    nodes = int(loaded.cache.num_nodes.max())
    if not isinstance(head, HistoGraphHead) or head.node_attention is None or nodes <= NOTED_NODES:
        return None
    options, kind = head.options, head.options.node_attention
    if kind == "auto":
        kind = "exact" if nodes <= EXACT_NODES else "landmark"
    asked = min(nodes, NODES_PER_BATCH) if goes_by_nodes(head, loaded) else nodes
    keys = {"exact": float(nodes), "landmark": float(options.landmarks)}.get(kind)
    if keys is None:
        edges = loaded.edge_index
        keys = 1 + (0 if edges is None else edges.shape[1]) / nodes
    seconds = STEP_PASSES * asked * keys * _seconds_of_a_score(kind, options.dim, options.heads)
    rows = asked + (keys * asked if kind == "neighbors" else keys)
    # Queries, keys, values and contexts, and the gradients of all of them.
    num_bytes = 8 * 4 * rows * options.dim
    chosen = f"{kind}, because {nodes:,} nodes are more than {EXACT_NODES:,}"
    how = chosen if options.node_attention != kind and kind == "landmark" else kind
    return (
        f"node attention: {how}; a step on up to {asked:,} of {nodes:,} nodes, "
        f"{keys:,.0f} keys each: about {_short(seconds)} s and {_short(num_bytes / 1e6)} MB "
        "on this processor (node_attention=exact|landmark|neighbors|none)"
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _seconds_of_a_score(kind: str, dim: int, heads: int) -> float:
    """Estimate the time of one attention score, by timing attention between rows of zeros."""
    queries, keys = _TIMED
    rows = torch.zeros(keys, 3, heads, dim // heads)
    if kind == "neighbors":
        edges = torch.randint(keys, (2, queries * 64), generator=torch.Generator().manual_seed(0))
        scores, attend = edges.shape[1], partial(attend_along_edges, rows, edges, False)
    else:
        query, key, value = rows.permute(1, 2, 0, 3).unsqueeze(1)  # [1, heads, keys, d] each
        attention = functional.scaled_dot_product_attention
        scores, attend = queries * keys, partial(attention, query[:, :, :queries], key, value)
    attend()  # starts threads
    started = time.perf_counter()
    attend()
    return (time.perf_counter() - started) / scores
