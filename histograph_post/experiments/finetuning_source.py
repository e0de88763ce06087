"""Where fine-tuning starts: a run's trained heads, and the backbones and data of its caches."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch_geometric.data import Data

from ..caches import Cache
from ..data import GraphDataset, from_graphs, load_data
from ..errors import CacheError, ConfigError, DataError, HistographError, NotFoundError
from ..models import load_into, read_checkpoint, read_key_map
from ..models.pretrained import PretrainedSpec
from ..runs.fits import FitSpec
from ..runs.run import RUN_NAME, SPLITS_NAME, Run, read_json
from ..runs.saved_backbone import SavedBackbone, check_backbone
from ..runs.saved_head import SavedHead
from ..splits import Splits
from ..training.options import TrainingOptions
from ..utils.specifications import IN_MEMORY
from .folds import load_folds, open_caches
from .head_training import Experiment, HeadSpec
from .trained_folds import fold_checkpoints


@dataclass(frozen=True)
class SourceRun:
    """A finished run on a cache, whose heads are to go on learning."""

    folder: Path
    saved: SavedHead
    #: ``run.json``: all that its result depended on.
    plan: dict[str, Any]

    @property
    def head(self) -> HeadSpec:
        """The readout the run is about."""
        options = {entry["name"]: entry["options"] for entry in self.plan["heads"]}
        return HeadSpec(self.saved.name, options[self.saved.name])

    def head_folder(self, spec: FitSpec) -> Path:
        """Return where the run keeps the head of a fold and seed."""
        return self.folder / replace(spec, stage="").folder

    def build_head(self, spec: FitSpec) -> tuple[nn.Module, nn.Module | None]:
        """Return the trained head of a fold and seed, and what its rows go through before it."""
        return self.saved.of_fit(self.head_folder(spec)).build()

    def experiment(
        self, training: TrainingOptions, *, seeds: Sequence[int] | None, cache: str | Path | None
    ) -> Experiment:
        """Return the experiment of the run, on its caches and splits.

        Args:
            training: How to train on.
            seeds: Some of the run's; all by default.
            cache: Where the cache, or the folder of caches, is now.
        """
        known = tuple(self.plan["seeds"])
        for seed in seeds or ():
            if seed not in known:
                raise ConfigError(f"seeds: found {seed}, expected some of the run's, {list(known)}")
        place = self.saved.backbone.cache
        weights = self.plan["weights"]
        caches = open_caches(cache or (place.parent if len(weights) > 1 else place))
        found = [member.weights_sha256 for member in caches]
        if found != weights:
            raise CacheError(
                f"{caches[0].path}: found weights {', '.join(w[:12] for w in found)}, expected "
                f"{', '.join(w[:12] for w in weights)}, on which {self.folder} was trained"
            )
        splits = Splits.load(self.folder / SPLITS_NAME)
        return Experiment(
            splits=splits,
            task=self.saved.task,
            seeds=known if seeds is None else tuple(seeds),
            caches=tuple(caches),
            folds=tuple(load_folds(caches, splits)),
            heads=tuple(HeadSpec(e["name"], e["options"]) for e in self.plan["heads"]),
            training=training,
            standardize=self.plan["standardize"],
            warm_start=self.plan["warm_start"],
        )


def open_source(source: str | Path | Run | Cache) -> SourceRun | None:
    """Open what fine-tuning starts from, if it is a run; None for a cache."""
    if isinstance(source, Cache):
        return None
    folder = source.folder if isinstance(source, Run) else Path(source)
    if not (folder / RUN_NAME).is_file():
        return None
    saved = SavedHead.read(folder)
    if saved.backbone.in_run:
        raise ConfigError(
            f"{folder}: found a run that trained its backbone; cache that first: "
            f"histograph cache {folder} -o CACHES"
        )
    return SourceRun(folder, saved, read_json(folder, RUN_NAME))


@dataclass(frozen=True)
class CachedBackbones:
    """The backbones of some caches, one or one per fold, and the data they ran on."""

    models: tuple[nn.Module, ...]
    dataset: GraphDataset
    #: The model and the data as they were named, for the checkpoints to come.
    spec: PretrainedSpec
    #: What the first cache knows of its backbone.
    saved: SavedBackbone


def load_backbones(
    caches: Sequence[Cache],
    *,
    data: str | Path | GraphDataset | Iterable[Data] | None,
    data_root: Path | None,
    model: nn.Module | str | None,
    checkpoint: Path | None,
    key_map: Path | None,
    trust: bool,
) -> CachedBackbones:
    """Build the models of the caches anew, with the cached weights, and load the cached data."""
    known = [SavedBackbone.of_cache(cache) for cache in caches]
    for saved in known[1:]:
        if saved.capture != known[0].capture:
            raise CacheError(
                f"{saved.run}: found other layers than those of {known[0].run.name}, expected the "
                "caches of one model, trained fold by fold"
            )
    # Asked of all caches before anything is built or loaded: a manifest names no code.
    model_specs = [
        saved.model if isinstance(model, nn.Module) else saved.model_spec(model) for saved in known
    ]
    data_spec = known[0].data
    if data is None or isinstance(data, (str, Path)):
        data_spec = known[0].data_spec(None if data is None else str(data))
    files = [_checkpoint_file(saved, checkpoint, model) for saved in known]
    root = data_root or _data_root(known[0], files[0], model_specs[0], data_spec)
    if data is None or isinstance(data, (str, Path)):
        dataset = load_data(data_spec, root=root, args=known[0].data_args)
    else:
        dataset = data if isinstance(data, GraphDataset) else from_graphs(data)
    _check_data(known[0], dataset)
    models = []
    for saved, file in zip(known, files, strict=True):
        if isinstance(model, nn.Module):
            built = copy.deepcopy(model)  # the user's own one stays as it is
            if file is not None:
                names = None if key_map is None else read_key_map(key_map)
                load_into(built, read_checkpoint(file, trust=trust), key_map=names)
            check_backbone(saved, built, where=str(file or type(built).__name__))
        else:
            built = saved.build(
                model=model,
                checkpoint=file,
                key_map=key_map,
                trust=trust,
                in_dim=int(dataset.graphs[0].num_node_features),
            )
        models.append(built.eval())
    spec = PretrainedSpec(
        model=model_specs[0],
        checkpoint=Path(known[0].checkpoint or ""),
        data=data_spec,
        model_args=known[0].model_args,
        data_args=known[0].data_args,
        data_root=root,
    )
    return CachedBackbones(tuple(models), dataset, spec, known[0])


def _checkpoint_file(
    saved: SavedBackbone, given: Path | None, model: nn.Module | str | None
) -> Path | None:
    """Return the file with a backbone's weights; None for a model that has them."""
    if given is None:
        return (
            None
            if isinstance(model, nn.Module) or saved.model == IN_MEMORY
            else (saved.find_checkpoint())
        )
    found = saved.checkpoint_in(given)
    if found is None:
        raise NotFoundError(f"{given}: found no {saved.checkpoint!r}, expected the weights")
    return found


def _data_root(saved: SavedBackbone, checkpoint: Path | None, model: str, data: str) -> Path | None:
    """Return the data root of the cache's command, or of the training that made the checkpoint."""
    found = saved.option_path("data_root")
    if found is not None or checkpoint is None:
        return found
    try:
        return fold_checkpoints(checkpoint.parent, model=model, data=data)[0].spec.data_root
    except HistographError:  # a checkpoint from elsewhere
        return None


def _check_data(saved: SavedBackbone, dataset: GraphDataset) -> None:
    """Refuse other data than those of a cache."""
    if dataset.fingerprint() != saved.data_fingerprint:
        raise DataError(
            f"{dataset.spec}: found data with fingerprint {dataset.fingerprint()}, expected "
            f"{saved.data_fingerprint}, which {saved.run} was made from"
        )
