"""A better readout for a trained graph neural network, without retraining it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .utils import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .caches import Cache
    from .caches.caching import cache
    from .caches.planning import inspect
    from .data import GraphDataset, load_data
    from .errors import HistographError
    from .experiments.end_to_end import pretrain
    from .experiments.finetuning import finetune
    from .experiments.head_training import compare, train_head
    from .experiments.options import ExperimentOptions
    from .experiments.search import tune
    from .heads import Readout, register_head
    from .heads.histograph import HistoGraphHead
    from .reporting import report
    from .runs.exporting import export
    from .runs.predicting import embed, load, predict
    from .runs.run import Run
    from .training.options import TrainingOptions

#: Module -> public names. Loaded on first use, so that `histograph --help` never waits for torch.
_PUBLIC = {
    ".caches": ("Cache",),
    ".caches.caching": ("cache",),
    ".caches.planning": ("inspect",),
    ".data": ("GraphDataset", "load_data"),
    ".errors": ("HistographError",),
    ".experiments.end_to_end": ("pretrain",),
    ".experiments.finetuning": ("finetune",),
    ".experiments.head_training": ("compare", "train_head"),
    ".experiments.options": ("ExperimentOptions",),
    ".experiments.search": ("tune",),
    ".heads": ("Readout", "register_head"),
    ".heads.histograph": ("HistoGraphHead",),
    ".reporting": ("report",),
    ".runs.exporting": ("export",),
    ".runs.predicting": ("embed", "load", "predict"),
    ".runs.run": ("Run",),
    ".training.options": ("TrainingOptions",),
}
__all__ = [
    "Cache",
    "ExperimentOptions",
    "GraphDataset",
    "HistoGraphHead",
    "HistographError",
    "Readout",
    "Run",
    "TrainingOptions",
    "cache",
    "compare",
    "embed",
    "export",
    "finetune",
    "inspect",
    "load",
    "load_data",
    "predict",
    "pretrain",
    "register_head",
    "report",
    "train_head",
    "tune",
]


__getattr__ = lazy_names(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
