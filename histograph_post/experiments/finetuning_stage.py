"""Fine-tuning as a stage: which fits there are, how each is done, and what they leave behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file

from ..capture import CapturePlan
from ..heads.registry import build_head
from ..metrics import Key
from ..runs.fits import HEAD_NAME, Fit, FitSpec, load_fit
from ..runs.predictions import LabelRows
from ..runs.run import MODEL_NAME, Run
from ..runs.saved_backbone import SavedBackbone, write_provenance
from ..training.loop import Trainer
from ..utils.files import sha256_file
from .finetuning_source import CachedBackbones
from .head_fits import lend_rows, make_head
from .head_training import Experiment, HeadSpec
from .results import named, versus
from .stage import ReadoutStage
from .trained_backbones import NetworkParts, fit_network, write_folds
from .unfreezing import BackboneOptions, Movement, Unfreezing

#: What the fits of this stage are called after the name of their head.
STAGE = "finetuned"


@dataclass(frozen=True)
class Finetuning(ReadoutStage):
    """Backbones, heads, folds and seeds: everything a fine-tuning does."""

    trains_backbone: ClassVar[bool] = True

    #: The head stage on the same caches: its folds, and the frozen heads to compare with.
    frozen: Experiment
    head: HeadSpec
    backbones: CachedBackbones
    options: BackboneOptions
    #: The run whose heads go on learning; None for fresh ones.
    source: Run | None
    #: Layer of each parameter; the folds' backbones are alike.
    layers: Mapping[str, int]
    #: What there is to know about them.
    layer_notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What the tuned network is called in tables and results."""
        return f"{self.head.name}-{STAGE}"

    @property
    def capture(self) -> CapturePlan:
        """What is recorded of a backbone."""
        return self.backbones.capture

    def plan(self) -> dict[str, Any]:
        """Return all that the result depends on, as plain values."""
        return {
            "stage": "finetune",
            "frozen": self.frozen.plan(),
            "head": asdict(self.head),
            "backbone": asdict(self.options),
            "calibrate": self.calibrate,
            "start": None if self.source is None else self._head_hashes(self.source),
        }

    def _head_hashes(self, source: Run) -> list[str]:
        specs = [spec for spec in self.fits() if spec.stage]
        folders = [source.fit_folder(spec.head, spec.fold, spec.seed) for spec in specs]
        return [sha256_file(folder / HEAD_NAME) for folder in folders]

    def check(self, device: torch.device) -> None:
        """Refuse mixed precision on a device that has none."""
        self.options.check(device)

    def fits(self) -> list[FitSpec]:
        """Return the frozen heads that no run brings, and the tuned networks, a fold at a time."""
        frozen = () if self.source is not None else self.frozen.heads
        heads = [*((head, "") for head in frozen), (self.head, STAGE)]
        return [
            replace(self.frozen.fit_spec(head, fold.number, seed), stage=stage)
            for fold in self.frozen.folds
            for head, stage in heads
            for seed in self.seeds
        ]

    def earlier_fits(self) -> list[Fit]:
        """Return the frozen heads of the run this goes on from."""
        if self.source is None:
            return []
        return [load_fit(spec, self.source.folder / spec.folder) for spec in self.frozen.fits()]

    def fit(
        self,
        spec: FitSpec,
        folder: Path,
        *,
        device: torch.device,
        on_epoch: Callable[[Trainer], None] | None = None,
    ) -> Fit:
        """Train a head on the frozen backbone, or backbone and head together."""
        if not spec.stage:
            return self.frozen.fit(spec, folder, device=device, on_epoch=on_epoch)
        folder = folder / spec.folder
        fold = self.frozen.folds[spec.fold]
        before = self.backbones.models[spec.fold % len(self.backbones.models)]
        backbone = copy.deepcopy(before)
        if self.source is not None:
            head, standardizer = self.source.load_head(spec.fold, spec.seed)
        else:
            made = make_head(spec, fold.loaded, fold.split, self.task)
            head, standardizer = made.head, made.standardizer
        return fit_network(
            spec,
            NetworkParts(backbone, self.capture, self.layers, head, standardizer),
            self.options,
            self.backbones.dataset,
            fold.split,
            self.task,
            folder,
            device=device,
            before=before,
            on_epoch=on_epoch,
        )

    def lend(self, spec: FitSpec) -> Any:
        """Return the activations for a frozen head, and their statistics for a fresh one."""
        if not spec.stage:
            return self.frozen.lend(spec)
        if self.source is not None:
            return None
        fold = self.frozen.folds[spec.fold]
        return lend_rows(spec, fold.loaded, fold.split, self.task, history=False)

    @contextmanager
    def borrowing(self, spec: FitSpec, lent: Any) -> Iterator[None]:
        """Use what another process has lent for a fit."""
        if lent is None:
            yield
        else:
            with self.frozen.borrowing(spec, lent):
                yield

    def own_scores(self, fits: Sequence[Fit]) -> dict[Key, float]:
        """Return the test score of the checkpoint's own readout, before anything moved."""
        return self.frozen.own_scores(fits)

    def own_outputs(self, fits: Sequence[Fit]) -> dict[int, np.ndarray]:
        """Return what the checkpoint's own readout says of the test rows of each fold."""
        return self.frozen.own_outputs(fits)

    def label_rows(self) -> LabelRows:
        """Return the label rows of the cached data."""
        return self.frozen.label_rows()

    def backbone(self, fit: Fit, folder: Path) -> dict[str, Any]:
        """Return what the cache says of a fit's backbone, with the weights it has now."""
        assert fit.backbone is not None  # of a tuned fit
        cached = SavedBackbone.of_cache(self.frozen.folds[fit.spec.fold].loaded.cache)
        tuned = copy.deepcopy(self.backbones.models[fit.spec.fold % len(self.backbones.models)])
        tuned.load_state_dict(load_file(folder / fit.spec.folder / MODEL_NAME), strict=False)
        return {
            **cached.to_json(folder),
            "weights_sha256": fit.backbone["weights_sha256"],
            "checkpoint": MODEL_NAME,
            "in_run": True,
            "provenance": write_provenance(
                folder, tuned, self.capture, self.backbones.dataset
            ).to_json(),
        }

    def movement(self) -> Movement:
        """Count what training may change; what cannot be trained is refused."""
        backbone = copy.deepcopy(self.backbones.models[0])
        unfreezing = Unfreezing(backbone, self.layers, len(self.capture.points), self.options)
        if self.source is not None:
            head, _ = self.source.load_head()
        else:
            widths, task = self.capture.widths, self.task
            head = build_head(self.head.name, widths, task.out_dim, task.level, **self.head.options)
        return Movement.asked(backbone, [*unfreezing.layers, *unfreezing.statistics], head)

    def notes(self) -> list[str]:
        """Return what the user should know: what is trained, and what cannot be scored."""
        about = (*self.backbones.notes, *self.layer_notes)
        return [*about, f"training changes {self.movement()}", *super().notes()]

    def finish(self, folder: Path, fits: Sequence[Fit], chosen: str) -> dict[str, Any]:
        """Write a checkpoint per fold; return what moved, and the gain over the frozen backbone."""
        named_as = (self.backbones.model, self.backbones.data)
        write_folds(folder, fits, chosen, self.task, self.splits, *named_as)
        first = named(fits, chosen)[0].backbone
        return {
            "versus_frozen": versus(fits, chosen, self.head.name, self.task.metric),
            "moves": None if first is None else first["asked"],
        }
