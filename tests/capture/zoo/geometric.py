"""Models of molecules in space: ViSNet, TorchMD-Net, DimeNet-style messages, point clouds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import MessagePassing, PointNetConv, global_add_pool, global_max_pool
from torch_geometric.nn.models import ViSNet
from torch_geometric.utils import scatter

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .lasts import AllPairs
from .registry import add, entry, keep
from .states import sum_to_nodes

FAMILY, POINTS = "atoms in space", "point clouds"


class AllDistances(nn.Module):
    """ViSNet's edges within a radius, without torch-cluster."""

    def forward(self, pos, batch):
        row, col = (batch[:, None] == batch[None]).nonzero().T
        vectors = pos[row] - pos[col]  # [num_edges, 3]
        return torch.stack([row, col]), vectors.norm(dim=-1), vectors


def make_visnet():
    model = ViSNet(num_heads=2, num_layers=2, hidden_channels=WIDTH, num_rbf=4, max_z=10)
    model.representation_model.distance = AllDistances()
    return model


def visnet_by_hand(model, data):
    net = model.representation_model
    x = net.embedding(data.z)
    history = [x]
    edge_index, weight, vectors = net.distance(data.pos, data.batch)
    attr = net.distance_expansion(weight)
    mask = edge_index[0] != edge_index[1]
    vectors[mask] = vectors[mask] / torch.norm(vectors[mask], dim=1).unsqueeze(1)
    vectors = net.sphere(vectors)
    x = net.neighbor_embedding(data.z, x, edge_index, weight, attr)
    vec = torch.zeros(len(x), 3, WIDTH)
    attr = net.edge_embedding(edge_index, attr, x)
    for layer in net.vis_mp_layers:
        history.append(x)
        dx, dvec, dattr = layer(x, vec, edge_index, weight, attr, vectors)
        x, vec = x + dx, vec + dvec
        attr = attr if dattr is None else attr + dattr
    x, vec = net.out_norm(x), net.vec_out_norm(vec)
    return [*history, x, model.output_model.pre_reduce(x, vec) * model.std]


# The atoms' energies come of scalars and of vectors. The scalars are the state (the vectors only
# gate them); a refusal that names both is as good.
add("ViSNet", FAMILY, make_visnet, by_hand=visnet_by_hand, either=True)


