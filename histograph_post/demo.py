"""The demo: the whole way on data made in code, as the commands a user would type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from .backbone import build_model
from .data import load_data
from .files import atomic_path
from .graph_batches import BackboneNetwork, GraphBatches
from .splits import resolve_splits
from .tasks import infer_task
from .training import Trainer, TrainingOptions

DATA = "demo:"
MODEL = "gin"
#: Deep enough for the last layers to have lost some of what the first ones saw.
MODEL_ARGS = {"hidden": 32, "num_layers": 8}
EPOCHS = 20


def train_demo_backbone(
    checkpoint: Path, *, seed: int = 0, on_epoch: Callable[[int], None] | None = None
) -> None:
    """Train a small mean-pool GIN on the demo data and save its weights: somebody's checkpoint."""
    dataset = load_data(DATA)
    splits = resolve_splits(dataset, None, seed=seed)
    task = infer_task(dataset.labels(), dataset.level)
    torch.manual_seed(seed)
    model = build_model(
        MODEL, MODEL_ARGS, in_dim=int(dataset.graphs[0].num_node_features), out_dim=task.out_dim
    )
    trainer = Trainer(
        BackboneNetwork(model),
        GraphBatches(dataset, task, torch.device("cpu")),
        splits.folds[0],
        task,
        TrainingOptions(epochs=EPOCHS, lr=3e-3, patience=0),
        seed=seed,
    )
    trainer.run(None if on_epoch is None else lambda trainer: on_epoch(trainer.progress.epoch))
    with atomic_path(checkpoint) as partial:
        save_file(model.state_dict(), partial)
