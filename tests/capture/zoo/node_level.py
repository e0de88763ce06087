"""Models with a row of outputs per node, and encoders for links between them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    APPNP,
    GATConv,
    GCN2Conv,
    GCNConv,
    GPSConv,
    JumpingKnowledge,
    MessagePassing,
    MixHopConv,
    RGCNConv,
    SAGEConv,
    SGConv,
    TransformerConv,
)
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.nn.models import GAE, VGAE

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import add, entry, keep

NODES, LINKS = "node level", "link prediction"


@entry("GCN of two layers", NODES, data="one graph")
class TwoLayerGcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, 3)

    def forward(self, data):
        x = F.relu(self.conv1(keep(data.x), data.edge_index))
        x = keep(F.dropout(x, training=self.training))
        return F.log_softmax(keep(self.conv2(x, data.edge_index)), dim=1)


@entry("GAT with heads, dropout first", NODES, data="one graph")
class HeadsGat(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GATConv(FEATURES, 4, heads=2, dropout=0.6)
        self.conv2 = GATConv(WIDTH, 3, heads=2, concat=False, dropout=0.6)

    def forward(self, x, edge_index):
        x = keep(F.dropout(x, p=0.6, training=self.training))
        x = F.elu(self.conv1(x, edge_index))
        x = keep(F.dropout(x, p=0.6, training=self.training))
        return keep(self.conv2(x, edge_index))


# The steps inside are one layer here; `--layers steps` takes them apart.
@entry("APPNP", NODES)
class Appnp(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3)
        self.prop1 = APPNP(K=4, alpha=0.1)

    def forward(self, x, edge_index):
        x = self.lin2(F.relu(self.lin1(x)))
        return F.log_softmax(keep(self.prop1(keep(x), edge_index)), dim=1)


@entry("GCNII", NODES)
class Gcnii(nn.Module):
    """Every layer is given the first state beside its own."""

    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3)])
        self.convs = nn.ModuleList(
            GCN2Conv(WIDTH, alpha=0.1, theta=0.5, layer=layer + 1) for layer in range(4)
        )

    def forward(self, x, edge_index):
        x = x_0 = keep(self.lins[0](x).relu())
        for conv in self.convs:
            x = F.dropout(x, 0.6, training=self.training)
            x = keep(conv(x, x_0, edge_index).relu())
        return self.lins[1](x).log_softmax(dim=-1)


class InitialFirst(MessagePassing):
    """The first state stands before the layer's own among the arguments."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_0, x, edge_index):
        return self.lin(0.1 * x_0 + 0.9 * self.propagate(edge_index, x=x))

    def message(self, x_j):
        return x_j


@entry("the first state before the current one", NODES)
class InitialFirstNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3)
        self.convs = nn.ModuleList(InitialFirst() for _ in range(3))

    def forward(self, x, edge_index):
        x = x_0 = keep(self.start(x).relu())
        for conv in self.convs:
            x = keep(conv(x_0, x, edge_index).relu())
        return self.out(x)


@entry("JKNet: a maximum over layers, then a linear map", NODES)
class JkNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.jk, self.lin = JumpingKnowledge("max"), nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index):
        xs, x = [], keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
            xs.append(x)
        return self.lin(keep(self.jk(xs)))


@entry("SGC", NODES)
class Sgc(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = SGConv(FEATURES, 3, K=2)

    def forward(self, x, edge_index):
        return F.log_softmax(keep(self.conv1(keep(x), edge_index)), dim=1)


class Propagation(MessagePassing):
    """DAGNN: steps inside of one module, stacked, and gated by a score for each."""

    def __init__(self, steps):
        super().__init__(aggr="add")
        self.steps, self.proj = steps, nn.Linear(3, 1)

    def forward(self, x, edge_index):
        edge_index, norm = gcn_norm(edge_index, None, len(x), dtype=x.dtype)
        preds = [x]
        for _ in range(self.steps):
            x = self.propagate(edge_index, x=x, norm=norm)
            preds.append(x)
        pps = torch.stack(preds, dim=1)  # [num_nodes, steps + 1, classes]
        score = torch.sigmoid(self.proj(pps)).transpose(1, 2)
        return (score @ pps).squeeze(1)

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


@entry("DAGNN", NODES)
class Dagnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2, self.prop = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3), None
        self.prop = Propagation(4)

    def forward(self, x, edge_index):
        x = self.lin2(F.relu(self.lin1(x)))
        return F.log_softmax(keep(self.prop(keep(x), edge_index)), dim=1)


