"""From what a user names (a model, a checkpoint, data) to what the stages work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..data import GraphDataset, load_data
from ..tasks import has_labels, infer_task
from . import Checkpoint, LoadReport, build_model, load_into, read_checkpoint, read_key_map


@dataclass(frozen=True)
class PretrainedSpec:
    """A backbone and its data as the user names them; the manifest keeps this."""

    model: str
    checkpoint: Path
    data: str
    model_args: Mapping[str, Any] = field(default_factory=dict)
    data_args: Mapping[str, Any] = field(default_factory=dict)
    data_root: Path | None = None
    key_map: Path | None = None
    trust_checkpoint: bool = False


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model with its checkpoint's weights in it, and the graphs to run it on."""

    spec: PretrainedSpec
    model: nn.Module
    checkpoint: Checkpoint
    report: LoadReport
    dataset: GraphDataset


def load_pretrained(spec: PretrainedSpec, *, dataset: GraphDataset | None = None) -> Pretrained:
    """Read the checkpoint and the data, build the model, and load the weights strictly.

    ``dataset`` is the data of that specification, where it has been loaded before.
    """
    checkpoint = read_checkpoint(spec.checkpoint, trust=spec.trust_checkpoint)
    if dataset is None:
        dataset = load_data(spec.data, root=spec.data_root, args=spec.data_args)
    key_map = None if spec.key_map is None else read_key_map(spec.key_map)
    weights = checkpoint.state_dict
    model = build_model(
        spec.model,
        spec.model_args,
        state_dict=weights if key_map is None else key_map.apply(weights),
        in_dim=int(dataset.graphs[0].num_node_features),
        out_dim=_output_width(dataset),
    )
    report = load_into(model, checkpoint, key_map=key_map)
    model.eval()
    return Pretrained(spec, model, checkpoint, report, dataset)


def _output_width(dataset: GraphDataset) -> int | None:
    """Return the output width the labels ask for; links and unlabelled data ask for none."""
    labels = dataset.labels()
    if dataset.level == "link" or not has_labels(labels):
        return None
    return infer_task(labels, dataset.level).out_dim
