"""Attention over the layers of a history: steps 1 to 5 of the paper.

A new normalisation is one function and one entry in :data:`NORMALIZATIONS`.

The projections are folded, which is exact algebra. The embedding ``E, b`` of a layer and the
encoding ``P_l`` of its position are one map ``M``, of its activations and of its one-hot number::

    X~_l = E x_l + b + P_l = M [x_l ; e_l]          M = [E , b + P_1 , ... , b + P_L]
    q    = X~_last Wq                                                        the last layer asks
    c_l  = mean over nodes of  q . X~_l Wk / sqrt(D)
         = mean over nodes of  (M^T Wk^T q) . [x_l ; e_l] / sqrt(D)
    H    = sum_l alpha_l X~_l = M [sum_l alpha_l x_l ; alpha]

No layer but the last is projected, so the cost is O(N L D) and nothing of the size of the history
``[N, L, D]`` is made. Layers of the same width share one embedding; each other width has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..history import History, last_layer
from ..ragged import Graphs

if TYPE_CHECKING:
    from .config import HistoGraphConfig
    from .large_graphs import WholeGraph

LAYER_ATTENTIONS = ("learned", "mean", "last", "random")

#: A deviation of scores to which adding 1 is lost in rounding, but whose square is finite.
HUGE_SCORE = 2.0**30


def bounded_weights(scores: Tensor, options: HistoGraphConfig) -> Tensor:
    """Signed weights that sum to one and stay in a ball around the mean over layers.

    With ``d = scores - mean(scores)``::

        alpha = 1/L + radius * d / sqrt(1 + |d|^2)

    There is no pole: the sum is one by construction, ``|alpha - 1/L| < radius`` for any scores,
    and the Jacobian is at most ``radius``. Where scores are small the map is linear; where they
    are huge only their direction counts, so the gradient with respect to a map that makes the
    scores shrinks as the scores grow. Every filter inside the ball can be expressed: the mean over
    layers is its centre, one layer alone at distance < 1, one layer plus a first difference at
    < sqrt(3).
    """
    # LayerNorm is d / sqrt(eps + |d|^2 / L). It centres, too; the mean is subtracted before it,
    # without a gradient, so that the rounding error of a large mean does not count as deviation.
    num_layers = scores.size(-1)
    deviation = scores - scores.detach().mean(-1, keepdim=True)  # [..., L]
    # Squares of huge scores would overflow. Scaling them down keeps their direction.
    unit = deviation.detach().abs().amax(-1, keepdim=True).clamp(min=HUGE_SCORE)  # [..., 1]
    eps = 1 / num_layers / HUGE_SCORE**2
    direction = functional.layer_norm(deviation / unit, (num_layers,), eps=eps)  # [..., L]
    return 1 / num_layers + options.radius / math.sqrt(num_layers) * direction


def signed_weights(scores: Tensor, options: HistoGraphConfig) -> Tensor:
    """Divide by the sum, as the paper does; a sum near zero becomes ``eps`` with its sign."""
    total = scores.sum(-1, keepdim=True)  # [..., 1]
    sign = torch.where(total < 0, -1.0, 1.0).to(scores.dtype)
    return scores / (sign * total.abs().clamp(min=options.eps))


def softmax_weights(scores: Tensor, options: HistoGraphConfig) -> Tensor:
    """Positive weights that sum to one: an ablation of the paper."""
    return scores.softmax(-1)


def plain_scores(scores: Tensor, options: HistoGraphConfig) -> Tensor:
    """Take the scores as weights: an ablation of the paper."""
    return scores


#: How scores become layer weights, both ``[..., L]`` in single precision or better, by the value of
#: the option. Each function also gets all options of the head, for those that it needs.
NORMALIZATIONS: dict[str, Callable[[Tensor, HistoGraphConfig], Tensor]] = {
    "bounded": bounded_weights,
    "signed": signed_weights,
    "softmax": softmax_weights,
    "none": plain_scores,
}


def sinusoidal_encoding(num_layers: int, dim: int) -> Tensor:
    """Fixed encoding of the layer index (Vaswani et al.), ``[num_layers, dim]``, in double."""
    position = torch.arange(num_layers, dtype=torch.float64, device="cpu").unsqueeze(-1)
    pair = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
    angle = position * torch.exp(pair * (-math.log(10000.0) / dim))  # [num_layers, ceil(dim / 2)]
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :dim]


class LayerBlock(NamedTuple):
    """Neighbouring layers of one width, in the precision of the head's weights."""

    #: Which layers.
    layers: slice
    #: ``[num_nodes, number of layers, width]``.
    rows: Tensor
    #: Index of the width's map in :attr:`LayerAttention.embeddings`.
    embedding: int


