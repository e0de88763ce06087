"""Ways of being run: compiled, checkpointed, scripted, without hooks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (
    GCNConv,
    GraphConv,
    SAGEConv,
    global_add_pool,
    global_mean_pool,
)

from .graphs import FEATURES, WIDTH
from .registry import add, entry, keep

COMPILED, CHECKPOINTS = "compiled and scripted", "checkpointed"
CALLS = "how layers are called"


class Plain(nn.Module):
    """Three layers with a norm and a ReLU, a mean, a linear map."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))

    def layer(self, number, x, edge_index):
        return F.relu(self.norms[number](self.convs[number](x, edge_index)))

    def encode(self, x, edge_index):
        x = keep(self.embed(x))
        for number in range(3):
            x = keep(self.layer(number, x, edge_index))
        return x

    def forward(self, x, edge_index, batch):
        return self.head(global_mean_pool(self.encode(x, edge_index), batch))


add("torch.compile of the model", COMPILED, lambda: torch.compile(Plain(), backend="eager"))


def compiled_in_parts():
    model = Plain()
    model.convs[1] = torch.compile(model.convs[1], backend="eager")
    return model


def compiled_in_place():
    model = Plain()
    model.compile(backend="eager")
    return model


add(
    "torch.compile of a layer",
    COMPILED,
    compiled_in_parts,
    refused="compiled.*before torch.compile",
)
add("model.compile()", COMPILED, compiled_in_place, refused="compiled.*before torch.compile")


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = torch.jit.script(nn.Linear(FEATURES, WIDTH))
        self.conv = GCNConv(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        return global_mean_pool(self.conv(self.lin(x), edge_index), batch)


add("a scripted part", COMPILED, Scripted, refused="TorchScript.*Python model")


class Checkpointed(Plain):
    """Each layer is run again for its gradients."""

    reentrant = False

    def layer(self, number, x, edge_index):
        inner = super().layer
        return checkpoint(inner, number, x, edge_index, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class WholeCheckpoint(Plain):
    """One checkpoint around all layers."""

    def forward(self, x, edge_index, batch):
        x = checkpoint(self.encode, x, edge_index, use_reentrant=True)
        return self.head(global_mean_pool(x, batch))


add("checkpoints, not reentrant", CHECKPOINTS, Checkpointed)
add("checkpoints, reentrant", CHECKPOINTS, Reentrant)
add("one reentrant checkpoint around all layers", CHECKPOINTS, WholeCheckpoint)


@entry("conv.forward(...), no hooks", CALLS)
class WithoutHooks(Plain):
    def layer(self, number, x, edge_index):
        return F.relu(self.norms[number](self.convs[number].forward(x, edge_index)))


@entry("one of the layers by conv.forward(...)", CALLS)
class OneWithoutHooks(Plain):
    def layer(self, number, x, edge_index):
        conv = self.convs[number]
        out = conv.forward(x, edge_index) if number == 1 else conv(x, edge_index)
        return F.relu(self.norms[number](out))


@entry("an encoder by encoder.forward(...)", CALLS)
class EncoderForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Plain()

    def forward(self, data):
        return self.encoder.forward(data.x, data.edge_index, data.batch)


@entry("edges first: conv(edge_index, x)", CALLS)
class EdgesFirst(nn.Module):
    class Layer(nn.Module):
        def __init__(self, width_in):
            super().__init__()
            self.conv = GraphConv(width_in, WIDTH)

        def forward(self, edge_index, x):
            return self.conv(x, edge_index).relu()

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(FEATURES), self.Layer(WIDTH)])

    def forward(self, edge_index, x, batch):
        keep(x)
        for layer in self.layers:
            x = keep(layer(edge_index, x))
        return global_add_pool(x, batch)


@entry("(source, target) pairs", CALLS)
class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv((FEATURES, FEATURES), WIDTH), SAGEConv(WIDTH, WIDTH)])

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(conv((x, x), edge_index).relu_())
        return global_add_pool(x, batch)


@entry("weight norm on the layers", CALLS)
class WeightNormed(Plain):
    def __init__(self):
        super().__init__()
        for conv in self.convs:
            weight_norm(conv.lin_l)


@entry("the model writes into its batch", CALLS)
class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])

    def forward(self, data):
        data.x *= 2
        keep(data.x)
        for conv in self.convs:
            data.x = keep(F.relu_(conv(data.x, data.edge_index)))
        return global_mean_pool(data.x, data.batch)


@entry("every third layer is left out", CALLS)
class Skips(Plain):
    """Stochastic depth whose choice is fixed in eval."""

    def encode(self, x, edge_index):
        x = keep(self.embed(x))
        for number in range(3):
            if number != 1 or self.training:
                x = keep(x + self.layer(number, x, edge_index))
        return x


@entry("an ensemble of encoders, averaged", CALLS)
class Ensemble(nn.Module):
    """Each member reads out for itself: every branch."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(Plain() for _ in range(2))

    def forward(self, x, edge_index, batch):
        return torch.stack([member(x, edge_index, batch) for member in self.members]).mean(0)


@entry("PyG layers inside PyG layers", CALLS)
class Nested(nn.Module):
    """A module of layers inside a layer: the outermost is the layer."""

    class Outer(GraphConv):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.inner = GCNConv(WIDTH, WIDTH)

        def forward(self, x, edge_index):
            return super().forward(self.inner(x, edge_index).relu(), edge_index)

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(self.Outer() for _ in range(2))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for layer in self.layers:
            x = keep(layer(x, edge_index).relu())
        return global_mean_pool(x, batch)
