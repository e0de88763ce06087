"""The backbones that are run: the tool's own GIN, and the molecule GCN of pretrain-gnns."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch_geometric.data import Batch

from histograph_post.data import GraphDataset
from histograph_post.models import ModelSpec, build_model, call_model

_MOLECULE_GCN = "pretrain-gnns:gcn"
#: Graphs over which the statistics of batch normalisation are taken.
_SETTLING_GRAPHS = 256


def make_gin(dataset: GraphDataset, num_layers: int, width: int) -> nn.Module:
    """Return the built-in GIN with batch norm, with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden": width, "num_layers": num_layers}
    columns = int(dataset.graphs[0].num_node_features)
    return _settled(build_model("gin", sizes, in_dim=columns, out_dim=1), dataset)


def make_molecule_gcn(dataset: GraphDataset, width: int, checkpoint: Path | None) -> nn.Module:
    """Return the molecule GCN: with the weights of a checkpoint, or with random ones."""
    torch.manual_seed(0)
    if checkpoint is not None:
        return ModelSpec(_MOLECULE_GCN, checkpoint=checkpoint).load()
    return _settled(build_model(_MOLECULE_GCN, {"emb_dim": width}), dataset)


@torch.no_grad()
def _settled(model: nn.Module, dataset: GraphDataset) -> nn.Module:
    """Take the statistics of batch norm: activations of random weights would grow with depth."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 1.0  # those of this one batch
    call_model(model.train(), Batch.from_data_list(dataset.graphs[:_SETTLING_GRAPHS]))
    return model.eval()
