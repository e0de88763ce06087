"""PointNet++: points are left out level by level, and interpolated back."""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.nn import (
    PointNetConv,
    SAGEConv,
    global_mean_pool,
)
from torch_geometric.utils import scatter

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import entry, keep
from .space import nearest

LEVELS = "levels of points"


class Abstraction(nn.Module):
    """PointNet++: every second point gathers from its nearest."""

    def __init__(self, width):
        super().__init__()
        self.nn = mlp(width + 3, WIDTH, WIDTH)

    def forward(self, x, pos, batch):
        kept = torch.arange(0, len(pos), 2)
        source, target, _ = nearest(pos, pos[kept], batch, batch[kept], 2)
        given = torch.cat([x[source], pos[source] - pos[kept][target]], dim=1)
        out = scatter(self.nn(given), target, 0, len(kept), reduce="max")
        return out, pos[kept], batch[kept]


def interpolated(x, pos, pos_skip, batch, batch_skip, k=2):
    """PyG's knn_interpolate, without torch-cluster."""
    source, target, apart = nearest(pos, pos_skip, batch, batch_skip, k)
    weights = 1.0 / apart.clamp(min=1e-8)[:, None] ** 2
    summed = scatter(x[source] * weights, target, 0, len(pos_skip), reduce="sum")
    return summed / scatter(weights, target, 0, len(pos_skip), reduce="sum")


class Propagation(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.nn = mlp(width, WIDTH, WIDTH)

    def forward(self, x, pos, batch, x_skip, pos_skip, batch_skip):
        x = interpolated(x, pos, pos_skip, batch, batch_skip)
        return self.nn(torch.cat([x, x_skip], dim=1))


# The layers between work on fewer points than there are nodes: not a history of the nodes.
@entry("PointNet++: two levels down and up", LEVELS, refused="--layers")
class PointNetTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.sa1, self.sa2 = Abstraction(FEATURES), Abstraction(WIDTH)
        self.fp2, self.fp1 = Propagation(2 * WIDTH), Propagation(WIDTH + FEATURES)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, pos, batch):
        level0 = x, pos, batch
        level1 = self.sa1(*level0)
        level2 = self.sa2(*level1)
        level1 = self.fp2(*level2, *level1), *level1[1:]
        return self.head(self.fp1(*level1, *level0))


# One level down and up: what goes down are the features, what comes up the state of each point. The
# coarse points between have no rows of the nodes.
@entry("PointNet++: one level down and up", LEVELS, either=True)
class PointNetOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.sa1, self.fp1 = Abstraction(FEATURES), Propagation(WIDTH + FEATURES)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, pos, batch):
        level0 = keep(x), pos, batch
        return self.head(keep(self.fp1(*self.sa1(*level0), *level0)))


class WithConvolutions(nn.Module):
    """Convolutions on all points before the level and after it."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = SAGEConv(FEATURES, WIDTH), SAGEConv(WIDTH, WIDTH)
        self.sa, self.fp = Abstraction(WIDTH), Propagation(2 * WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, pos, edge_index, batch):
        h = keep(self.conv1(keep(x), edge_index).relu())
        level = self.sa(h, pos, batch)
        h = keep(self.fp(*level, h, pos, batch))
        return self.head(global_mean_pool(keep(self.conv2(h, edge_index).relu()), batch))


entry("PointNet++: a level between convolutions", LEVELS, either=True)(WithConvolutions)


# The coarse level ends in an interpolation, in forward itself, and what it gives is pooled.
@entry("PointNet++: interpolation in forward", LEVELS, either=True)
class InterpolationInForward(WithConvolutions):
    def forward(self, x, pos, edge_index, batch):
        h = keep(self.conv1(keep(x), edge_index).relu())
        coarse, *where = self.sa(h, pos, batch)
        fine = interpolated(coarse, where[0], pos, where[1], batch)
        return self.head(global_mean_pool(keep(h + fine), batch))


class SaModule(nn.Module):
    """PyG's example: a PointNetConv from all points to some of them."""

    def __init__(self, width, k):
        super().__init__()
        self.conv = PointNetConv(mlp(width + 3, WIDTH, WIDTH), add_self_loops=False)
        self.k = k

    def forward(self, x, pos, batch):
        kept = torch.arange(0, len(pos), 2)
        source, target, _ = nearest(pos, pos[kept], batch, batch[kept], self.k)
        x = self.conv((x, x[kept]), (pos, pos[kept]), torch.stack([source, target]))
        return x, pos[kept], batch[kept]


# As PyG's segmentation example: the levels below work on fewer points.
@entry("PointNet++ of PointNetConv: two levels", LEVELS, refused="--layers")
class PygPointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.sa1_module, self.sa2_module = SaModule(FEATURES, 3), SaModule(WIDTH, 2)
        self.fp2_module, self.fp1_module = Propagation(2 * WIDTH), Propagation(WIDTH + FEATURES)
        self.head = mlp(WIDTH, WIDTH, 3)

    def forward(self, x, pos, batch):
        sa0_out = x, pos, batch
        sa1_out = self.sa1_module(*sa0_out)
        sa2_out = self.sa2_module(*sa1_out)
        fp2_out = self.fp2_module(*sa2_out, *sa1_out), *sa1_out[1:]
        return self.head(self.fp1_module(*fp2_out, *sa0_out))


@entry("PointNet++ of PointNetConv: one level", LEVELS, either=True)
class PygPointNetOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.sa1_module, self.fp1_module = SaModule(FEATURES, 3), Propagation(WIDTH + FEATURES)
        self.head = mlp(WIDTH, WIDTH, 3)

    def forward(self, x, pos, batch):
        sa0_out = keep(x), pos, batch
        return self.head(keep(self.fp1_module(*self.sa1_module(*sa0_out), *sa0_out)))


@entry("PointNet++ of PointNetConv: a level between convolutions", LEVELS, either=True)
class PygLevelBetween(WithConvolutions):
    def __init__(self):
        super().__init__()
        self.sa = SaModule(WIDTH, 3)


@entry("PointNet++ of PointNetConv: interpolation in forward", LEVELS, either=True)
class PygInterpolation(InterpolationInForward):
    def __init__(self):
        super().__init__()
        self.sa = SaModule(WIDTH, 3)
