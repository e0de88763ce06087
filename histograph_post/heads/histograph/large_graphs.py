"""Node attention for graphs that are too large for every node to attend to every other.

That takes N^2 scores, hours for a million nodes. Two other forms have the same weights:

*Landmarks.* A node attends to the means of k groups of similar nodes, N k scores, and a group
counts once for each of its nodes::

    softmax over groups g of (q . k_g / sqrt(d) + log n_g)

which is the exact attention of a graph in which every node is replaced by the mean of its group.
The group of a node depends on its activations alone: on which side of a few planes through the mean
of its graph they lie. It depends neither on the order of the nodes nor on other graphs nor on
weights: groups do not change while a head is trained, and the mean over a group of anything linear
in the activations follows from the means of the activations.

*Edges.* A node attends to itself and to the nodes with an edge to it. Time and memory are linear in
the edges. If there are many, they are handled in blocks, which are computed again in the backward
pass. A self-loop in the data is not counted again; a repeated edge counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..history import History, layers_of
from ..ragged import Graphs

if TYPE_CHECKING:
    from .layer_attention import LayerAttention

#: Edges of a block: 128 MB of keys and values of 64 channels.
EDGES_AT_ONCE = 1 << 18


# --- landmarks


@dataclass(frozen=True)
class Landmarks:
    """The groups of all graphs of a batch, as keys.

    Args:
        rows: Their means, zero for an empty group: ``[num_graphs, k, dim]``.
        counts: Nodes of each: ``[num_graphs, k]``.
        used: Which graphs are attended to in this way, ``[num_graphs]``.
        groups: The group of each node, if all nodes are given: ``[num_nodes]``.
    """

    rows: Tensor
    counts: Tensor
    used: npt.NDArray[np.bool_]
    groups: Tensor | None = None

    @classmethod
    def of(
        cls, nodes: Tensor, groups: Tensor, graphs: Graphs, count: int, used: npt.NDArray[np.bool_]
    ) -> Landmarks:
        """Average nodes ``[num_nodes, dim]`` over their groups ``[num_nodes]``."""
        slots = graphs.index * count + groups  # [num_nodes]
        counts = nodes.new_zeros(graphs.num_graphs * count)
        counts = counts.index_add(0, slots, nodes.new_ones(slots.size(0)))
        sums = nodes.new_zeros(counts.size(0), nodes.size(1)).index_add(0, slots, nodes)
        rows = sums / counts.clamp(min=1).unsqueeze(-1)  # [num_graphs * k, dim]
        shape = (graphs.num_graphs, count)
        return cls(rows.view(*shape, -1), counts.view(shape), used, groups)

    def take(self, graphs: npt.NDArray[np.int64], nodes: Tensor) -> Landmarks:
        """Return the landmarks of some graphs, which have these nodes."""
        chosen = torch.from_numpy(graphs).to(self.rows.device)
        groups = None if self.groups is None else self.groups[nodes]
        return Landmarks(self.rows[chosen], self.counts[chosen], self.used[graphs], groups)


class LandmarkGroups(nn.Module):
    """Assigns the nodes of large graphs to groups.

    Args:
        in_dims: Width of each layer that is read.
        count: Groups, a power of two.
        larger_than: Graphs of more nodes are large; -1 for all graphs.
    """

    directions: Tensor

    def __init__(self, in_dims: Sequence[int], count: int, larger_than: int) -> None:
        super().__init__()
        self.in_dims, self.count, self.larger_than = tuple(in_dims), count, larger_than
        planes = count.bit_length() - 1
        # The same for every head: they are neither learned nor saved.
        random = torch.Generator().manual_seed(0)
        drawn = torch.randn(sum(in_dims), planes, generator=random, device="cpu")
        self.register_buffer("directions", drawn, persistent=False)

    def forward(self, nodes: Tensor, history: History, graphs: Graphs) -> Landmarks | None:
        """Return the landmarks of the large graphs; None if no graph is large.

        An exported program, which is for graphs of any size, has landmarks if all graphs have.

        Args:
            nodes: To be averaged, ``[num_nodes, dim]``.
            history: By which they are grouped.
            graphs: Which graph each node belongs to.
        """
        used = graphs.sizes > self.larger_than  # [num_graphs]
        if not (self.larger_than < 0 if torch.compiler.is_exporting() else used.any()):
            return None
        return Landmarks.of(nodes, self.groups(history, graphs), graphs, self.count, used)

    @torch.no_grad()
    def groups(self, history: History, graphs: Graphs) -> Tensor:
        """Return the group of every node: ``[num_nodes]``, from 0 to ``count - 1``."""
        places = self.places(history)  # [num_nodes, planes]
        return self.side(places - graphs.spread(graphs.mean(places)))

    def places(self, history: History) -> Tensor:
        """Project nodes on the axis of every plane: ``[num_nodes, planes]``."""
        layers = layers_of(history)  # [num_nodes, D_l] each
        # A history on another device is projected there.
        axes = self.directions.to(layers[0].device).split(self.in_dims)  # one [D_l, planes] each
        parts = [layer.to(axis.dtype) @ axis for layer, axis in zip(layers, axes, strict=True)]
        return torch.stack(parts).sum(0)

    def side(self, places: Tensor) -> Tensor:
        """Return groups, ``[num_nodes]``: the sides of the planes are the bits of their number."""
        bits = 2 ** torch.arange(places.size(1), device=places.device)  # [planes]
        return ((places > 0) * bits).sum(1)


@dataclass(frozen=True)
class WholeGraph:
    """Summary of a graph of which a head is given some nodes only.

    Step 4 of the paper is a mean over all nodes of products of their layers, and landmarks are
    means over groups of them. Taken once, they make a batch of some nodes exact.

    Args:
        products: Mean over nodes of the last layer times layer l: L of ``[D_last, D_l]``.
        means: Mean over nodes of layer l: L of ``[D_l]``.
        landmarks: Mean over each group of layer l: L of ``[k, D_l]``; none without landmarks.
        counts: Nodes of each group: ``[k]``.
    """

    products: tuple[Tensor, ...]
    means: tuple[Tensor, ...]
    landmarks: tuple[Tensor, ...] = ()
    counts: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        pieces: Callable[[], Iterable[History]],
        kept_dims: Sequence[int],
        groups: LandmarkGroups | None,
    ) -> WholeGraph:
        """Summarise the graph in two passes over a history that comes in pieces.

        Args:
            pieces: Returns them, each with all layers, for every pass.
            kept_dims: Widths of the last layers, those that are used.
            groups: Says which landmark a node belongs to, if there are any.
        """
        width, exact, total = kept_dims[-1], torch.float64, 0
        products = [torch.zeros(width, each, dtype=exact) for each in kept_dims]
        sums = [torch.zeros(each, dtype=exact) for each in kept_dims]
        for piece in pieces():
            layers = _last_layers(piece, len(kept_dims))  # L of [rows, D_l]
            for product, sum_of, layer in zip(products, sums, layers, strict=True):
                product += layers[-1].t() @ layer
                sum_of += layer.sum(0, dtype=exact)
            total += len(layers[-1])
        whole = cls(
            tuple((product / total).float() for product in products),
            tuple((sum_of / total).float() for sum_of in sums),
        )
        if groups is None:
            return whole
        centre = groups.places([mean.unsqueeze(0) for mean in whole.means])  # [1, planes]
        counts = torch.zeros(groups.count)
        landmarks = [torch.zeros(groups.count, len(mean)) for mean in whole.means]
        for piece in pieces():
            layers = _last_layers(piece, len(kept_dims))  # L of [rows, D_l]
            group = groups.side(groups.places(layers) - centre)  # [rows]
            counts.index_add_(0, group, torch.ones(len(group)))
            for sum_of, layer in zip(landmarks, layers, strict=True):
                sum_of.index_add_(0, group, layer)
        shares = counts.clamp(min=1).unsqueeze(-1)  # [k, 1]
        return replace(whole, landmarks=tuple(layer / shares for layer in landmarks), counts=counts)

    def landmarks_by(self, attention: LayerAttention, weights: Tensor) -> Landmarks:
        """Sum the layers of the landmarks by layer weights, as is done for the nodes.

        Args:
            attention: Embeds and sums layers.
            weights: Of the layers of this graph, ``[1, heads, L]``.
        """
        assert self.counts is not None  # made for a head with landmarks
        one = Graphs.from_batch(None, len(self.counts), 1, weights.device)
        rows = attention.combine(self.landmarks, weights, one)  # [k, dim]
        counts = self.counts.to(rows.dtype).unsqueeze(0)  # [1, k]
        return Landmarks(rows.unsqueeze(0), counts, np.ones(1, dtype=np.bool_))

    def to(self, device: torch.device) -> WholeGraph:
        """Return the same on a device."""
        return WholeGraph(
            tuple(each.to(device) for each in self.products),
            tuple(each.to(device) for each in self.means),
            tuple(each.to(device) for each in self.landmarks),
            None if self.counts is None else self.counts.to(device),
        )


def _last_layers(history: History, depth: int) -> list[Tensor]:
    """Return the last layers in single precision, each ``[rows, D_l]``."""
    return [layer.float() for layer in layers_of(history)[-depth:]]


# --- edges


def attend_along_edges(
    projected: Tensor,
    edge_index: Tensor,
    zero_token: bool,
    dropout: float = 0.0,
    kept: Tensor | None = None,
) -> Tensor:
    """Return the context of every node: ``[num_nodes, heads * d]``.

    Args:
        projected: Queries, keys and values, ``[num_nodes, 3, heads, d]``.
        edge_index: ``[2, num_edges]``, from the node that is attended to.
        zero_token: Whether there is a key and value of zeros as well.
        dropout: Of single attention weights.
        kept: Nodes that others may attend to; all by default: ``[num_nodes]``.
    """
    source, target = _with_loops(edge_index, len(projected), kept)  # [num_edges] each
    query, key, value = projected.unbind(1)  # [num_nodes, heads, d] each
    if len(source) <= EDGES_AT_ONCE:
        return _contexts(query, key, value, source, target, zero_token, dropout).flatten(1)
    target, order = target.sort(stable=True)
    source = source[order]
    parts, first = [], 0
    for stop in _bounds(target, len(query)):
        start, end = torch.searchsorted(target, torch.tensor([first, stop], device=target.device))
        edges = slice(int(start), int(end))
        parts.append(
            checkpoint(
                _contexts,
                *(query[first:stop], key, value, source[edges], target[edges] - first),
                *(zero_token, dropout),
                use_reentrant=False,
            )
        )
        first = stop
    return torch.cat(parts).flatten(1)


def received_along_edges(
    projected: Tensor, edge_index: Tensor, zero_token: bool, share: Tensor
) -> Tensor:
    """Return the attention each node receives: ``[num_nodes]``.

    Args:
        projected: Queries, keys and values, ``[num_nodes, 3, heads, d]``.
        edge_index: ``[2, num_edges]``.
        zero_token: Whether there is a key of zeros as well.
        share: Weight of each node as a query, ``[num_nodes]``.
    """
    source, target = _with_loops(edge_index, len(projected), None)
    query, key, _ = projected.unbind(1)
    given = _weights(query, key, source, target, zero_token).mean(1) * share[target]  # [num_edges]
    return torch.zeros_like(share).index_add(0, source, given)


def _contexts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    target: Tensor,
    zero_token: bool,
    dropout: float,
) -> Tensor:
    """Sum the values of all edges into the queried nodes: ``[queries, heads, d]``."""
    weights = _weights(query, key, source, target, zero_token)  # [num_edges, heads]
    weights = functional.dropout(weights, dropout)
    found = weights.unsqueeze(-1) * value.index_select(0, source)  # [num_edges, heads, d]
    zeros = query.new_zeros(len(query), found[0].numel())  # flat: more dimensions are slow on a CPU
    return zeros.index_add(0, target, found.flatten(1)).view_as(query)


def _weights(
    query: Tensor, key: Tensor, source: Tensor, target: Tensor, zero_token: bool
) -> Tensor:
    """Return softmax weights over the edges into each node: ``[num_edges, heads]``."""
    products = query.index_select(0, target) * key.index_select(0, source)  # [num_edges, heads, d]
    scores = products.sum(-1) / math.sqrt(query.size(-1))  # [num_edges, heads]
    shape = (len(query), scores.size(1))
    # The token has the score 0 for every query.
    top = scores.new_full(shape, 0.0 if zero_token else -math.inf)  # [queries, heads]
    slots = target.unsqueeze(-1).expand_as(scores)  # [num_edges, heads]
    top = top.scatter_reduce(0, slots, scores.detach(), "amax")  # [queries, heads]
    weights = (scores - top.index_select(0, target)).exp()
    total = scores.new_zeros(shape).index_add(0, target, weights)  # [queries, heads]
    if zero_token:
        total = total + (-top).exp()
    return weights / total.index_select(0, target)


def _with_loops(edge_index: Tensor, num_nodes: int, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return where edges begin and end, with one from every node to itself."""
    source, target = edge_index  # [num_edges] each
    inside = source != target
    if kept is not None:
        inside = inside & kept[source]
    loops = torch.arange(num_nodes, device=source.device)
    return torch.cat([source[inside], loops]), torch.cat([target[inside], loops])


def _bounds(target: Tensor, num_nodes: int) -> list[int]:
    """Return the ends of ranges of nodes with about as many edges as a block has."""
    ends = target[EDGES_AT_ONCE - 1 :: EDGES_AT_ONCE].unique() + 1  # sorted already
    found: list[int] = ends.tolist()
    return found if found and found[-1] == num_nodes else [*found, num_nodes]
