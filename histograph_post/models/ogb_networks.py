"""The networks of OGB's molecule examples (Hu et al., "Open Graph Benchmark", 2020), written here.

Atoms and bonds are sums of embeddings, one per feature. A virtual node, where there is one, hands
every layer a state of the whole graph. Attributes carry the names of the weights in saved files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing, global_add_pool
from torch_geometric.utils import degree

from .builtin_models import POOLS


def _embedded(tables: nn.ModuleList, features: Tensor) -> Tensor:
    """Return the sum of the embeddings of all columns, ``[rows, width]``."""
    return torch.stack([table(features[:, i]) for i, table in enumerate(tables)]).sum(dim=0)


class AtomEncoder(nn.Module):
    """Atoms as the sum of an embedding per feature."""

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        super().__init__()
        self.atom_embedding_list = nn.ModuleList(nn.Embedding(size, width) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, width]``."""
        return _embedded(self.atom_embedding_list, x)


class BondEncoder(nn.Module):
    """Bonds as the sum of an embedding per feature."""

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        super().__init__()
        self.bond_embedding_list = nn.ModuleList(nn.Embedding(size, width) for size in sizes)

    def forward(self, edge_attr: Tensor) -> Tensor:
        """Return ``[E, width]``."""
        return _embedded(self.bond_embedding_list, edge_attr)


class OgbGIN(MessagePassing):
    """``mlp((1 + eps) x + sum of relu(neighbour + bond))``."""

    def __init__(self, width: int, bonds: Sequence[int]) -> None:
        super().__init__(aggr="sum")
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.BatchNorm1d(2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, width),
        )
        self.eps = nn.Parameter(torch.zeros(1))
        self.bond_encoder = BondEncoder(bonds, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return ``[N, width]``."""
        received = self.propagate(edge_index, x=x, bond=self.bond_encoder(edge_attr))  # [N, width]
        return self.mlp((1 + self.eps) * x + received)

    def message(self, x_j: Tensor, bond: Tensor) -> Tensor:
        """Return the message of each edge, ``[E, width]``."""
        return F.relu(x_j + bond)


class OgbGCN(MessagePassing):
    """A convolution normalised by degree, with an embedding of its own for the node itself."""

    def __init__(self, width: int, bonds: Sequence[int]) -> None:
        super().__init__(aggr="sum")
        self.linear = nn.Linear(width, width)
        self.root_emb = nn.Embedding(1, width)
        self.bond_encoder = BondEncoder(bonds, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return ``[N, width]``."""
        x = self.linear(x)  # [N, width]
        source, target = edge_index  # [E] each
        degrees = degree(source, x.shape[0], dtype=x.dtype) + 1  # [N]
        scale = degrees.pow(-0.5)  # [N]
        share = (scale[source] * scale[target]).unsqueeze(-1)  # [E, 1]
        bond = self.bond_encoder(edge_attr)  # [E, width]
        received = self.propagate(edge_index, x=x, bond=bond, share=share)  # [N, width]
        return received + F.relu(x + self.root_emb.weight) / degrees.unsqueeze(-1)

    def message(self, x_j: Tensor, bond: Tensor, share: Tensor) -> Tensor:
        """Return the message of each edge, ``[E, width]``."""
        return share * F.relu(x_j + bond)


class OgbNodes(nn.Module):
    """Atom embeddings, then convolutions with a batch norm each, with or without a virtual node.

    Args:
        conv: The convolution.
        atoms: Categories of each feature of an atom.
        bonds: Categories of each feature of a bond.
        num_layer: How many convolutions.
        emb_dim: Their width.
        virtual_node: Whether there is one.
        residual: Whether each layer adds its input.
        JK: ``last``, or ``sum`` of all layers, which the pool then reads.
        drop_ratio: Of the dropout after each layer, while it is trained.
    """

    def __init__(
        self,
        conv: type[OgbGIN | OgbGCN],
        *,
        atoms: Sequence[int],
        bonds: Sequence[int],
        num_layer: int,
        emb_dim: int,
        virtual_node: bool = False,
        residual: bool = False,
        JK: str = "last",  # as OGB calls it
        drop_ratio: float = 0.0,
    ) -> None:
        super().__init__()
        self.residual, self.JK, self.drop_ratio = residual, JK, drop_ratio
        self.virtual_node, self.emb_dim = virtual_node, emb_dim
        self.atom_encoder = AtomEncoder(atoms, emb_dim)
        self.convs = nn.ModuleList(conv(emb_dim, bonds) for _ in range(num_layer))
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(emb_dim) for _ in range(num_layer))
        if virtual_node:
            self.virtualnode_embedding = nn.Embedding(1, emb_dim)
            self.mlp_virtualnode_list = nn.ModuleList(
                _virtual_mlp(emb_dim) for _ in range(num_layer - 1)
            )

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor,
        batch: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return the embedding of every atom, ``[N, emb_dim]``."""
        if batch is None:
            batch, batch_size = x.new_zeros(x.shape[0]), 1
        h = self.atom_encoder(x)  # [N, emb_dim]
        states, last = [], len(self.convs) - 1
        if self.virtual_node:
            graphs = int(batch.max()) + 1 if batch_size is None else batch_size
            virtual = self.virtualnode_embedding.weight.expand(graphs, -1)  # [G, emb_dim]
        for number, (conv, norm) in enumerate(zip(self.convs, self.batch_norms, strict=True)):
            if self.virtual_node:
                h = h + virtual[batch]  # [N, emb_dim]
            update = norm(conv(h, edge_index, edge_attr))  # [N, emb_dim]
            update = update if number == last else F.relu(update)  # [N, emb_dim]
            update = F.dropout(update, self.drop_ratio, training=self.training)  # [N, emb_dim]
            if self.virtual_node and number < last:
                pooled = global_add_pool(h, batch, graphs) + virtual  # [G, emb_dim]
                moved = self.mlp_virtualnode_list[number](pooled)  # [G, emb_dim]
                moved = F.dropout(moved, self.drop_ratio, training=self.training)  # [G, emb_dim]
                virtual = virtual + moved if self.residual else moved  # [G, emb_dim]
            states.append(h)
            h = update + h if self.residual else update  # [N, emb_dim]
        return torch.stack([*states, h]).sum(dim=0) if self.JK == "sum" else h


def _virtual_mlp(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 2 * width),
        nn.BatchNorm1d(2 * width),
        nn.ReLU(),
        nn.Linear(2 * width, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
    )


class OgbPrediction(nn.Module):
    """Such a network with a pool and a linear map: OGB's whole model."""

    def __init__(self, gnn_node: OgbNodes, num_tasks: int, graph_pooling: str = "mean") -> None:
        super().__init__()
        self.gnn_node = gnn_node
        self.graph_pred_linear = nn.Linear(gnn_node.emb_dim, num_tasks)
        self.pool = POOLS[graph_pooling]

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor,
        batch: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return ``[num_graphs, num_tasks]``."""
        h = self.gnn_node(x, edge_index, edge_attr, batch, batch_size)  # [N, emb_dim]
        return self.graph_pred_linear(self.pool(h, batch, batch_size))
