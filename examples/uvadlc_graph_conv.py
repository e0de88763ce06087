"""GraphConv classifier for MUTAG, as in tutorial 7 of the UvA deep learning course.

    histograph cache --model examples/uvadlc_graph_conv.py:GraphGNNModel \
        --checkpoint GraphLevelGraphConv.ckpt --data tu:MUTAG -o mutag.cache

The checkpoint (phlippe/saved_models, tutorial7) classifies 0.9255 of all 188 graphs correctly.
"""

from torch import nn
from torch_geometric.nn import GraphConv, MessagePassing, global_mean_pool


class GNNModel(nn.Module):
    """Message-passing layers with ReLU and dropout between them, none after the last."""

    def __init__(self, c_in, c_hidden, c_out, num_layers, dp_rate):
        super().__init__()
        layers = []
        for _ in range(num_layers - 1):
            layers += [GraphConv(c_in, c_hidden), nn.ReLU(inplace=True), nn.Dropout(dp_rate)]
            c_in = c_hidden
        layers += [GraphConv(c_in, c_out)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = layer(x, edge_index) if isinstance(layer, MessagePassing) else layer(x)
        return x  # [num_nodes, c_out]


class GraphGNNModel(nn.Module):
    """The layers, the mean over the nodes of each graph, and a linear classifier."""

    def __init__(
        self, c_in=7, c_hidden=256, c_out=1, num_layers=3, dp_rate=0.0, dp_rate_linear=0.5
    ):
        super().__init__()
        self.GNN = GNNModel(c_in, c_hidden, c_hidden, num_layers, dp_rate)
        self.head = nn.Sequential(nn.Dropout(dp_rate_linear), nn.Linear(c_hidden, c_out))

    def forward(self, x, edge_index, batch_idx):
        x = self.GNN(x, edge_index)  # [num_nodes, c_hidden]
        x = global_mean_pool(x, batch_idx)  # [num_graphs, c_hidden]
        return self.head(x)  # [num_graphs, c_out]
