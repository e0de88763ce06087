"""The checkpoints of backbones that were trained on folds, and the code that folders name.

The folder of a fold is a checkpoint that needs nothing else:

model.safetensors   the weights of the best epoch
config.toml         the model and its data, as ``histograph cache`` takes them
splits.json         that fold alone
metrics.jsonl       a line per epoch
results.json        the scores; written last, which marks the fold as finished
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from ..caches.manifest import MANIFEST_NAME, Provenance, read_manifest
from ..data import DataSpec
from ..data.spec import OnProgress, Reading
from ..errors import ConfigError, NotFoundError
from ..models import ModelSpec, parse_args
from ..models.spec import load_pretrained
from ..runs.fits import Fit, FitSpec
from ..runs.folder import require_sealed, seal
from ..runs.records import check_fold
from ..runs.run import (
    CONFIG_NAME,
    HEAD_CONFIG_NAME,
    METRICS_NAME,
    MODEL_NAME,
    RESULTS_NAME,
    SPLITS_NAME,
    Run,
    read_json,
)
from ..splits import Splits
from ..utils.decoding import read_json_lines, read_toml_file
from ..utils.files import write_json, write_text
from ..utils.specifications import IN_MEMORY, Specification
from ..utils.trust import Trusted, code_to_trust
from .folds import cache_folders

if TYPE_CHECKING:
    from ..caches.planning import CachePlan
    from ..caches.probing import CacheOptions


@dataclass(frozen=True)
class FoldCheckpoint:
    """A trained backbone and its data, as the folder of a fold records them."""

    #: The folder, or a file of weights from elsewhere.
    folder: Path
    model: ModelSpec
    data: DataSpec
    #: The splits file of that fold.
    split: str | None = None
    #: The readout it was trained with, if that was not the model's own.
    head: str | None = None

    @property
    def notes(self) -> list[str]:
        """What the user should know about the checkpoint."""
        if self.head is None:
            return []
        trained = f"{self.folder.name} was trained with the readout {self.head!r}"
        return [f"{trained}; its own readout was not trained, so its score means little"]


def fold_name(fold: int) -> str:
    """Return the name of a fold's folder."""
    return f"fold-{fold}"


def fold_folders(folder: Path) -> list[Path]:
    """Return the existing folders of folds, with results or not yet, in order."""
    numbers = [path.name.removeprefix("fold-") for path in folder.glob("fold-*") if path.is_dir()]
    return [folder / fold_name(n) for n in sorted(int(n) for n in numbers if n.isdecimal())]


def save_fold(
    folder: Path, fit: Fit, head: str | None, model: ModelSpec, data: DataSpec, splits: Splits
) -> None:
    """Complete the folder of a fold, which holds the weights of the backbone that a fit trained.

    Args:
        head: The readout it was trained with, if that was not the model's own.
        splits: Of all folds.
    """
    assert fit.backbone is not None  # of a fit that trained one
    config = {
        "model": model.spec,
        "model_args": [f"{name}={value!r}" for name, value in model.args.items()],
        "checkpoint": MODEL_NAME,
        "data": data.spec,
        "data_args": [f"{name}={value!r}" for name, value in data.args.items()],
        "split": SPLITS_NAME,
        **({} if data.root is None else {"data_root": str(data.root.resolve())}),
    }
    write_text(folder / CONFIG_NAME, tomli_w.dumps(config))
    replace(splits, folds=(splits.folds[fit.spec.fold],)).save(folder / SPLITS_NAME)
    write_text(folder / METRICS_NAME, "".join(json.dumps(dict(entry)) + "\n" for entry in fit.log))
    scores = {
        "fold": fit.spec.fold,
        "seed": fit.spec.seed,
        "best_epoch": fit.best_epoch,
        "epochs": fit.num_epochs,
        "scores": fit.scores,
        "num_parameters": fit.num_parameters,
        "weights_sha256": fit.backbone["weights_sha256"],
        "head": head,
        **({"diverged": True} if fit.diverged else {}),
    }
    sealed = seal(folder, (MODEL_NAME, CONFIG_NAME, SPLITS_NAME, METRICS_NAME), fit.spec.plan)
    write_json(folder / RESULTS_NAME, {**scores, **sealed})


def load_fold(spec: FitSpec, folder: Path) -> Fit:
    """Read a finished fold back, without its outputs, which are not saved."""
    stored = read_fold(folder)
    return Fit.of_json(
        spec,
        stored,
        seconds_per_epoch=0.0,
        log=read_json_lines(folder / METRICS_NAME),
        backbone={"weights_sha256": stored["weights_sha256"]},
    )


def read_fold(folder: Path) -> dict[str, Any]:
    """Read ``results.json`` of a finished fold, its types checked."""
    stored = read_json(folder, RESULTS_NAME)
    check_fold(stored, str(folder / RESULTS_NAME))
    return stored


def fold_checkpoints(
    folder: Path,
    *,
    model: str | None = None,
    data: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    data_args: Mapping[str, Any] | None = None,
    data_root: Path | None = None,
    key_map: Path | None = None,
    trust: bool = False,
) -> list[FoldCheckpoint]:
    """Return the checkpoints of a pretraining or fine-tuning, of all folds in order.

    Args:
        folder: Its run folder, or the folder of one fold.
        model: Specification of the model; needed unless the recorded one is built in.
        data: The same for the data.
        model_args: Arguments of the model, added to the recorded ones.
        data_args: The same for the data.
        data_root: Where the data are now, if they were moved.
        key_map: Old weight names to new ones.
        trust: Unpickle a checkpoint that can run code.
    """
    found = []
    for fold in recorded_folds(folder):
        models, source = fold.model.to_follow(model), fold.data.to_follow(data)
        args = [{**models.args, **(model_args or {})}, {**source.args, **(data_args or {})}]
        models = replace(models, args=args[0], key_map=key_map, trust=trust)
        source = replace(source, args=args[1], root=data_root or source.root)
        found.append(replace(fold, model=models, data=source))
    return found


