"""Code that capture has to see through: hidden layers, loops of any length, own functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint_sequential
from torch_geometric.nn import (
    GCNConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    global_add_pool,
    global_mean_pool,
)

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import add, entry, keep
from .running import Plain
from .states import sum_to_nodes

HIDDEN, LOOPS, STEPS = "hidden layers", "loops that depend on the data", "solvers and sequences"

#: The pass of a later batch is not the one that was planned.
DIFFERS = r"pass|--layers"


# Modules in a plain list are no parts of the model: no hooks, no weights in its state.
@entry("layers in a plain list", HIDDEN, either=True)
class PlainList(Plain):
    def __init__(self):
        super().__init__()
        convs = list(self.convs)
        del self.convs
        self.convs = convs


@entry("one layer in a plain list", HIDDEN, either=True)
class OneInPlainList(Plain):
    """Leaving it out of the history would be silent."""

    def __init__(self):
        super().__init__()
        self.extra = [GCNConv(WIDTH, WIDTH)]

    def encode(self, x, edge_index):
        x = super().encode(x, edge_index)
        return keep(F.relu(self.extra[0](x, edge_index)))


# The whole network as one MessagePassing: its steps are inside.
@entry("the model is a MessagePassing itself", HIDDEN, either=True)
class WholeModel(MessagePassing):
    def __init__(self):
        super().__init__(aggr="mean")
        self.lins = nn.ModuleList([nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for lin in self.lins:
            x = keep(F.relu(lin(self.propagate(edge_index, x=x))))
        return self.head(global_mean_pool(x, batch))

    def message(self, x_j):
        return x_j


# `propagate` of another module is called from outside: its hooks do not see that.
@entry("conv.propagate(...) from outside", HIDDEN, either=True)
class FromOutside(Plain):
    class Mean(MessagePassing):
        def __init__(self):
            super().__init__(aggr="mean")

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return x_j

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(self.Mean() for _ in range(3))
        self.lins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def layer(self, number, x, edge_index):
        return F.relu(self.lins[number](self.convs[number].propagate(edge_index, x=x)))


class AddNeighbours(torch.autograd.Function):
    """A kernel of one's own: nothing inside of it is a torch function of the model."""

    @staticmethod
    def forward(ctx, x, edge_index):
        ctx.save_for_backward(edge_index)
        return x.index_add(0, edge_index[1], x[edge_index[0]])

    @staticmethod
    def backward(ctx, gradient):
        (edge_index,) = ctx.saved_tensors
        return gradient.index_add(0, edge_index[0], gradient[edge_index[1]]), None


@entry("a kernel as autograd.Function in a module", HIDDEN, either=True)
class OwnKernel(Plain):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, edge_index):
            return self.lin(AddNeighbours.apply(x, edge_index) / 4)

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(self.Layer() for _ in range(3))


@entry("functional_call with other weights", HIDDEN)
class FastWeights(nn.Module):
    """Meta-learning: the network runs with weights that are not its own."""

    def __init__(self):
        super().__init__()
        self.net = Plain()

    def forward(self, x, edge_index, batch):
        weights = {name: 0.9 * weight for name, weight in self.net.named_parameters()}
        return functional_call(self.net, weights, (x, edge_index, batch))


add("nn.DataParallel around the model", HIDDEN, lambda: nn.DataParallel(Plain()))


@entry("a wrapper that keeps the encoder from learning", HIDDEN)
class FrozenEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.probe = Plain(), nn.Linear(2, 2)

    def forward(self, data):
        with torch.no_grad():
            h = self.encoder(data.x, data.edge_index, data.batch)
        return self.probe(h.detach())


@entry("checkpoint_sequential", HIDDEN)
class SequentialCheckpoints(nn.Module):
    class Layer(nn.Module):
        def __init__(self, width_in):
            super().__init__()
            self.conv = GraphConv(width_in, WIDTH)

        def forward(self, state):
            x, edge_index = state
            return keep(self.conv(x, edge_index).relu()), edge_index

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(self.Layer(FEATURES), self.Layer(WIDTH), self.Layer(WIDTH))

    def forward(self, x, edge_index, batch):
        keep(x)
        x, _ = checkpoint_sequential(self.layers, 2, (x, edge_index), use_reentrant=False)
        return global_mean_pool(x, batch)


