"""Two-layer GCN for Cora, as in tutorial 7 of the UvA deep learning course.

    histograph cache --model examples/uvadlc_node_gcn.py:GNNModel \
        --checkpoint NodeLevelGNN.ckpt --data planetoid:Cora -o cora.cache

The checkpoint (phlippe/saved_models, tutorial7) was trained on the features as they come; it
classifies 0.824 of the test nodes correctly.
"""

from torch import nn
from torch_geometric.nn import GCNConv, MessagePassing


class GNNModel(nn.Module):
    """Message-passing layers with ReLU and dropout between them, none after the last."""

    def __init__(self, c_in=1433, c_hidden=16, c_out=7, num_layers=2, dp_rate=0.1):
        super().__init__()
        layers = []
        for _ in range(num_layers - 1):
            layers += [GCNConv(c_in, c_hidden), nn.ReLU(inplace=True), nn.Dropout(dp_rate)]
            c_in = c_hidden
        layers += [GCNConv(c_in, c_out)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x, edge_index):
        for layer in self.layers:
            x = layer(x, edge_index) if isinstance(layer, MessagePassing) else layer(x)
        return x  # [num_nodes, c_out]
