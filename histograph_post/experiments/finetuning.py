"""Fine-tuning: train a cached backbone together with its head, through the captured activations.

The source is a cache (the head starts fresh) or a run on one (every fold and seed goes on from its
own trained head: another fold's has seen this one's test rows). Beside the tuned network the
results show the checkpoint's own readout and the heads on the frozen backbone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch_geometric.data import Batch, Data

from ..caches import Cache
from ..data import GraphDataset
from ..data.dataset import probe_graphs
from ..errors import ConfigError
from ..heads.base import Readout
from ..heads.registry import head_name
from ..runs.run import Run
from .finetuning_source import load_backbones, open_source, source_experiment, source_head
from .finetuning_stage import Finetuning
from .gradients import check_gradients, layers_of_parameters
from .head_training import HeadSpec, plan_experiment, with_baseline
from .options import ExperimentOptions, run_with_options, with_keywords
from .unfreezing import BackboneOptions

#: What a run that is fine-tuned has decided already.
_OF_THE_RUN = ("split", "split_seed", "task", "metric", "standardize", "warm_start")


def plan_finetuning(
    source: str | Path | Run | Cache,
    options: ExperimentOptions,
    *,
    head: HeadSpec | None = None,
    backbone: BackboneOptions | None = None,
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
        options: What all experiments share. Layers are standardised with the cached statistics of
            the training graphs, which stay as they are while the backbone is trained.
        head: A new head, for a cache; a run brings its own.
        backbone: What is trained of the backbone, and how.
        cache: Where the run's cache is now, if it was moved.
        data: The cached data, or their specification; needed if they come from code of yours, were
            handed over in memory or were moved.
        data_root: Offline copies of benchmark data.
        model: The backbone itself, for one that was handed over in memory, or its specification,
            such as ``my_model.py:Net``; not needed for a built-in model.
        checkpoint: The backbone's weights, or a folder with those of every fold.
        key_map: Old weight names to new ones.
        trust: Unpickle a checkpoint that can run code.
    """
    run = open_source(source)
    options = replace(options, training=options.training_options())
    if run is not None:
        reason = f"the run {run.folder} brings its own"
        if head is not None and (head.options or head.name != run.head):
            raise ConfigError(f"head: found {head.name!r}, but {reason}, {run.head!r}")
        options.refuse(*_OF_THE_RUN, reason=reason)
        frozen, chosen = source_experiment(run, options, cache=cache), source_head(run)
    else:
        if cache is not None:
            raise ConfigError(
                f"cache: found {cache}, but {source} is no run: give it as the source"
            )
        place = source if isinstance(source, (str, Path, Cache)) else source.folder
        chosen = head or HeadSpec("histograph")
        options = replace(options, seeds=options.seeds or (0,))  # a backbone a seed is dear
        wanted = plan_experiment(place, [chosen], options)
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
    asked, first = backbone or BackboneOptions(), backbones.models[0]
    layers = layers_of_parameters(first, backbones.capture, probe)
    notes = check_gradients(first, backbones.capture, probe, layers, asked)
    planned = Finetuning(
        splits=frozen.splits,
        task=frozen.task,
        seeds=frozen.seeds,
        frozen=frozen,
        head=chosen,
        backbones=backbones,
        options=asked,
        source=run,
        calibrate=options.calibrate,
        layers=layers,
        layer_notes=tuple(notes),
    )
    planned.movement()  # refuses before anything is trained or written
    return planned


def finetune(
    source: str | Path | Run | Cache,
    out: str | Path,
    *,
    head: str | type[Readout] | None = None,
    head_options: Mapping[str, Any] | None = None,
    backbone_lr: float = 1e-4,
    unfreeze: Sequence[str] | None = None,
    unfreeze_last: int | None = None,
    unfreeze_every: int = 0,
    bn: str = "frozen",
    checkpoint_layers: bool = False,
    amp: bool = False,
    options: ExperimentOptions | None = None,
    **keywords: Any,
) -> Run:
    """Train a cached backbone and its head together, and say what that gained.

    Args:
        source: A run on a cache, a cache, or a folder of per-fold caches.
        out: The run folder.
        head: Name of a new readout, for a cache; ``histograph`` by default. Of a run, only a
            readout that is code of yours has to be named again.
        head_options: Options of a new readout, such as ``dim`` and ``heads``.
        backbone_lr: Highest learning rate of the backbone; the head's is ``training``'s.
        unfreeze: Names and globs of the modules or parameters of the backbone that are trained; all
            by default, an empty list for none.
        unfreeze_last: Train only the last so many layers of the backbone.
        unfreeze_every: Train the head alone at first, and one more layer after each so many epochs,
            the last one first.
        bn: ``train`` updates the running statistics of batch norms that are trained, ``frozen``
            leaves them as they are.
        checkpoint_layers: Save memory: compute the inside of layers again in the backward pass.
        amp: Mixed precision of the backbone (CUDA).
        options: Seeds, training and so on, which all experiments share.
        keywords: Any of those by itself, such as ``seeds=[0, 1]``, and any other argument of
            :func:`plan_finetuning`, such as ``model`` and ``data``.
    """
    options, planning = with_keywords(options, keywords)
    new = None
    if head is not None or head_options:
        new = HeadSpec(head_name(head or "histograph"), head_options or {})
    backbone = BackboneOptions(
        lr=backbone_lr,
        unfreeze=None if unfreeze is None else tuple(unfreeze),
        unfreeze_last=unfreeze_last,
        unfreeze_every=unfreeze_every,
        bn=bn,  # type: ignore[arg-type]  # checked there
        checkpoint_layers=checkpoint_layers,
        autocast=amp,
    )
    planned = plan_finetuning(source, options, head=new, backbone=backbone, **planning)
    return run_with_options(planned, out, chosen=planned.name, options=options)
