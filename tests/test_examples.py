"""The example model files carry real checkpoints to the scores their authors report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch

from histograph_post.backbone import call_model, prediction
from histograph_post.pretrained import Pretrained, PretrainedSpec, load_pretrained
from histograph_post.splits import resolve_splits

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(shared_data: Path, model: str, checkpoint: str, data: str, **data_args) -> Pretrained:
    return load_pretrained(
        PretrainedSpec(
            model=f"{EXAMPLES}/{model}",
            checkpoint=shared_data / "checkpoints" / checkpoint,
            data=data,
            data_args=data_args,
            data_root=shared_data,
        )
    )


def run(pretrained: Pretrained, num_graphs: int | None = None) -> tuple[Batch, Tensor]:
    batch = Batch.from_data_list(pretrained.dataset.graphs[:num_graphs])
    with torch.inference_mode():
        return batch, call_model(pretrained.model, batch)


def test_graph_conv_on_mutag(shared_data):
    pretrained = load(
        shared_data,
        "uvadlc_graph_conv.py:GraphGNNModel",
        "uvadlc_tutorial7/GraphLevelGraphConv.ckpt",
        "tu:MUTAG",
    )
    batch, output = run(pretrained)
    logits = prediction(output, rows=188)  # [188, 1]
    accuracy = ((logits[:, 0] > 0) == batch.y).double().mean().item()
    assert accuracy == pytest.approx(0.9255, abs=5e-5)


@pytest.mark.parametrize(
    ("model", "checkpoint", "expected"),
    [
        ("uvadlc_node_gcn.py:GNNModel", "uvadlc_tutorial7/NodeLevelGNN.ckpt", 0.824),
        ("pytorch_gat.py:GAT", "pytorch-GAT/gat_cora_000000.pth", 0.822),
    ],
)
def test_node_classifiers_on_cora(shared_data, model, checkpoint, expected):
    pretrained = load(shared_data, model, checkpoint, "planetoid:Cora")
    batch, output = run(pretrained)
    test = resolve_splits(pretrained.dataset, "official").folds[0].test
    correct = prediction(output, rows=2708).argmax(dim=1) == batch.y  # [2708]
    assert correct[test.tolist()].double().mean().item() == pytest.approx(expected, abs=1e-6)


def test_the_molecule_gcn_equals_its_formula(shared_data):
    pretrained = load(
        shared_data,
        "pretrain_gnns_gcn.py:GNN",
        "pretrain-gnns/chem_gcn_contextpred.pth",
        f"smiles:{shared_data / 'mol' / 'BBBP.csv'}",
        mol_features="pretrain",
    )
    batch, output = run(pretrained, num_graphs=3)
    weights = pretrained.checkpoint.state_dict
    num_nodes = batch.num_nodes
    adjacency, bond_sum = torch.zeros(num_nodes, num_nodes), torch.zeros(num_nodes, num_nodes, 300)
    h = (
        weights["x_embedding1.weight"][batch.x[:, 0]]
        + weights["x_embedding2.weight"][batch.x[:, 1]]
    )
    loops = [(node, node, 4, 0) for node in range(num_nodes)]
    bonds = [
        (*pair, *bond)
        for pair, bond in zip(batch.edge_index.T.tolist(), batch.edge_attr.tolist(), strict=True)
    ]
    for source, target, _, _ in bonds + loops:
        adjacency[target, source] = 1
    scale = adjacency.sum(dim=0).rsqrt()
    norm = scale[:, None] * adjacency * scale  # [num_nodes, num_nodes], target by source
    for layer in range(5):
        of = {name.split(".", 2)[2]: w for name, w in weights.items() if f"s.{layer}." in name}
        for source, target, kind, direction in bonds + loops:
            bond_sum[target, source] = (
                of["edge_embedding1.weight"][kind] + of["edge_embedding2.weight"][direction]
            )
        h = h @ of["linear.weight"].T + of["linear.bias"]
        h = norm @ h + torch.einsum("ts,tsd->td", norm, bond_sum)
        h = (h - of["running_mean"]) / (of["running_var"] + 1e-5).sqrt() * of["weight"] + of["bias"]
        h = h.relu() if layer < 4 else h
    torch.testing.assert_close(output, h, rtol=1e-4, atol=1e-4)
