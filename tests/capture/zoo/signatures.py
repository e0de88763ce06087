"""What models are given and what they return: integers, matrices, dictionaries, several tasks."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv, GINConv, SAGEConv, global_add_pool, global_mean_pool

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .molecules import CategoryEncoder
from .registry import add, entry, keep
from .running import Plain

OUTPUTS, INPUTS = "outputs", "inputs"


@entry("a dictionary", OUTPUTS)
class Dictionary(Plain):
    def forward(self, x, edge_index, batch):
        h = self.encode(x, edge_index)
        pooled = global_mean_pool(h, batch)
        return {"node_embeddings": h, "logits": self.head(pooled), "penalty": h.pow(2).mean()}


@entry("a tuple, nodes first", OUTPUTS)
class NodesFirst(Plain):
    def forward(self, x, edge_index, batch):
        h = self.encode(x, edge_index)
        return h, self.head(global_mean_pool(h, batch))


@dataclasses.dataclass
class Prediction:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


@entry("a dataclass", OUTPUTS)
class DataclassOutput(Plain):
    def forward(self, x, edge_index, batch, y=None):
        logits = super().forward(x, edge_index, batch)
        return Prediction(logits, None if y is None else F.mse_loss(logits, y))


@entry("several tasks", OUTPUTS)
class Tasks(Plain):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 1), "b": mlp(WIDTH, 4, 3)})

    def forward(self, x, edge_index, batch):
        pooled = global_mean_pool(self.encode(x, edge_index), batch)
        return {name: head(pooled) for name, head in self.heads.items()}


# A graph head and a node head: both are readouts of the same state.
@entry("a head for graphs and one for nodes", OUTPUTS)
class GraphAndNodeHeads(Plain):
    def __init__(self):
        super().__init__()
        self.node_head = nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index, batch):
        h = self.encode(x, edge_index)
        return self.head(global_mean_pool(h, batch)), self.node_head(h)


@entry("integers that are embedded", INPUTS, data="integers")
class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = CategoryEncoder()
        self.convs = nn.ModuleList(GINConv(mlp(WIDTH, WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x, edge_index, batch):
        x = keep(self.encoder(x))
        for conv in self.convs:
            x = keep(conv(x, edge_index).relu())
        return global_add_pool(x, batch)


# The first layer is given integers and embeds them inside: there is no embedded input to take, or
# it is what that layer's own embedding returns.
@entry("integers that the first layer embeds", INPUTS, readings=("without", "inside"))
class EmbeddedInside(nn.Module):
    class First(GCNConv):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.embed = nn.Embedding(10, WIDTH)

        def forward(self, z, edge_index):
            return super().forward(keep(self.embed(z), "inside"), edge_index)

    def __init__(self):
        super().__init__()
        self.first, self.second = self.First(), GCNConv(WIDTH, WIDTH)

    def forward(self, z, edge_index, batch):
        x = keep(self.first(z, edge_index).relu())
        return global_add_pool(keep(self.second(x, edge_index).relu()), batch)


class SparseInput(nn.Module):
    """OGB's node examples: ``forward(x, adj_t)``."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(FEATURES, WIDTH), SAGEConv(WIDTH, 3)])

    def forward(self, x, adj_t):
        x = keep(F.relu(self.convs[0](keep(x), adj_t)))
        return keep(self.convs[1](x, adj_t))


add("adj_t of the data", INPUTS, SparseInput, data="adj_t")


@entry("features of the model's own", INPUTS)
class OwnFeatures(Plain):
    """The data's features are not used: a constant is embedded, as for social networks."""

    def forward(self, edge_index, batch):
        x = torch.ones(len(batch), FEATURES)
        return self.head(global_mean_pool(self.encode(x, edge_index), batch))


@entry("degrees as features", INPUTS)
class Degrees(Plain):
    def forward(self, x, edge_index, batch):
        degree = torch.zeros(len(x)).index_add_(0, edge_index[1], torch.ones(edge_index.shape[1]))
        x = degree.unsqueeze(-1).expand(-1, FEATURES)
        return self.head(global_mean_pool(self.encode(x, edge_index), batch))


@entry("GraphSAGE: pairs of the nodes and the targets among them", INPUTS)
class Targets(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(FEATURES, WIDTH), SAGEConv(WIDTH, WIDTH)])

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv((x, x[: len(batch)]), edge_index)))
        return global_mean_pool(x, batch)
