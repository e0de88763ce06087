"""Fine-tuning: train a cached backbone together with its head, through the captured activations.

The source is a cache (the head starts fresh) or a run on one (every fold and seed goes on from its
own trained head: another fold's has seen this one's test rows). Beside the tuned network the
results show the checkpoint's own readout and the heads on the frozen backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch_geometric.data import Batch, Data

from ..caches import Cache
from ..data import GraphDataset
from ..data.dataset import probe_graphs
from ..errors import ConfigError
from ..runs.run import Run
from ..training.options import TrainingOptions
from .finetuning_source import load_backbones, open_source, source_experiment, source_head
from .finetuning_stage import Finetuning
from .head_training import HeadSpec, plan_experiment, with_baseline
from .stage import FitProgress, run_experiment
from .unfreezing import BackboneOptions, layers_of_parameters


def plan_finetuning(
    source: str | Path | Run | Cache,
    *,
    head: HeadSpec | None = None,
    options: BackboneOptions | None = None,
    training: TrainingOptions | None = None,
    seeds: Sequence[int] | None = None,
    split: str | None = None,
    split_seed: int = 0,
    task: str = "auto",
    metric: str | None = None,
    standardize: bool = True,
    warm_start: bool = False,
    cache: str | Path | None = None,
    data: str | Path | GraphDataset | Iterable[Data] | None = None,
    data_root: Path | None = None,
    model: nn.Module | str | None = None,
    checkpoint: Path | None = None,
    key_map: Path | None = None,
    trust: bool = False,
) -> Finetuning:
    """Rebuild the backbone of a run or a cache and lay out what is to be trained.

    Args:
        source: A run on a cache, a cache, or a folder of per-fold caches.
        head: A fresh head, for a cache; a run brings its own.
        options: What moves of the backbone, and how.
        training: Epochs, the head's learning rate and so on.
        seeds: One fit per seed and fold; by default 0, or those of the run.
        split: Another split than the cache's own; a run brings its own.
        split_seed: Seed of a split that is made.
        task: Overrides the task that is found from the labels; a run brings its own.
        metric: Overrides the tracked metric; a run brings its own.
        standardize: Standardise every layer with the cached statistics of the training graphs,
            which stay as they are while the backbone moves; a run brings its own.
        warm_start: Predict at first what the checkpoint predicts (fresh ``histograph`` only).
        cache: Where the run's cache is now.
        data: The cached data, or their specification; needed if they come from code of yours, were
            handed over in memory or are elsewhere now.
        data_root: Offline copies of benchmark data.
        model: The backbone itself, for one that was handed over in memory, or its specification,
            such as ``my_model.py:Net``; not needed for a built-in model.
        checkpoint: The backbone's weights, or a folder with those of every fold.
        key_map: Old weight names to new ones.
        trust: Unpickle a checkpoint that can run code.
    """
    run = open_source(source)
    training = training or TrainingOptions()
    if run is not None:
        fresh = {
            "head": head, "split": split, "metric": metric,
            "task": None if task == "auto" else task, "warm_start": warm_start or None,
            "split_seed": split_seed or None, "standardize": None if standardize else False,
        }  # fmt: skip
        given = next((name for name, value in fresh.items() if value is not None), None)
        if given is not None:
            raise ConfigError(f"{given}: found one, but the run {run.folder} brings its own")
        frozen = source_experiment(run, training, seeds=seeds, cache=cache)
        chosen = source_head(run)
    else:
        if cache is not None:
            raise ConfigError(
                f"cache: found {cache}, but {source} is no run: give it as the source"
            )
        place = source if isinstance(source, (str, Path, Cache)) else source.folder
        chosen = head or HeadSpec("histograph")
        wanted = plan_experiment(
            place,
            [chosen],
            training=training,
            seeds=(0,) if seeds is None else seeds,
            split=split,
            split_seed=split_seed,
            task=task,
            metric=metric,
            standardize=standardize,
            warm_start=warm_start,
        )
        baseline = [other for other in with_baseline(chosen, wanted.task.level) if other != chosen]
        frozen = replace(wanted, heads=tuple(baseline))
    backbones = load_backbones(
        frozen.caches,
        data=data,
        data_root=data_root,
        model=model,
        checkpoint=checkpoint,
        key_map=key_map,
        trust=trust,
    )
    probe = Batch.from_data_list(probe_graphs(backbones.dataset))
    planned = Finetuning(
        splits=frozen.splits,
        task=frozen.task,
        seeds=frozen.seeds,
        frozen=frozen,
        head=chosen,
        backbones=backbones,
        options=options or BackboneOptions(),
        source=run,
        layers=layers_of_parameters(backbones.models[0], backbones.capture, probe),
    )
    planned.movement()  # refuses before anything is trained or written
    return planned


def finetune(
    source: str | Path | Run | Cache,
    out: str | Path,
    *,
    head: str | None = None,
    backbone_lr: float = 1e-4,
    unfreeze: Sequence[str] | None = None,
    unfreeze_last: int | None = None,
    unfreeze_every: int = 0,
    bn: str = "frozen",
    checkpoint_layers: bool = False,
    amp: bool = False,
    head_options: Mapping[str, Any] | None = None,
    device: str = "auto",
    overwrite: bool = False,
    on_epoch: Callable[[FitProgress], None] | None = None,
    **planning: Any,
) -> Run:
    """Train a cached backbone and its head together, and say what that gained.

    Args:
        source: A run on a cache, a cache, or a folder of per-fold caches.
        out: The run folder.
        head: Name of a fresh readout, for a cache; ``histograph`` by default.
        backbone_lr: Highest learning rate of the backbone; the head's is ``training``'s.
        unfreeze: Names and globs of what moves of the backbone; empty for nothing.
        unfreeze_last: Move the last so many layers only.
        unfreeze_every: Let one more layer move after each so many epochs, the last one first.
        bn: ``frozen`` keeps running statistics bit for bit, ``train`` moves them.
        checkpoint_layers: Save memory: compute the inside of layers again for gradients.
        amp: Mixed precision (CUDA).
        head_options: Options of a fresh readout, such as ``dim`` and ``heads``.
        device: Where to train.
        overwrite: Replace another run in that folder.
        on_epoch: Told after every epoch.
        planning: Any other argument of :func:`plan_finetuning`, such as ``training``, ``seeds``,
            ``model`` and ``data``.
    """
    fresh = None
    if head is not None or head_options:
        fresh = HeadSpec(head or "histograph", head_options or {})
    planned = plan_finetuning(
        source,
        head=fresh,
        options=BackboneOptions(
            lr=backbone_lr,
            unfreeze=None if unfreeze is None else tuple(unfreeze),
            unfreeze_last=unfreeze_last,
            unfreeze_every=unfreeze_every,
            bn=bn,  # type: ignore[arg-type]  # checked there
            checkpoint_layers=checkpoint_layers,
            autocast=amp,
        ),
        **planning,
    )
    return run_experiment(
        planned, out, chosen=planned.name, device=device, overwrite=overwrite, on_epoch=on_epoch
    )