class UntilSettled(nn.Module):
    """A deep equilibrium: one layer until nothing changes, or for a number from the data."""

    def __init__(self, steps):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.conv, self.steps = SAGEConv(WIDTH, WIDTH), steps

    def forward(self, x, edge_index, batch):
        h = self.embed(x)
        for _ in range(self.steps(batch)):
            h = torch.tanh(self.conv(h, edge_index))
        return self.head(global_mean_pool(h, batch))


# The batch that is planned has 4 graphs, the later one 3: with the plan of the first, the history
# of the second would lack layers, or end before the end.
_LOOP = {"refused": DIFFERS}
add("fewer steps than in the probe", LOOPS, lambda: UntilSettled(lambda b: int(b[-1]) + 1), **_LOOP)
add("more steps than in the probe", LOOPS, lambda: UntilSettled(lambda b: 6 - int(b[-1])), **_LOOP)


@entry("another branch than in the probe", LOOPS, refused=DIFFERS)
class AnotherBranch(Plain):
    """Which layer runs is decided by the data."""

    def __init__(self):
        super().__init__()
        self.small = GCNConv(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        h = self.encode(x, edge_index)
        if int(batch[-1]) < 3:
            h = F.relu(self.small(h, edge_index))
        return self.head(global_mean_pool(h, batch))


@entry("Euler steps of a diffusion", STEPS)
class Euler(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.field = GCNConv(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for _ in range(3):
            x = keep(x + 0.5 * (self.field(x, edge_index) - x))
        return self.head(global_mean_pool(x, batch))


# The points in the middle are consumed too: by the letter each is a layer.
@entry("midpoint steps of a diffusion", STEPS)
class Midpoint(Euler):
    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for _ in range(2):
            middle = keep(x + 0.25 * torch.tanh(self.field(x, edge_index)))
            x = keep(x + 0.5 * torch.tanh(self.field(middle, edge_index)))
        return self.head(global_mean_pool(x, batch))


# A step consumes new features beside the state: what the layer is given holds both.
@entry("T-GCN: new features in every step", STEPS)
class Temporal(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = GCNConv(WIDTH + 2, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index):
        h = torch.zeros(len(x), WIDTH)
        for step in range(3):
            given = keep(torch.cat([x[:, 2 * step : 2 * step + 2], h], dim=1))
            h = torch.tanh(self.conv(given, edge_index))
        return self.head(keep(h))


# Steps in time side by side: every one is a branch, then a recurrent network per node over them.
@entry("a convolution per time step, then a GRU", STEPS, either=True)
class StepsThenGru(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gru = GCNConv(2, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, batch):
        states = []
        for step in range(3):
            given = keep(x[:, 2 * step : 2 * step + 2])
            states.append(keep(self.conv(given, edge_index).relu()))
        out, _ = self.gru(torch.stack(states, dim=1))  # [num_nodes, 3, width]
        return self.head(global_mean_pool(keep(out[:, -1]), batch))


# There are no edges among the data: messages pass along those that the states decide.
@entry("neighbours found anew in every layer", STEPS, either=True)
class NearestNeighbours(nn.Module):
    """DGCNN: the graph is made from the states."""

    class Layer(nn.Module):
        def __init__(self, width_in):
            super().__init__()
            self.mlp = mlp(2 * width_in, WIDTH, WIDTH)

        def forward(self, x, batch):
            apart = torch.cdist(x, x) + 1e9 * (batch[:, None] != batch[None])
            near = apart.topk(3, largest=False).indices  # [num_nodes, 3]
            target = torch.arange(len(x)).repeat_interleave(3)
            source = near.flatten()
            messages = self.mlp(torch.cat([x[target], x[source] - x[target]], dim=1))
            return sum_to_nodes(messages, target, len(x))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(FEATURES), self.Layer(WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, batch):
        keep(x)
        for layer in self.layers:
            x = keep(F.relu(layer(x, batch)))
        return self.head(global_add_pool(x, batch))
