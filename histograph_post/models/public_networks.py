"""The networks of public molecule checkpoints, written here from their public definitions.

Pretrain-gnns (Hu et al., "Strategies for Pre-training Graph Neural Networks", 2020) and MolCLR
(Wang et al., "Molecular Contrastive Learning of Representations", 2022) read atoms as (atomic
number - 1, chirality) and bonds as (type, direction). Every layer has its own embedding of bonds,
and every atom a self loop. OGB's examples (Hu et al., "Open Graph Benchmark", 2020) sum one
embedding per feature; with a virtual node, every layer reads a state of the whole graph. Attributes
have the names of the weights in the published files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing, global_add_pool
from torch_geometric.utils import add_self_loops, degree, softmax

from .builtin_models import POOLS

#: The bond type of a self loop, after the four of RDKit.
SELF_LOOP = 4


class BondConv(MessagePassing):
    """A convolution over bonds and self loops; a message is the sum of an atom and a bond."""

    AGGREGATION = "sum"

    def __init__(self, width: int, bonds: Sequence[int], bond_width: int | None = None) -> None:
        super().__init__(aggr=self.AGGREGATION)
        num_types, num_directions = bonds
        self.edge_embedding1 = nn.Embedding(num_types, bond_width or width)
        self.edge_embedding2 = nn.Embedding(num_directions, bond_width or width)

    def with_self_loops(
        self, edge_index: Tensor, edge_attr: Tensor, num_nodes: int
    ) -> tuple[Tensor, Tensor]:
        """Return the edges with self loops, and the embeddings of all their bonds."""
        edge_index, _ = add_self_loops(edge_index, num_nodes=num_nodes)  # [2, E + N]
        loops = edge_attr.new_tensor([SELF_LOOP, 0]).expand(num_nodes, 2)  # [N, 2]
        edge_attr = torch.cat([edge_attr, loops])  # [E + N, 2]
        kind, direction = edge_attr[:, 0], edge_attr[:, 1]  # [E + N] each
        return edge_index, self.edge_embedding1(kind) + self.edge_embedding2(direction)

    def message(self, x_j: Tensor, bond: Tensor) -> Tensor:
        """Return the message of each edge, ``[E + N, width]``."""
        return x_j + bond


class PretrainGIN(BondConv):
    """The sum of the messages, through two linear layers."""

    def __init__(self, width: int, bonds: Sequence[int]) -> None:
        super().__init__(width, bonds)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return ``[N, width]``."""
        edge_index, bond = self.with_self_loops(edge_index, edge_attr, x.shape[0])
        return self.mlp(self.propagate(edge_index, x=x, bond=bond))


class PretrainGCN(BondConv):
    """The sum of the messages, normalised by the degrees of both atoms."""

    def __init__(self, width: int, bonds: Sequence[int]) -> None:
        super().__init__(width, bonds)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return ``[N, width]``."""
        edge_index, bond = self.with_self_loops(edge_index, edge_attr, x.shape[0])
        source, target = edge_index  # [E + N] each
        scale = degree(source, x.shape[0], dtype=x.dtype).pow(-0.5)  # [N], a self loop each
        share = (scale[source] * scale[target]).unsqueeze(-1)  # [E + N, 1]
        return self.propagate(edge_index, x=self.linear(x), bond=bond, share=share)

    def message(self, x_j: Tensor, bond: Tensor, share: Tensor) -> Tensor:  # type: ignore[override]
        """Return the message of each edge, ``[E + N, width]``."""
        return share * (x_j + bond)


class PretrainSAGE(BondConv):
    """The mean of the messages, normalised to unit length."""

    AGGREGATION = "mean"

    def __init__(self, width: int, bonds: Sequence[int]) -> None:
        super().__init__(width, bonds)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return ``[N, width]``."""
        edge_index, bond = self.with_self_loops(edge_index, edge_attr, x.shape[0])
        return F.normalize(self.propagate(edge_index, x=self.linear(x), bond=bond), dim=-1)


class PretrainGAT(BondConv):
    """Messages weighted by attention, averaged over two heads.

    The weights of the messages that *leave* an atom sum to one, as in the published networks.
    """

    HEADS = 2

    def __init__(self, width: int, bonds: Sequence[int]) -> None:
        super().__init__(width, bonds, self.HEADS * width)
        self.weight_linear = nn.Linear(width, self.HEADS * width)
        self.att = nn.Parameter(torch.empty(1, self.HEADS, 2 * width))
        self.bias = nn.Parameter(torch.zeros(width))
        nn.init.xavier_uniform_(self.att)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return ``[N, width]``."""
        num_nodes = x.shape[0]
        edge_index, bond = self.with_self_loops(edge_index, edge_attr, num_nodes)
        out = self.propagate(
            edge_index, x=self.weight_linear(x), bond=bond, source=edge_index[0], total=num_nodes
        )  # [N, HEADS * width]
        return out.view(num_nodes, self.HEADS, -1).mean(dim=1) + self.bias  # [N, width]

    def message(  # type: ignore[override]
        self, x_i: Tensor, x_j: Tensor, bond: Tensor, source: Tensor, total: int
    ) -> Tensor:
        """Return the message of each edge, ``[E + N, HEADS * width]``."""
        x_i = x_i.view(x_i.shape[0], self.HEADS, -1)  # [E + N, HEADS, width]
        values = (x_j + bond).view(x_i.shape)  # [E + N, HEADS, width]
        scores = (torch.cat([x_i, values], dim=-1) * self.att).sum(dim=-1)  # [E + N, HEADS]
        weights = softmax(F.leaky_relu(scores, 0.2), source, num_nodes=total)  # [E + N, HEADS]
        return (values * weights.unsqueeze(-1)).flatten(1)


class MolclrGCN(BondConv):
    """The plain sum of the messages; a bond adds one number to all channels.

    MolCLR computes a normalisation by degree here, but does not use it.
    """

    def __init__(self, width: int, bonds: Sequence[int]) -> None:
        super().__init__(width, bonds, 1)
        self.weight = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.zeros(width))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return ``[N, width]``."""
        edge_index, bond = self.with_self_loops(edge_index, edge_attr, x.shape[0])
        return self.propagate(edge_index, x=x @ self.weight, bond=bond) + self.bias