class EquivariantAttention(MessagePassing):
    """TorchMD-Net: ``layer(x, vec, edge_index, r_ij, d_ij) -> dx, dvec``."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.layernorm = nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.vec_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, vec, edge_index, r_ij, d_ij):
        x = self.layernorm(x)
        dot = (self.vec_proj(vec) * vec).sum(dim=1)  # [num_nodes, width]
        x, vec = self.propagate(
            edge_index,
            q=self.q_proj(x),
            k=self.k_proj(x),
            v=self.v_proj(x),
            vec=vec,
            r_ij=r_ij,
            d_ij=d_ij,
        )
        o1, o2 = self.o_proj(x).chunk(2, dim=1)
        return dot * o1 + o2, vec

    def message(self, q_i, k_j, v_j, vec_j, r_ij, d_ij):
        attention = F.silu((q_i * k_j).sum(-1, keepdim=True)) / (1 + r_ij.unsqueeze(-1))
        scalar, gate = v_j.chunk(2, dim=1)
        return scalar * attention, vec_j * gate.unsqueeze(1) + d_ij.unsqueeze(-1)

    def aggregate(self, features, index, ptr=None, dim_size=None):
        return tuple(scatter(part, index, dim=0, dim_size=dim_size) for part in features)

    def update(self, inputs):
        return inputs


class TorchMdNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.distance = AllPairs()
        self.attention_layers = nn.ModuleList(EquivariantAttention() for _ in range(3))
        self.out_norm = nn.LayerNorm(WIDTH)

    def represent(self, z, pos, batch):
        edge_index, r_ij = self.distance(pos, batch)
        d_ij = (pos[edge_index[0]] - pos[edge_index[1]]) / r_ij.unsqueeze(1)
        x = self.embedding(z)
        vec = torch.zeros(len(x), 3, WIDTH)
        for attention in self.attention_layers:
            dx, dvec = attention(keep(x), vec, edge_index, r_ij, d_ij)
            x, vec = x + dx, vec + dvec
        return self.out_norm(keep(x)), vec


@entry("TorchMD-Net: scalars read out per atom", FAMILY)
class TorchMdScalar(TorchMdNet):
    def __init__(self):
        super().__init__()
        self.output_network = mlp(WIDTH, 4, 1)

    def forward(self, z, pos, batch):
        x, _ = self.represent(z, pos, batch)
        return scatter(keep(self.output_network(x)), batch, dim=0)


# As with ViSNet, the atoms' outputs are gated by vectors.
@entry("TorchMD-Net: a gated equivariant output", FAMILY, either=True)
class TorchMdGated(TorchMdNet):
    def __init__(self):
        super().__init__()
        self.vec1 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.update = mlp(2 * WIDTH, WIDTH, 1)

    def forward(self, z, pos, batch):
        x, vec = self.represent(z, pos, batch)
        norm = self.vec1(vec).norm(dim=1)  # [num_nodes, width]
        return scatter(keep(self.update(torch.cat([x, norm], dim=-1))), batch, dim=0)


class OutputBlock(nn.Module):
    """DimeNet: messages of the edges become a row per atom."""

    def __init__(self):
        super().__init__()
        self.lins = mlp(WIDTH, WIDTH, 2)

    def forward(self, messages, target, num_nodes):
        return self.lins(sum_to_nodes(messages, target, num_nodes))


# Messages pass between edges; atoms only add them up, and nothing goes back to them.
@entry("DimeNet-style: messages between edges", FAMILY, refused=r"--layers")
class DimeNetStyle(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.distance = AllPairs()
        self.edge_embedding = nn.Linear(2 * WIDTH + 1, WIDTH)
        self.interactions = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.outputs = nn.ModuleList(OutputBlock() for _ in range(3))

    def forward(self, z, pos, batch):
        (j, i), distance = self.distance(pos, batch)
        h = self.embedding(z)
        x = F.silu(self.edge_embedding(torch.cat([h[i], h[j], distance[:, None]], dim=1)))
        total = self.outputs[0](x, i, len(z))
        idx_kj, idx_ji = (i[:, None] == j[None]).nonzero().T  # [num_triplets] each
        for interaction, output in zip(self.interactions, self.outputs[1:], strict=True):
            gathered = sum_to_nodes(F.silu(interaction(x))[idx_kj], idx_ji, len(x))
            x = x + gathered / 8
            total = total + output(x, i, len(z))
        return scatter(total, batch, dim=0)


# PointNet++ starts from the positions alone; its layers are given (h, pos, edge_index).
@entry("PointNet: features and positions", POINTS)
class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = PointNetConv(mlp(6, WIDTH, WIDTH))
        self.conv2 = PointNetConv(mlp(WIDTH + 3, WIDTH, WIDTH))
        self.classifier = nn.Linear(WIDTH, 3)

    def forward(self, pos, edge_index, batch):
        h = keep(self.conv1(x=keep(pos), pos=pos, edge_index=edge_index).relu())
        h = keep(self.conv2(x=h, pos=pos, edge_index=edge_index).relu())
        return self.classifier(global_max_pool(h, batch))


@entry("layer(pos, x, edge_index) with fixed positions", POINTS)
class FixedPositions(nn.Module):
    """Positions come first in every call, and never change."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2 * WIDTH + 3, WIDTH)

        def forward(self, pos, x, edge_index):
            row, col = edge_index
            messages = self.lin(torch.cat([x[row], x[col], pos[row] - pos[col]], dim=1))
            return F.relu(sum_to_nodes(messages, col, len(x)))

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, data):
        x = keep(self.embed(data.x))
        for layer in self.layers:
            x = keep(layer(data.pos, x, data.edge_index))
        return self.head(global_add_pool(x, data.batch))
