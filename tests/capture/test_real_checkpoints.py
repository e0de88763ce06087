"""Real checkpoints in models written as their users would: history against a forward by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GraphConv, MessagePassing, global_mean_pool
from torch_geometric.utils import add_self_loops, degree

from histograph_post.capture import Capture, check_parity, plan_capture


class MoleculeConv(MessagePassing):
    """The GCN layer of pretrain-gnns: bond embeddings are added to the messages."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.linear = nn.Linear(300, 300)
        self.edge_embedding1 = nn.Embedding(6, 300)
        self.edge_embedding2 = nn.Embedding(3, 300)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        loops = torch.tensor([[4, 0]]).expand(x.size(0), 2)
        edge_attr = torch.cat([edge_attr, loops])
        embedded = self.edge_embedding1(edge_attr[:, 0]) + self.edge_embedding2(edge_attr[:, 1])
        row, col = edge_index
        scale = degree(row, x.size(0)).rsqrt()
        norm = scale[row] * scale[col]
        return self.propagate(edge_index, x=self.linear(x), edge_attr=embedded, norm=norm)

    def message(self, x_j: Tensor, edge_attr: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * (x_j + edge_attr)


class MoleculeGNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x_embedding1, self.x_embedding2 = nn.Embedding(120, 300), nn.Embedding(3, 300)
        self.gnns = nn.ModuleList(MoleculeConv() for _ in range(5))
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(300) for _ in range(5))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.x_embedding1(x[:, 0]) + self.x_embedding2(x[:, 1])
        layers = [x]
        for at in range(5):
            h = self.batch_norms[at](self.gnns[at](layers[at], edge_index, edge_attr))
            if at == 4:
                h = F.dropout(h, 0.5, training=self.training)
            else:
                h = F.dropout(F.relu(h), 0.5, training=self.training)
            layers.append(h)
        return layers[-1]


class MoleculeClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gnn = MoleculeGNN()
        self.graph_pred_linear = nn.Linear(300, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        pooled = global_mean_pool(self.gnn(x, edge_index, edge_attr), batch)
        return self.graph_pred_linear(pooled)


def molecule(num_atoms: int) -> Data:
    """A ring of random atoms."""
    ring = torch.arange(num_atoms)
    edges = torch.stack([ring, ring.roll(1)])
    bonds = torch.stack([torch.randint(0, 4, (num_atoms,)), torch.randint(0, 3, (num_atoms,))], 1)
    return Data(
        x=torch.stack([torch.randint(0, 118, (num_atoms,)), torch.randint(0, 3, (num_atoms,))], 1),
        edge_index=torch.cat([edges, edges.flip(0)], 1),
        edge_attr=torch.cat([bonds, bonds]),
    )


@pytest.mark.parametrize("whole", [True, False], ids=["classifier", "encoder"])
def test_pretrained_molecule_gcn(whole, shared_data):
    path = shared_data / "checkpoints" / "pretrain-gnns" / "chem_gcn_contextpred.pth"
    gnn = MoleculeGNN().eval()
    gnn.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    model: nn.Module = gnn
    if whole:
        model = MoleculeClassifier().eval()
        model.gnn = gnn
    molecules = [molecule(size) for size in (6, 9, 14, 3)]
    batch = Batch.from_data_list(molecules)
    plan = plan_capture(model, batch)
    assert plan.widths == (300,) * 6
    prefix = "gnn." if whole else ""
    assert plan.names == ("input", *(f"{prefix}gnns.{at}" for at in range(5)))

    with torch.inference_mode():
        history = Capture(model, plan).run(batch).history
        x = gnn.x_embedding1(batch.x[:, 0]) + gnn.x_embedding2(batch.x[:, 1])
        expected = [x]
        for at in range(5):
            x = gnn.batch_norms[at](gnn.gnns[at](x, batch.edge_index, batch.edge_attr))
            x = x.relu() if at < 4 else x
            expected.append(x)
    for found, wanted in zip(history, expected, strict=True):
        assert torch.equal(found, wanted)
    assert (history[-1] < 0).any()  # the last layer has no activation function
    assert check_parity(model, plan, molecules).ok


class TutorialGNN(nn.Module):
    """The graph classifier of a well-known tutorial, as its checkpoint names the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.GNN = nn.Module()
        self.GNN.layers = nn.ModuleList(
            [
                *(GraphConv(7, 256), nn.ReLU(inplace=True), nn.Dropout(0.0)),
                *(GraphConv(256, 256), nn.ReLU(inplace=True), nn.Dropout(0.0)),
                GraphConv(256, 256),
            ]
        )
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(256, 1))

    def forward(self, x, edge_index, batch_idx):
        for layer in self.GNN.layers:
            x = layer(x, edge_index) if isinstance(layer, MessagePassing) else layer(x)
        return self.head(global_mean_pool(x, batch_idx))


def test_tutorial_checkpoint(shared_data, batch):
    path = shared_data / "checkpoints" / "uvadlc_tutorial7" / "GraphLevelGraphConv.ckpt"
    state = torch.load(path, weights_only=True, map_location="cpu")["state_dict"]
    model = TutorialGNN().eval()
    model.load_state_dict({key.removeprefix("model."): value for key, value in state.items()})
    plan = plan_capture(model, batch)
    assert plan.names == ("input", "GNN.layers.0", "GNN.layers.3", "GNN.layers.6")
    with torch.inference_mode():
        history = Capture(model, plan).run(batch).history
        first = model.GNN.layers[0](batch.x, batch.edge_index).relu()
        second = model.GNN.layers[3](first, batch.edge_index).relu()
        expected = [batch.x, first, second, model.GNN.layers[6](second, batch.edge_index)]
    assert [torch.equal(*pair) for pair in zip(history, expected, strict=True)] == [True] * 4
