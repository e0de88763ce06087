"""A backbone before training: built for the data, with weights drawn by a seed."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch_geometric.data import Batch

from ..data import GraphDataset
from ..data.probing import probe_graphs
from ..models import BUILT_IN, build_model, call_model
from ..models.pretrained import PretrainedSpec
from ..tasks import Task
from ..training.graph_batches import BackboneNetwork, GraphBatches


def untrained_model(
    spec: PretrainedSpec, dataset: GraphDataset, out_dim: int, *, seed: int
) -> nn.Module:
    """Build a model with initial weights of its own.

    Args:
        spec: Names the model and its arguments.
        dataset: Says how many features, or categories of features, the nodes have.
        out_dim: Number of outputs that the labels ask for.
        seed: Of the weights.
    """
    torch.manual_seed(seed)
    built = build_model(
        spec.model, spec.model_args, in_dim=_input_sizes(spec.model, dataset), out_dim=out_dim
    )
    if any(is_lazy(parameter) for parameter in built.parameters()):
        with torch.no_grad():
            call_model(built.eval(), Batch.from_data_list(probe_graphs(dataset)))
    # A specification may name a module that exists: every caller gets its own.
    return copy.deepcopy(built)


def _input_sizes(model: str, dataset: GraphDataset) -> int | list[int]:
    """Return the number of node features, or the categories of each column of integers."""
    width = int(dataset.graphs[0].num_node_features)
    if dataset.graphs[0].x.is_floating_point() or model not in BUILT_IN:
        return width
    highest = torch.stack(
        [graph.x.reshape(-1, width).amax(dim=0) for graph in dataset.graphs]
    )  # [num_graphs, columns]
    sizes: list[int] = (highest.amax(dim=0) + 1).tolist()
    return sizes


@torch.no_grad()
def output_width(model: nn.Module, dataset: GraphDataset, task: Task) -> int:
    """Run the model on the first rows; return how many columns it predicts."""
    source = GraphBatches(dataset, task, torch.device("cpu"))
    rows = np.arange(min(2, int(dataset.label_ptr[-1])))
    step = next(source.batches(rows, batch_size=2, seed=None))
    return int(BackboneNetwork(model).eval()(step.inputs).shape[1])
