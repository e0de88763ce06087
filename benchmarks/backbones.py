"""The backbones that are run: the tool's own GIN, and the molecule GCN of pretrain-gnns."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.utils import add_self_loops, degree, scatter

from histograph_post.data import GraphDataset
from histograph_post.models import build_model, call_model, load_into, read_checkpoint

from .generated import ATOM_TYPES, BOND_DIRECTIONS, CHIRALITY_TAGS

#: Kinds of bonds with the two that pretrain-gnns adds: a self loop, and a mask.
_BOND_TYPES, _SELF_LOOP = 6, 4
#: Graphs over which the statistics of batch normalisation are taken.
_SETTLING_GRAPHS = 256


class BondConv(nn.Module):
    """A graph convolution whose messages carry the embedding of their bond."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.edge_embedding1 = nn.Embedding(_BOND_TYPES, width)
        self.edge_embedding2 = nn.Embedding(BOND_DIRECTIONS, width)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return ``[num_nodes, width]``; ``edge_attr`` is ``[num_edges, 2]``."""
        loops = edge_attr.new_tensor([[_SELF_LOOP, 0]]).expand(len(x), 2)
        kinds, directions = torch.cat([edge_attr, loops]).unbind(1)  # [num_messages]
        (source, target), _ = add_self_loops(edge_index, num_nodes=len(x))
        bonds = self.edge_embedding1(kinds) + self.edge_embedding2(directions)
        scale = degree(source, len(x)).pow(-0.5)  # [num_nodes]
        norm = (scale[source] * scale[target]).unsqueeze(-1)  # [num_messages, 1]
        messages = norm * (self.linear(x).index_select(0, source) + bonds)  # [num_messages, width]
        return scatter(messages, target, dim=0, dim_size=len(x))


class MoleculeGCN(nn.Module):
    """Atom embeddings and convolutions with batch norm; its weights are named as pretrain-gnns'."""

    def __init__(self, num_layers: int = 5, width: int = 300) -> None:
        super().__init__()
        self.x_embedding1 = nn.Embedding(ATOM_TYPES, width)
        self.x_embedding2 = nn.Embedding(CHIRALITY_TAGS, width)
        self.gnns = nn.ModuleList(BondConv(width) for _ in range(num_layers))
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(num_layers))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        """Return the embeddings of the last layer, ``[num_nodes, width]``."""
        hidden = self.x_embedding1(x[:, 0]) + self.x_embedding2(x[:, 1])
        for layer, (conv, norm) in enumerate(zip(self.gnns, self.batch_norms, strict=True), 1):
            hidden = norm(conv(hidden, edge_index, edge_attr))
            if layer < len(self.gnns):
                hidden = hidden.relu()
        return hidden


def make_gin(dataset: GraphDataset, num_layers: int, width: int) -> nn.Module:
    """Return the built-in GIN with batch norm, with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden": width, "num_layers": num_layers}
    columns = int(dataset.graphs[0].num_node_features)
    return _settled(build_model("gin", sizes, in_dim=columns, out_dim=1), dataset)


def make_molecule_gcn(dataset: GraphDataset, width: int, checkpoint: Path | None) -> nn.Module:
    """Return the molecule GCN: with the weights of a checkpoint, or with random ones."""
    torch.manual_seed(0)
    model = MoleculeGCN(width=width)
    if checkpoint is None:
        return _settled(model, dataset)
    load_into(model, read_checkpoint(checkpoint))
    return model.eval()


@torch.no_grad()
def _settled(model: nn.Module, dataset: GraphDataset) -> nn.Module:
    """Take the statistics of batch norm: activations of random weights would grow with depth."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 1.0  # those of this one batch
    call_model(model.train(), Batch.from_data_list(dataset.graphs[:_SETTLING_GRAPHS]))
    return model.eval()
