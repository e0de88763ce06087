"""Landmarks: groups of nodes that are alike, whose means stand for them where nodes attend.

Attention of every node to every other takes N^2 scores, hours for a million nodes. With landmarks a
node attends to the means of k groups, N k scores, and a group counts as often as it has nodes::

    softmax over groups g of (q . k_g / sqrt(d) + log n_g)

which is the exact attention of a graph in which every node is replaced by the mean of its group.

Which group a node belongs to depends on its activations alone: on which side of a few planes
through the mean of its graph they lie. It depends neither on the order of the nodes nor on other
graphs, nor on weights: groups stay what they are while a head is trained, and the mean over a group
of what is linear in the activations follows from the means of the activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..history import History
from ..ragged import Graphs

if TYPE_CHECKING:
    from .layer_attention import LayerAttention


@dataclass(frozen=True)
class Landmarks:
    """The groups of all graphs of a batch, as keys.

    Args:
        rows: Their means, zero for an empty group: ``[num_graphs, k, dim]``.
        counts: Nodes of each: ``[num_graphs, k]``.
        used: Which graphs are attended to in this way, ``[num_graphs]``.
        groups: The group of each node, where all nodes are there: ``[num_nodes]``.
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
        """Return those of some graphs, whose nodes these are."""
        chosen = torch.from_numpy(graphs).to(self.rows.device)
        groups = None if self.groups is None else self.groups[nodes]
        return Landmarks(self.rows[chosen], self.counts[chosen], self.used[graphs], groups)


class LandmarkGroups(nn.Module):
    """Tells which group a node of a large graph belongs to.

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
        # The same for every head: they are not learned, and not saved.
        random = torch.Generator().manual_seed(0)
        drawn = torch.randn(sum(in_dims), planes, generator=random, device="cpu")
        self.register_buffer("directions", drawn, persistent=False)

    def forward(self, nodes: Tensor, history: History, graphs: Graphs) -> Landmarks | None:
        """Return the landmarks of the large graphs; None if there is none.

        A program that is exported, for graphs of any size, has them if all graphs have.

        Args:
            nodes: To be averaged, ``[num_nodes, dim]``.
            history: Says which of them are alike.
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
        """Return where nodes lie on the axis of every plane: ``[num_nodes, planes]``."""
        layers = history.unbind(1) if isinstance(history, Tensor) else history
        # A history that is on another device is looked at there, once for all steps.
        axes = self.directions.to(layers[0].device).split(self.in_dims)  # one [D_l, planes] each
        parts = [layer.to(axis.dtype) @ axis for layer, axis in zip(layers, axes, strict=True)]
        return torch.stack(parts).sum(0)

    def side(self, places: Tensor) -> Tensor:
        """Return the number that the sides of all planes make, ``[num_nodes]``."""
        bits = 2 ** torch.arange(places.size(1), device=places.device)  # [planes]
        return ((places > 0) * bits).sum(1)


@dataclass(frozen=True)
class WholeGraph:
    """What a head has to know of a graph of which it is given some nodes only.

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
        cls, pieces: Iterable[History], kept_dims: Sequence[int], groups: LandmarkGroups | None
    ) -> WholeGraph:
        """Take it of a history that comes in pieces, each time it is asked for.

        Args:
            pieces: Each with all layers.
            kept_dims: Widths of the last layers, which are looked at.
            groups: Says which landmark a node belongs to, if there are any.
        """
        products: list[Tensor] = []
        means: list[Tensor] = []
        total = 0
        for piece in pieces:
            layers = _last_layers(piece, len(kept_dims))  # L of [rows, D_l]
            found = [(layers[-1].t() @ layer).double() for layer in layers]
            sums = [layer.sum(0, dtype=torch.float64) for layer in layers]
            products = found if not total else [a + b for a, b in zip(products, found, strict=True)]
            means = sums if not total else [a + b for a, b in zip(means, sums, strict=True)]
            total += len(layers[-1])
        whole = cls(
            tuple((product / total).float() for product in products),
            tuple((mean / total).float() for mean in means),
        )
        if groups is None:
            return whole
        centre = groups.places([mean.unsqueeze(0) for mean in whole.means])  # [1, planes]
        counts = torch.zeros(groups.count)
        landmarks = [torch.zeros(groups.count, len(mean)) for mean in whole.means]
        for piece in pieces:
            layers = _last_layers(piece, len(kept_dims))
            group = groups.side(groups.places(layers) - centre)  # [rows]
            counts.index_add_(0, group, torch.ones(len(group)))
            for total_of, layer in zip(landmarks, layers, strict=True):
                total_of.index_add_(0, group, layer)
        shares = counts.clamp(min=1).unsqueeze(-1)  # [k, 1]
        return replace(whole, landmarks=tuple(layer / shares for layer in landmarks), counts=counts)

    def landmarks_by(self, attention: LayerAttention, weights: Tensor) -> Landmarks:
        """Sum the layers of the landmarks by layer weights, as those of the nodes are summed.

        Args:
            attention: Embeds and sums layers.
            weights: Of the layers of this graph, ``[1, heads, L]``.
        """
        assert self.counts is not None  # it was made for a head with landmarks
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
    layers = history.unbind(1) if isinstance(history, Tensor) else history
    return [layer.float() for layer in layers[-depth:]]
