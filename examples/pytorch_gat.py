"""Two-layer GAT for Cora with a hand-written layer, ported from gordicaleksa/pytorch-GAT.

    histograph cache --model examples/pytorch_gat.py:GAT \
        --checkpoint gat_cora_000000.pth --data planetoid:Cora -o cora-gat.cache

The original divides each node's features by their sum and adds self loops when it loads the data;
here both happen in `forward`. The checkpoint classifies 0.822 of the test nodes correctly.
"""

import torch
from torch import nn
from torch_geometric.utils import add_remaining_self_loops


class GATLayer(nn.Module):
    """Additive attention over the neighbours of each node, several heads at a time."""

    def __init__(self, in_features, out_features, num_heads, concat, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.out_features = out_features
        self.concat = concat
        self.linear_proj = nn.Linear(in_features, num_heads * out_features, bias=False)
        self.scoring_fn_target = nn.Parameter(torch.empty(1, num_heads, out_features))
        self.scoring_fn_source = nn.Parameter(torch.empty(1, num_heads, out_features))
        self.bias = nn.Parameter(torch.zeros(num_heads * out_features if concat else out_features))
        self.dropout = nn.Dropout(dropout)
        self.leaky_relu = nn.LeakyReLU(0.2)
        for weight in (self.linear_proj.weight, self.scoring_fn_target, self.scoring_fn_source):
            nn.init.xavier_uniform_(weight)

    def forward(self, x, edge_index):
        source, target = edge_index  # [num_edges] each
        num_nodes = x.shape[0]
        h = self.linear_proj(self.dropout(x))
        h = self.dropout(h.view(num_nodes, self.num_heads, self.out_features))

        score_source = (h * self.scoring_fn_source).sum(dim=-1)  # [num_nodes, num_heads]
        score_target = (h * self.scoring_fn_target).sum(dim=-1)  # [num_nodes, num_heads]
        score = self.leaky_relu(score_source[source] + score_target[target])
        weight = (score - score.max()).exp()  # [num_edges, num_heads]
        total = weight.new_zeros(num_nodes, self.num_heads).index_add(0, target, weight)
        attention = self.dropout(weight / (total[target] + 1e-16))  # [num_edges, num_heads]

        message = h[source] * attention.unsqueeze(-1)  # [num_edges, num_heads, out_features]
        out = torch.zeros_like(h).index_add(0, target, message)  # [num_nodes, num_heads, ...]
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        return out + self.bias  # [num_nodes, num_heads * out_features] or [num_nodes, out_features]


class GAT(nn.Module):
    """GAT layers with ELU between them; the last one averages its heads."""

    def __init__(self, num_features=(1433, 8, 7), num_heads=(8, 1), dropout=0.6):
        super().__init__()
        layers = []
        width = num_features[0]
        for out_features, heads in zip(num_features[1:], num_heads, strict=True):
            concat = len(layers) < len(num_heads) - 1
            layers.append(GATLayer(width, out_features, heads, concat, dropout))
            width = heads * out_features
        self.gat_net = nn.ModuleList(layers)
        self.activation = nn.ELU()

    def forward(self, x, edge_index):
        x = x / x.sum(dim=-1, keepdim=True).clamp(min=1)  # [num_nodes, in_features]
        edge_index, _ = add_remaining_self_loops(edge_index, num_nodes=x.shape[0])
        for layer in self.gat_net[:-1]:
            x = self.activation(layer(x, edge_index))
        return self.gat_net[-1](x, edge_index)  # [num_nodes, num_classes]