class MoleculeGNN(nn.Module):
    """Atom embeddings, then convolutions with a batch norm each; no ReLU after the last.

    Args:
        atoms: Rows of the two tables of atoms.
        bonds: Rows of the two tables of bonds.
    """

    def __init__(
        self,
        conv: type[BondConv],
        *,
        atoms: Sequence[int],
        bonds: Sequence[int],
        num_layer: int,
        emb_dim: int,
        drop_ratio: float = 0.0,
    ) -> None:
        super().__init__()
        self.x_embedding1 = nn.Embedding(atoms[0], emb_dim)
        self.x_embedding2 = nn.Embedding(atoms[1], emb_dim)
        self.gnns = nn.ModuleList(conv(emb_dim, bonds) for _ in range(num_layer))
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(emb_dim) for _ in range(num_layer))
        self.drop_ratio, self.emb_dim = drop_ratio, emb_dim

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return the embedding of every atom, ``[N, emb_dim]``."""
        h = self.x_embedding1(x[:, 0]) + self.x_embedding2(x[:, 1])  # [N, emb_dim]
        last = len(self.gnns) - 1
        for number, (conv, norm) in enumerate(zip(self.gnns, self.batch_norms, strict=True)):
            h = norm(conv(h, edge_index, edge_attr))  # [N, emb_dim]
            h = h if number == last else F.relu(h)  # [N, emb_dim]
            h = F.dropout(h, self.drop_ratio, training=self.training)  # [N, emb_dim]
        return h


# --- OGB


class FeatureEncoder(nn.Module):
    """Atoms or bonds as the sum of an embedding per feature.

    Args:
        tables: The name of the embeddings in saved files.
    """

    def __init__(self, sizes: Sequence[int], width: int, tables: str) -> None:
        super().__init__()
        self.tables = tables
        self.add_module(tables, nn.ModuleList(nn.Embedding(size, width) for size in sizes))

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[N or E, width]``."""
        tables = enumerate(self.get_submodule(self.tables).children())
        return torch.stack([table(features[:, column]) for column, table in tables]).sum(dim=0)


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
        self.bond_encoder = FeatureEncoder(bonds, width, "bond_embedding_list")

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return ``[N, width]``."""
        received = self.propagate(edge_index, x=x, bond=self.bond_encoder(edge_attr))  # [N, width]
        return self.mlp((1 + self.eps) * x + received)

    def message(self, x_j: Tensor, bond: Tensor) -> Tensor:
        """Return the message of each edge, ``[E, width]``."""
        return F.relu(x_j + bond)


class OgbGCN(MessagePassing):
    """A convolution normalised by degree, with an embedding for the node itself."""

    def __init__(self, width: int, bonds: Sequence[int]) -> None:
        super().__init__(aggr="sum")
        self.linear = nn.Linear(width, width)
        self.root_emb = nn.Embedding(1, width)
        self.bond_encoder = FeatureEncoder(bonds, width, "bond_embedding_list")

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
        atoms: Categories of each feature of an atom.
        bonds: Categories of each feature of a bond.
        JK: ``last``, or ``sum`` of all layers, which the pool then reads.
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
        self.atom_encoder = FeatureEncoder(atoms, emb_dim, "atom_embedding_list")
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
                state = self.mlp_virtualnode_list[number](pooled)  # [G, emb_dim]
                state = F.dropout(state, self.drop_ratio, training=self.training)  # [G, emb_dim]
                virtual = virtual + state if self.residual else state  # [G, emb_dim]
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


class MoleculePrediction(nn.Module):
    """An encoder with a pool and a linear map, as its authors fine-tune it."""

    def __init__(
        self, encoder: MoleculeGNN | OgbNodes, num_tasks: int, graph_pooling: str = "mean"
    ) -> None:
        super().__init__()
        #: The name of the encoder in saved files.
        self.encoder = "gnn_node" if isinstance(encoder, OgbNodes) else "gnn"
        self.add_module(self.encoder, encoder)
        self.graph_pred_linear = nn.Linear(encoder.emb_dim, num_tasks)
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
        encoder = self.get_submodule(self.encoder)
        graphs = (batch, batch_size) if isinstance(encoder, OgbNodes) else ()
        h = encoder(x, edge_index, edge_attr, *graphs)  # [N, emb_dim]
        return self.graph_pred_linear(self.pool(h, batch, batch_size))
