"""The built-in backbones: GCN, GIN, GAT, GraphSAGE and GraphGPS in one class.

    features -> embedding -> num_layers x (convolution, norm, activation, dropout, residual)
             -> pool over the nodes of each graph -> classifier

A checkpoint of a built-in model describes itself: its state dict carries the settings it was built
with beside the weights, because a pool or a residual connection leaves no trace in the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    GINEConv,
    GPSConv,
    GraphNorm,
    SAGEConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.resolver import activation_resolver

from ..errors import ModelError
from .builtin_settings import SETTINGS_KEY, GNNSettings

POOLS: Final = {"mean": global_mean_pool, "sum": global_add_pool, "max": global_max_pool}


class FeatureEmbedding(nn.Module):
    """Map node or edge features to the hidden width.

    Float features go through a linear map, each column of integer features through an embedding of
    its own; the embeddings are summed. ``setting`` is what errors call ``in_dim``.
    """

    def __init__(self, in_dim: int | Sequence[int], out_dim: int, *, setting: str) -> None:
        super().__init__()
        self.in_dim = in_dim
        self.setting = setting
        if isinstance(in_dim, int):
            self.linear = nn.Linear(in_dim, out_dim)
        else:
            self.columns = nn.ModuleList(nn.Embedding(size, out_dim) for size in in_dim)

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[rows, out_dim]`` for features ``[rows, columns]``, or ``[rows]`` for one."""
        if features.dim() == 1:
            features = features.unsqueeze(-1)  # [rows, 1]
        self._check(features)
        if isinstance(self.in_dim, int):
            return self.linear(features)  # [rows, out_dim]
        embedded = [column(features[:, i]) for i, column in enumerate(self.columns)]
        return torch.stack(embedded).sum(dim=0)  # [rows, out_dim]

    def _check(self, features: Tensor) -> None:
        categorical = not isinstance(self.in_dim, int)
        num_columns = self.in_dim if isinstance(self.in_dim, int) else len(self.in_dim)
        if features.is_floating_point() != categorical and features.shape[-1] == num_columns:
            return
        what = "edge features" if self.setting == "edge_dim" else "node features"
        dtype = str(features.dtype).removeprefix("torch.")
        message = f"{what} are {list(features.shape)} {dtype}; this model was built for "
        message += f"{num_columns} columns of {'categories' if categorical else 'numbers'}"
        if not categorical and not features.is_floating_point():
            message += f" (for categories give how many each column has: {self.setting}=[119,5,12])"
        raise ModelError(message)


class GNN(nn.Module):
    """A message-passing network of one of five kinds, with its own readout."""

    def __init__(self, settings: GNNSettings) -> None:
        super().__init__()
        self.settings = settings
        hidden, num_layers = settings.hidden, settings.num_layers
        self.embedding = FeatureEmbedding(settings.in_dim, hidden, setting="in_dim")
        if settings.edge_dim is not None:
            self.edge_embedding = FeatureEmbedding(settings.edge_dim, hidden, setting="edge_dim")
        self.convs = nn.ModuleList(make_conv(settings) for _ in range(num_layers))
        # A GPS layer normalises inside.
        norm = "none" if settings.kind == "gps" else settings.norm
        self.norms = nn.ModuleList(make_norm(norm, hidden) for _ in range(num_layers))
        self.norm_per_graph = norm == "graph"
        self.activation = activation_resolver(settings.activation)
        self.dropout = nn.Dropout(settings.dropout)
        self.residual_scale = num_layers**-0.5 if settings.residual == "scaled" else 1.0
        self.classifier = make_classifier(settings)
        self.register_load_state_dict_pre_hook(_settings_are_optional)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return ``[num_graphs, out_dim]``, or ``[num_nodes, out_dim]`` without a pool."""
        edges = self._edge_arguments(edge_attr, edge_weight)
        h = self.dropout(self.embedding(x))  # [num_nodes, hidden]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            if self.settings.kind == "gps":  # norm, activation and dropout are inside
                update = conv(h, edge_index, batch, **edges)  # [num_nodes, hidden]
            else:
                update = conv(h, edge_index, **edges)  # [num_nodes, hidden]
                update = norm(update, batch, batch_size) if self.norm_per_graph else norm(update)
                update = self.dropout(self.activation(update))  # [num_nodes, hidden]
            if self.settings.residual == "none":
                h = update
            else:
                h = h + self.residual_scale * update  # [num_nodes, hidden]
        if self.settings.pool != "none":
            h = POOLS[self.settings.pool](h, batch, batch_size)  # [num_graphs, hidden]
        return self.classifier(h)  # [num_graphs or num_nodes, out_dim]

    def _edge_arguments(
        self, edge_attr: Tensor | None, edge_weight: Tensor | None
    ) -> dict[str, Tensor | None]:
        """Return what the convolutions of this kind take besides nodes and edges."""
        if self.settings.kind == "gcn":
            return {"edge_weight": edge_weight}  # [num_edges]
        if self.settings.edge_dim is None:
            return {}
        if edge_attr is None:
            raise ModelError(
                f"{self.settings.kind} was built with edge_dim, the data has no edge_attr"
            )
        return {"edge_attr": self.edge_embedding(edge_attr)}  # [num_edges, hidden]

    def get_extra_state(self) -> Tensor:
        """Return the settings, for the state dict to carry."""
        return self.settings.to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Ignore settings that come with weights: this module is built already."""


def _settings_are_optional(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Let weights without settings pass the strict check."""
    state_dict.setdefault(prefix + SETTINGS_KEY, module.get_extra_state())


def make_conv(settings: GNNSettings) -> nn.Module:
    """Return one convolution of the given kind, hidden width to hidden width."""
    hidden, heads = settings.hidden, settings.heads
    reads_edges = settings.edge_dim is not None
    match settings.kind:
        case "gcn":
            return GCNConv(hidden, hidden)
        case "sage":
            return SAGEConv(hidden, hidden)
        case "gat":
            edge_dim = hidden if reads_edges else None
            return GATConv(
                hidden, hidden // heads, heads, dropout=settings.dropout, edge_dim=edge_dim
            )
    mlp = nn.Sequential(
        nn.Linear(hidden, hidden),
        activation_resolver(settings.activation),
        nn.Linear(hidden, hidden),
    )
    gin = GINEConv(mlp, train_eps=True) if reads_edges else GINConv(mlp, train_eps=True)
    if settings.kind == "gin":
        return gin
    return GPSConv(
        hidden,
        gin,
        heads=heads,
        dropout=settings.dropout,
        act=settings.activation,
        norm=None if settings.norm == "none" else f"{settings.norm}_norm",
        # PyG's own layer norm runs over a whole graph unless told otherwise.
        norm_kwargs={"mode": "node"} if settings.norm == "layer" else None,
    )


def make_norm(norm: str, hidden: int) -> nn.Module:
    """Return the normalisation called ``norm``."""
    match norm:
        case "batch":
            return nn.BatchNorm1d(hidden)
        case "layer":
            return nn.LayerNorm(hidden)
        case "graph":
            return GraphNorm(hidden)
    return nn.Identity()


def make_classifier(settings: GNNSettings) -> nn.Module:
    """Return the map from the pooled graph (or from the node) to the targets."""
    if settings.classifier == "linear":
        return nn.Linear(settings.hidden, settings.out_dim)
    return nn.Sequential(
        nn.Linear(settings.hidden, settings.hidden),
        activation_resolver(settings.activation),
        nn.Dropout(settings.dropout),
        nn.Linear(settings.hidden, settings.out_dim),
    )
