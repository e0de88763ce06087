"""The layer stage: weigh each graph's layers, and sum them per node.

Steps 1 to 5 of the method with all projections folded (exact algebra)::

    q    = (E x_last + b + P_last) Wq          the last layer asks
    c_l  = mean over nodes of  q . (E x_l + b + P_l) Wk / sqrt(D)
         = mean over nodes of  (E^T Wk q) . x_l / sqrt(D)  +  mean(q) . (b + P_l) Wk / sqrt(D)
    H    = sum_l alpha_l (E x_l + b + P_l)
         = E (sum_l alpha_l x_l)  +  sum_l alpha_l (b + P_l)

so no layer but the last is ever projected: the cost is O(N L D), and nothing of the size of the
history is made. Layers of the same width share one map ``E``; each other width has its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from .folded_maps import LayerMaps
from .history import LayerStack
from .layer_kernels import layer_scores
from .mapped_kernels import map_heads, mapped_combine, mapped_scores
from .ragged import Graphs

LAYER_ATTENTIONS = ("learned", "mean", "last", "random")


def bounded_weights(scores: Tensor, radius: float) -> Tensor:
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
    deviation = scores - scores.mean(-1, keepdim=True)  # [..., L]
    # Once more, because the rounding error of a large mean is no deviation.
    deviation = deviation - deviation.mean(-1, keepdim=True)
    # Measured in units of the largest entry, so that squares of huge scores do not overflow.
    unit = deviation.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)  # [..., 1]
    deviation = deviation / unit
    norm = (unit.reciprocal().square() + deviation.square().sum(-1, keepdim=True)).sqrt()
    return 1.0 / scores.size(-1) + radius * deviation / norm


def signed_weights(scores: Tensor, eps: float) -> Tensor:
    """Divide by the sum, as the paper does; near zero it keeps its sign and counts as ``eps``."""
    total = scores.sum(-1, keepdim=True)  # [..., 1]
    sign = torch.where(total < 0, -1.0, 1.0).to(scores.dtype)
    return scores / (sign * total.abs().clamp(min=eps))


#: How scores become weights, both ``[..., L]``; each is called with ``eps`` and ``radius``.
NORMALIZATIONS: dict[str, Callable[..., Tensor]] = {
    "bounded": lambda scores, *, eps, radius: bounded_weights(scores, radius),
    "signed": lambda scores, *, eps, radius: signed_weights(scores, eps),
    "softmax": lambda scores, *, eps, radius: scores.softmax(-1),
    "none": lambda scores, *, eps, radius: scores,
}


def normalize(scores: Tensor, kind: str, *, eps: float, radius: float) -> Tensor:
    """Turn scores into layer weights, both ``[..., L]``; ``kind`` is one of ``NORMALIZATIONS``."""
    return NORMALIZATIONS[kind](scores, eps=eps, radius=radius)


def sinusoidal_encoding(num_layers: int, dim: int) -> Tensor:
    """Fixed encoding of the layer index (Vaswani et al.): ``[num_layers, dim]``."""
    position = torch.arange(num_layers, dtype=torch.float64).unsqueeze(-1)  # [num_layers, 1]
    pair = torch.arange(0, dim, 2, dtype=torch.float64)
    angle = position * torch.exp(pair * (-math.log(10000.0) / dim))  # [num_layers, ceil(dim / 2)]
    encoding = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :dim]
    return encoding.to(torch.get_default_dtype())


class LayerWeights(nn.Module):
    """Embed a history, weigh its layers per graph and sum them per node.

    Args:
        in_dims: Width of each layer of the history.
        dim: Width of the result.
        heads: Sets of layer weights, each for its own slice of the ``dim`` channels.
        attention: ``learned``; or one of the ablations ``mean`` (all layers alike), ``last`` (the
            last layer only) and ``random`` (scores drawn once and kept).
        normalization: How scores become weights, one of ``NORMALIZATIONS``.
        eps: Smallest magnitude of the divisor of ``signed``.
        radius: Largest distance of ``bounded`` weights from the mean over layers.
    """

    encoding: Tensor
    random_scores: Tensor

    def __init__(
        self,
        in_dims: Sequence[int],
        dim: int,
        *,
        heads: int = 1,
        attention: str = "learned",
        normalization: str = "bounded",
        eps: float = 1e-6,
        radius: float = 2.0,
    ) -> None:
        super().__init__()
        self.in_dims = tuple(in_dims)
        self.dim, self.heads = dim, heads
        self.attention, self.normalization = attention, normalization
        self.eps, self.radius = eps, radius
        widths = dict.fromkeys(self.in_dims)
        #: The layers of each width, in the order in which the widths first occur.
        self.groups = tuple(
            tuple(layer for layer, own in enumerate(self.in_dims) if own == width)
            for width in widths
        )
        self.embeddings = nn.ModuleList(nn.Linear(width, dim) for width in widths)
        self.register_buffer(
            "encoding", sinusoidal_encoding(len(self.in_dims), dim), persistent=False
        )
        if attention == "learned":
            self.query = nn.Parameter(torch.empty(dim, dim))
            self.key = nn.Parameter(torch.empty(dim, dim))
        if attention == "random":
            self.register_buffer("random_scores", torch.empty(heads, len(self.in_dims)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for embedding in self.embeddings:
            cast(nn.Linear, embedding).reset_parameters()
        if self.attention == "learned":
            nn.init.xavier_uniform_(self.key)
            if self.normalization in ("bounded", "softmax"):
                nn.init.zeros_(self.query)  # every seed starts from the mean over layers
            else:
                nn.init.xavier_uniform_(self.query)  # zero scores have no sum to divide by
        if self.attention == "random":
            nn.init.normal_(self.random_scores)

    @property
    def last_embedding(self) -> nn.Linear:
        """The map of the last layer."""
        group = next(i for i, layers in enumerate(self.groups) if len(self.in_dims) - 1 in layers)
        return cast(nn.Linear, self.embeddings[group])

    @property
    def bound(self) -> float:
        """What bounds its normalisation: the radius, or the smallest magnitude of a divisor."""
        return self.radius if self.normalization == "bounded" else self.eps

    def forward(
        self, stacks: Sequence[LayerStack], last: Tensor, graphs: Graphs
    ) -> tuple[Tensor, Tensor]:
        """Weigh and sum the layers.

        Args:
            stacks: The history, one stack per group of equal widths.
            last: The last layer, standardised, ``[num_nodes, D_last]``.
            graphs: Which graph each node belongs to.

        Returns:
            Node embeddings ``[num_nodes, dim]`` and layer weights ``[num_graphs, heads, L]``.
        """
        weights = self.weights(stacks, last, graphs)  # [num_graphs, heads, L]
        embedded: Tensor | None = None
        for stack, layers, weight, offset in self._by_group(stacks):
            group_weights = weights[..., layers]  # [num_graphs, heads, L_group]
            maps = self._split(weight, 0).transpose(1, 2)  # [heads, D_group, dim / heads]
            offset = self._split(offset, 1).transpose(0, 1)  # [heads, L_group, dim / heads]
            constant = map_heads(group_weights, offset)  # [num_graphs, heads, dim / heads]
            part = mapped_combine(stack, group_weights, maps, constant, graphs)
            embedded = part if embedded is None else embedded + part
        assert embedded is not None  # a history has layers
        return embedded.flatten(1), weights

    def weights(self, stacks: Sequence[LayerStack], last: Tensor, graphs: Graphs) -> Tensor:
        """Return the layer weights of every graph: ``[num_graphs, heads, L]``."""
        num_layers = len(self.in_dims)
        if self.attention == "mean":
            return last.new_full((graphs.num_graphs, self.heads, num_layers), 1.0 / num_layers)
        if self.attention == "last":
            weights = last.new_zeros(graphs.num_graphs, self.heads, num_layers)
            weights[..., -1] = 1.0
            return weights
        if self.attention == "random":
            scores = self.random_scores.expand(graphs.num_graphs, -1, -1)
        else:
            scores = self.scores(stacks, last, graphs)
        return normalize(scores, self.normalization, eps=self.eps, radius=self.radius)

    def scores(self, stacks: Sequence[LayerStack], last: Tensor, graphs: Graphs) -> Tensor:
        """Return the mean score of every layer in every graph: ``[num_graphs, heads, L]``."""
        embedding = self.last_embedding
        query_map = embedding.weight.t() @ self.query  # [D_last, dim]
        query_bias = (embedding.bias + self.encoding[-1]) @ self.query  # [dim]
        mean_query = torch.addmm(query_bias, graphs.mean(last), query_map)  # [num_graphs, dim]
        mean_query = self._split(mean_query, 1)  # [num_graphs, heads, dim / heads]
        parts = []
        for stack, _, weight, offset in self._by_group(stacks):
            key_map = self._split(self.key.t() @ weight, 0)  # [heads, dim / heads, D_group]
            if self.heads == 1:  # no query per node: the two maps are one
                (only,) = key_map
                filters = torch.addmm(query_bias @ only, last, query_map @ only).unsqueeze(1)
                sums = layer_scores(stack, filters, graphs)  # [num_graphs, 1, L_group]
            else:
                query = torch.addmm(query_bias, last, query_map)  # [num_nodes, dim]
                sums = mapped_scores(stack, self._split(query, 1), key_map, graphs)
            keys = self._split(offset @ self.key, 1).permute(1, 2, 0)  # [heads, dim / heads, L]
            fixed = map_heads(mean_query, keys)  # [num_graphs, heads, L_group]
            parts.append(sums / graphs.divisor.view(-1, 1, 1) + fixed)
        order = [layer for layers in self.groups for layer in layers]
        scores = torch.cat(parts, dim=-1)  # [num_graphs, heads, L], group by group
        if len(self.groups) > 1:
            scores = scores[..., sorted(range(len(order)), key=order.__getitem__)]
        return scores / math.sqrt(self.dim // self.heads)

    def folded(self) -> LayerMaps[Tensor]:
        """Return the maps of learned weights over layers that all have one width."""
        ((_, embedding),) = zip(self.groups, self.embeddings, strict=True)
        linear = cast(nn.Linear, embedding)
        offset = linear.bias + self.encoding  # [L, dim]
        both = torch.cat([self.query, self.key], dim=1)  # [dim, 2 * dim]: half as many products
        query, key = (both.t() @ linear.weight).split(self.dim)  # [dim, D] each
        fixed_queries, fixed_keys = (offset @ both).split(self.dim, dim=1)  # [L, dim] each
        return LayerMaps(
            query=query,
            query_bias=fixed_queries[-1],  # [dim]
            key=self._split(key, 0),  # [heads, dim / heads, D]
            fixed_keys=self._split(fixed_keys, 1).permute(1, 2, 0),  # [heads, dim / heads, L]
            embedding=linear.weight,  # [dim, D]
            offset=offset,
        )

    def _by_group(
        self, stacks: Sequence[LayerStack]
    ) -> list[tuple[LayerStack, list[int] | slice, Tensor, Tensor]]:
        """Pair each stack with its layers, its map and its constants ``b + P_l [L_group, dim]``."""
        result: list[tuple[LayerStack, list[int] | slice, Tensor, Tensor]] = []
        for stack, layers, embedding in zip(stacks, self.groups, self.embeddings, strict=True):
            chosen = slice(None) if len(self.groups) == 1 else list(layers)
            linear = cast(nn.Linear, embedding)
            result.append((stack, chosen, linear.weight, linear.bias + self.encoding[chosen]))
        return result

    def _split(self, values: Tensor, axis: int) -> Tensor:
        """View the ``dim`` channels on ``axis`` as ``[heads, dim / heads]``."""
        return values.unflatten(axis, (self.heads, self.dim // self.heads))

    def extra_repr(self) -> str:
        """Describe the module in one line."""
        return (
            f"{len(self.in_dims)} layers, dim={self.dim}, heads={self.heads}, "
            f"attention={self.attention!r}, normalization={self.normalization!r}"
        )