@entry("MixHop", NODES)
class MixHop(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = MixHopConv(FEATURES, 4, powers=[0, 1, 2])
        self.conv2 = MixHopConv(12, 4, powers=[0, 1, 2])
        self.norm, self.lin = nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x, edge_index):
        x = keep(F.dropout(self.norm(self.conv1(keep(x), edge_index)), 0.9, self.training))
        return self.lin(keep(self.conv2(x, edge_index)))


# A step is a convolution without weights; the weighted sum of all steps is the output.
@entry("GPR-GNN", NODES)
class Gprgnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = mlp(FEATURES, WIDTH, 3)
        self.prop = SGStep()
        self.gamma = nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4]))

    def forward(self, x, edge_index):
        x = keep(self.lin(x))
        hidden = self.gamma[0] * x
        for step in range(3):
            x = keep(self.prop(x, edge_index))
            hidden = hidden + self.gamma[step + 1] * x
        return keep(hidden)


class SGStep(MessagePassing):
    def __init__(self):
        super().__init__(aggr="mean")

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j


# A node's own features and its neighbours' stay apart; the rounds are concatenated at the end.
@entry("H2GCN", NODES, either=True)
class H2gcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH, bias=False)
        self.one, self.two = SGStep(), SGStep()
        self.classify = nn.Linear(7 * WIDTH, 3, bias=False)

    def forward(self, data):
        source, target = data.edge_index
        pairs = (target[:, None] == source[None]).nonzero().T
        far = torch.stack([source[pairs[0]], target[pairs[1]]])  # [2, num_two_hops]
        rounds = [keep(F.relu(self.embed(data.x)))]
        for _ in range(2):
            x = rounds[-1]
            both = [self.one(x, data.edge_index), self.two(x, far)]
            rounds.append(keep(torch.cat(both, dim=1)))
        return self.classify(torch.cat(rounds, dim=1))


@entry("UniMP: TransformerConv with gates and LayerNorm", NODES)
class UniMp(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(
            [TransformerConv(FEATURES, 4, heads=2, beta=True), TransformerConv(WIDTH, 3, beta=True)]
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, edge_index):
        x = keep(self.norm(self.convs[0](keep(x), edge_index)).relu())
        return keep(self.convs[1](x, edge_index))


@entry("RGCN: relations of edges", NODES)
class Rgcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = RGCNConv(FEATURES, WIDTH, 2, num_bases=2)
        self.conv2 = RGCNConv(WIDTH, 3, 2, num_bases=2)

    def forward(self, x, edge_index, edge_attr):
        relation = (edge_attr[:, 0] > 0).long()  # [num_edges]
        x = keep(F.relu(self.conv1(keep(x), edge_index, relation)))
        return F.log_softmax(keep(self.conv2(x, edge_index, relation)), dim=1)


@entry("GPSConv, node level", NODES)
class NodeGps(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(
            GPSConv(WIDTH, SAGEConv(WIDTH, WIDTH), heads=2) for _ in range(2)
        )

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for layer in self.layers:
            x = keep(layer(x, edge_index, batch))
        return self.out(x)


class LinkEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, 4)

    def forward(self, x, edge_index):
        return keep(self.conv2(keep(self.conv1(keep(x), edge_index).relu()), edge_index))


class DataEncoder(LinkEncoder):
    """GAE hands on whatever it is given: a batch, if its encoder takes one."""

    def forward(self, data):
        return super().forward(data.x, data.edge_index)


add("GAE: an encoder of nodes", LINKS, lambda: GAE(DataEncoder()))


@entry("scores of the edges", LINKS)
class LinkScores(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = LinkEncoder()

    def forward(self, x, edge_index):
        z = self.encoder(x, edge_index)
        return (z[edge_index[0]] * z[edge_index[1]]).sum(dim=-1)


# Mean and deviation are two branches of one state; in eval the mean is what comes out.
class VariationalEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GCNConv(FEATURES, WIDTH)
        self.conv_mu, self.conv_logstd = GCNConv(WIDTH, 4), GCNConv(WIDTH, 4)

    def forward(self, x, edge_index):
        x = keep(self.conv1(keep(x), edge_index).relu())
        return keep(self.conv_mu(x, edge_index)), keep(self.conv_logstd(x, edge_index), "both")


class Variational(VGAE):
    def forward(self, x, edge_index):
        return self.encode(x, edge_index)


add("VGAE", LINKS, lambda: Variational(VariationalEncoder()), readings=("mean", "both"))