class LayerAttention(nn.Module):
    """Embed a history, weigh its layers per graph and sum them per node.

    There are ``layer_heads`` sets of weights, each for its own slice of the ``dim`` channels.

    Args:
        options: Of the head; ``layer_attention`` and ``normalization`` choose what is computed.
    """

    encoding: Tensor
    random_scores: Tensor

    def __init__(self, options: HistoGraphConfig) -> None:
        super().__init__()
        self.options = options
        self.dim, self.heads, self.in_dims = options.dim, options.layer_heads, options.kept_dims
        widths = list(dict.fromkeys(self.in_dims))
        #: Index of the embedding of each layer.
        self.embedding_of = [widths.index(width) for width in self.in_dims]
        #: The layers width by width, in the order in which the widths first occur.
        self.order = sorted(range(len(self.in_dims)), key=self.embedding_of.__getitem__)
        self.embeddings = nn.ModuleList(nn.Linear(width, self.dim) for width in widths)
        #: Columns of :meth:`maps`: the channels of each embedding, then the layers.
        self.columns = [*widths, len(self.in_dims)]
        encoding = sinusoidal_encoding(len(self.in_dims), self.dim).to(self.last_embedding.weight)
        self.register_buffer("encoding", encoding, persistent=False)
        if options.layer_attention == "learned":
            self.query = nn.Parameter(torch.empty(self.dim, self.dim))
            self.key = nn.Parameter(torch.empty(self.dim, self.dim))
        if options.layer_attention == "random":
            self.register_buffer("random_scores", torch.empty(self.heads, len(self.in_dims)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for embedding in self.embeddings:
            cast(nn.Linear, embedding).reset_parameters()
        if self.options.layer_attention == "learned":
            nn.init.xavier_uniform_(self.key)
            if self._starts_from_the_mean():
                nn.init.zeros_(self.query)  # every seed starts from the mean over layers
            else:
                nn.init.xavier_uniform_(self.query)
        if self.options.layer_attention == "random":
            nn.init.normal_(self.random_scores)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayerAttention:
        """Move or convert the module. In double, the encoding is not what single has left of it."""
        super()._apply(fn, recurse)
        self.encoding = sinusoidal_encoding(len(self.in_dims), self.dim).to(self.encoding)
        return self

    def _starts_from_the_mean(self) -> bool:
        """Whether scores of zero mean that all layers count alike."""
        zeros = torch.zeros(1, 1, 3, device="cpu")
        weights = NORMALIZATIONS[self.options.normalization](zeros, self.options)  # [1, 1, 3]
        return torch.allclose(weights, torch.full_like(weights, 1 / 3))

    def forward(
        self, history: History, graphs: Graphs, whole: WholeGraph | None = None
    ) -> tuple[Tensor, Tensor]:
        """Weigh and sum the layers.

        Args:
            history: The layers that are kept, ``[num_nodes, L, D]`` or L of ``[num_nodes, D_l]``.
            graphs: Which graph each node belongs to.
            whole: Summary of the one graph of which these are some nodes.

        Returns:
            Node embeddings ``[num_nodes, dim]`` and layer weights ``[num_graphs, heads, L]``.
        """
        weights = self.weights(history, graphs, whole)  # [num_graphs, heads, L]
        return self.combine(history, weights, graphs), weights

    def combine(self, history: History, weights: Tensor, graphs: Graphs) -> Tensor:
        """Sum the layers of every node by the weights of its graph: ``[num_nodes, dim]``."""
        of_nodes = graphs.spread(weights)  # [num_nodes, heads, L]
        sums: dict[int, Tensor] = {}  # sum_l alpha_l x_l, one per embedding
        for layers, rows, embedding in self.blocks(history):
            part = of_nodes[..., layers] @ rows  # [num_nodes, heads, width]
            sums[embedding] = sums[embedding] + part if embedding in sums else part
        combined = torch.cat([*sums.values(), of_nodes], dim=2)  # [num_nodes, heads, columns]
        nodes = torch.einsum("hdc,nhc->nhd", self._by_head(self.maps()), combined)
        return nodes.flatten(1)

    def weights(self, history: History, graphs: Graphs, whole: WholeGraph | None = None) -> Tensor:
        """Return the layer weights of every graph: ``[num_graphs, heads, L]``."""
        kind, num_layers = self.options.layer_attention, len(self.in_dims)
        if kind == "mean":
            return self.encoding.new_full(
                (graphs.num_graphs, self.heads, num_layers), 1 / num_layers
            )
        if kind == "last":
            weights = self.encoding.new_zeros(graphs.num_graphs, self.heads, num_layers)
            weights[..., -1] = 1.0
            return weights
        if kind == "random":
            return self.normalize(self.random_scores.expand(graphs.num_graphs, -1, -1))
        scores = self.scores(history, graphs) if whole is None else self.scores_of(whole)
        return self.normalize(scores / math.sqrt(self.dim // self.heads))

    def normalize(self, scores: Tensor) -> Tensor:
        """Turn scores into layer weights, both ``[num_graphs, heads, L]``."""
        full = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return NORMALIZATIONS[self.options.normalization](full, self.options).to(scores.dtype)

    def scores(self, history: History, graphs: Graphs) -> Tensor:
        """Return the scores of layers, not scaled yet: ``[num_graphs, heads, L]``."""
        last = last_layer(history).to(self.encoding.dtype)  # [num_nodes, D_last]
        query = (self.last_embedding(last) + self.encoding[-1]) @ self.query  # [num_nodes, dim]
        keys = self._by_head(self.key.t() @ self.maps())  # [heads, dim / heads, columns]
        by_head = query.unflatten(1, (self.heads, -1))  # [num_nodes, heads, dim / heads]
        asked = torch.einsum("nhd,hdc->nhc", by_head, keys)  # M^T Wk^T q: [.., heads, columns]
        *filters, fixed = asked.split(self.columns, dim=2)  # of activations, and of positions
        parts = []
        for _, rows, embedding in self.blocks(history):
            parts.append(filters[embedding] @ rows.mT)  # [num_nodes, heads, layers of the block]
        products = parts[0]
        if len(parts) > 1:  # a layer each: put them back into the order of the layers
            products = torch.cat([parts[place] for place in np.argsort(self.order)], dim=2)
        return graphs.mean(products + fixed)

    def scores_of(self, whole: WholeGraph) -> Tensor:
        """Return what :meth:`scores` returns for all nodes of a graph, from its summary.

        With ``q = x_last A + a``, the mean over nodes of ``q . (x_l B)`` is the sum over channels
        of ``A * (S_l B) + a * (m_l B)``, where ``S_l`` is the mean of the products of the channels
        of both layers, and ``m_l`` the mean of layer l.
        """
        embedding = self.last_embedding
        query = embedding.weight.t() @ self.query  # A: [D_last, dim]
        offset = (embedding.bias + self.encoding[-1]) @ self.query  # a: [dim]
        *keys, fixed = (self.key.t() @ self.maps()).split(self.columns, dim=1)  # [dim, ..] each
        layers = []
        for layer, own in enumerate(self.embedding_of):
            key = keys[own].t()  # B: [D_l, dim]
            products, mean = whole.products[layer].to(key), whole.means[layer].to(key)
            layers.append((query * (products @ key)).sum(0) + offset * (mean @ key))  # [dim]
        mean_query = whole.means[-1].to(query) @ query + offset  # [dim]
        channels = torch.stack(layers, dim=1) + mean_query.unsqueeze(1) * fixed  # [dim, L]
        return self._by_head(channels).sum(1).unsqueeze(0)

    def blocks(self, history: History) -> Iterator[LayerBlock]:
        """Yield all layers: at once if they need not be converted, else one by one in ``order``."""
        dtype = self.encoding.dtype
        if isinstance(history, Tensor) and history.dtype == dtype:
            yield LayerBlock(slice(0, len(self.in_dims)), history, 0)
            return
        for layer in self.order:
            rows = history[:, layer] if isinstance(history, Tensor) else history[layer]
            place = slice(layer, layer + 1)
            yield LayerBlock(place, rows.unsqueeze(1).to(dtype), self.embedding_of[layer])

    @property
    def last_embedding(self) -> nn.Linear:
        """The map of the last layer."""
        return cast(nn.Linear, self.embeddings[self.embedding_of[-1]])

    def offsets(self) -> Tensor:
        """Return the constant part of each embedded layer, ``b + P_l``: ``[L, dim]``."""
        biases = [cast(nn.Linear, embedding).bias for embedding in self.embeddings]
        if len(biases) == 1:
            return biases[0] + self.encoding
        return torch.stack([biases[own] for own in self.embedding_of]) + self.encoding

    def maps(self) -> Tensor:
        """Return the embeddings and the offsets side by side, ``M``: ``[dim, columns]``."""
        weights = [cast(nn.Linear, embedding).weight for embedding in self.embeddings]
        return torch.cat([*weights, self.offsets().t()], dim=1)

    def _by_head(self, maps: Tensor) -> Tensor:
        """View a map to ``dim`` channels, ``[dim, ...]``, as ``[heads, dim / heads, ...]``."""
        return maps.unflatten(0, (self.heads, self.dim // self.heads))

    def extra_repr(self) -> str:
        """Describe the module in one line."""
        options = self.options
        return (
            f"{len(self.in_dims)} layers, dim={self.dim}, heads={self.heads}, "
            f"attention={options.layer_attention!r}, normalization={options.normalization!r}"
        )