def recorded_folds(folder: Path) -> list[FoldCheckpoint]:
    """Read the checkpoints of all folds, with model and data as they are recorded."""
    members = fold_folders(folder)
    if not members and not (folder / MODEL_NAME).is_file():
        raise NotFoundError(
            f"{folder}: found neither {MODEL_NAME} nor {fold_name(0)}, "
            "expected a folder that histograph pretrain or finetune wrote"
        )
    run = Run(folder)
    run.require_own(*(f"{member.name}/{RESULTS_NAME}" for member in members))
    listed = {name.partition("/")[0] for name in run.sums if name.startswith("fold-")}
    if lost := sorted(listed - {member.name for member in members}):
        raise NotFoundError(f"{folder / lost[0]}: found no folder, expected that of a fold")
    return [_read_checkpoint(member) for member in members or [folder]]


def _read_checkpoint(folder: Path) -> FoldCheckpoint:
    if not (folder / RESULTS_NAME).is_file():
        raise ConfigError(
            f"{folder}: found no {RESULTS_NAME}, expected a finished fold; "
            "run the command that trains it again"
        )
    stored = read_fold(folder)
    require_sealed(folder, stored)
    path = folder / CONFIG_NAME
    try:
        config = read_toml_file(path)
        here: dict[str, Any] = {"recorded_in": str(path)}
        args, weights = parse_args(config["model_args"]), folder / config["checkpoint"]
        model = ModelSpec(config["model"], args, weights, **here)
        root = Path(config["data_root"]) if "data_root" in config else None
        data = DataSpec(config["data"], parse_args(config["data_args"]), root, **here)
        split = str(folder / config["split"])
        return FoldCheckpoint(folder, model, data, split, stored.get("head"))
    except KeyError as error:
        raise ConfigError(f"{path}: found no {error}, expected what training wrote") from None
    except TypeError as error:
        raise ConfigError(f"{path}: found a value of another type ({error})") from None


def plan_caches(
    checkpoints: Sequence[FoldCheckpoint],
    *,
    options: CacheOptions,
    split: str | None = None,
    split_seed: int = 0,
    reading: Reading,
    device: str = "auto",
    progress: Callable[[str], AbstractContextManager[OnProgress]],
) -> Iterator[tuple[FoldCheckpoint, CachePlan, list[str]]]:
    """Load each checkpoint, and their data once; yield it with its plan and notes for the user."""
    from ..caches.planning import choose_splits, plan_cache

    dataset = None
    for each in checkpoints:
        with progress("reading rows") as update:
            data = replace(each.data, reading=replace(reading, on_progress=update))
            source = load_pretrained(each.model, data, dataset=dataset, allow_missing=True)
        plan = plan_cache(
            source.model,
            source.dataset,
            choose_splits(source.dataset, split or each.split, seed=split_seed),
            options=options,
            model_spec=source.spec,
            data_args=source.data.args,
            missing=source.missing,
            device=device,
        )
        notes = [*source.notes, *source.dataset.notes, *plan.capture.notes, *plan.notes]
        yield each, plan, [*(notes if dataset is None else ()), *each.notes]  # said once
        dataset = source.dataset


# --- the code that a run, a cache or a pretraining names, which ``histograph trust`` approves


def recorded_code(folder: Path) -> list[Trusted]:
    """Return the models, data and readouts of a folder that are code, with their present source.

    Nothing is imported. A relative name starts at the current folder, or else at the one in which
    the command ran.
    """
    found: list[Trusted] = []
    for spec, recorded in _recorded_specs(folder):
        places = [Path.cwd(), *([Path(recorded.folder)] if recorded is not None else [])]
        if isinstance(spec, str):
            found.append(code_to_trust("head", spec, {}, places))
        elif not spec.is_built_in and spec.spec != IN_MEMORY:
            found.append(code_to_trust(spec.WHAT, str(spec.spec), spec.args, places))
    return [entry for place, entry in enumerate(found) if entry not in found[:place]]


def _recorded_specs(folder: Path) -> Iterator[tuple[Specification | str, Provenance | None]]:
    """Yield the specifications that a folder records, readouts as text, and their provenance."""
    if (folder / HEAD_CONFIG_NAME).is_file():
        run = Run.of(folder)
        recorded = run.backbone.provenance
        yield from ((spec, recorded) for spec in (run.backbone.model, run.backbone.data))
        yield from ((spec, recorded) for spec in run.own_heads.values())
    elif fold_folders(folder) or (folder / MODEL_NAME).is_file():
        for fold in recorded_folds(folder):
            yield from ((spec, None) for spec in (fold.model, fold.data))
    else:
        caches = cache_folders(folder)
        if not all((cache / MANIFEST_NAME).is_file() for cache in caches):
            raise ConfigError(f"{folder}: found no run and no cache, expected one")
        for cache in caches:
            _, manifest = read_manifest(cache)
            yield from ((spec, manifest.provenance) for spec in (manifest.model, manifest.data))
