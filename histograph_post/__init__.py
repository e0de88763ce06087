"""A better readout for a trained graph neural network, without retraining it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .utils import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .caches import Cache as Cache
    from .caches.caching import cache as cache
    from .data import GraphDataset as GraphDataset
    from .data import load_data as load_data
    from .errors import HistographError as HistographError
    from .experiments.end_to_end import pretrain as pretrain
    from .experiments.finetuning import finetune as finetune
    from .experiments.head_training import compare as compare
    from .experiments.head_training import train_head as train_head
    from .experiments.options import ExperimentOptions as ExperimentOptions
    from .experiments.tuning import tune as tune
    from .heads import Readout as Readout
    from .heads import register_head as register_head
    from .heads.histograph import HistoGraphHead as HistoGraphHead
    from .reporting import report as report
    from .runs.exporting import export as export
    from .runs.predicting import load as load
    from .runs.predicting import predict as predict
    from .runs.run import Run as Run
    from .training.options import TrainingOptions as TrainingOptions

#: Public name -> module. Loaded on first use, so that `histograph --help` never waits for torch.
_PUBLIC = {
    "Cache": ".caches",
    "ExperimentOptions": ".experiments.options",
    "GraphDataset": ".data",
    "HistoGraphHead": ".heads.histograph",
    "HistographError": ".errors",
    "Readout": ".heads",
    "Run": ".runs.run",
    "TrainingOptions": ".training.options",
    "cache": ".caches.caching",
    "compare": ".experiments.head_training",
    "export": ".runs.exporting",
    "finetune": ".experiments.finetuning",
    "load": ".runs.predicting",
    "load_data": ".data",
    "predict": ".runs.predicting",
    "pretrain": ".experiments.end_to_end",
    "register_head": ".heads",
    "report": ".reporting",
    "train_head": ".experiments.head_training",
    "tune": ".experiments.tuning",
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
    "export",
    "finetune",
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
    return sorted([*globals(), *_PUBLIC])
