"""A better readout for a trained graph neural network, without retraining it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .caching import cache as cache
    from .data import GraphDataset as GraphDataset
    from .data import load_data as load_data
    from .errors import HistographError as HistographError
    from .exporting import export as export
    from .finetuning import finetune as finetune
    from .from_scratch import pretrain as pretrain
    from .head_training import train_head as train_head
    from .heads.histograph import HistoGraphHead as HistoGraphHead
    from .predicting import load as load
    from .predicting import predict as predict
    from .reporting import report as report
    from .storage import Cache as Cache
    from .training_options import TrainingOptions as TrainingOptions
    from .tuning import tune as tune

#: Public name -> module. Loaded on first use, so that `histograph --help` never waits for torch.
_PUBLIC = {
    "Cache": ".storage",
    "GraphDataset": ".data",
    "HistoGraphHead": ".heads.histograph",
    "HistographError": ".errors",
    "TrainingOptions": ".training_options",
    "cache": ".caching",
    "export": ".exporting",
    "finetune": ".finetuning",
    "load": ".predicting",
    "load_data": ".data",
    "predict": ".predicting",
    "pretrain": ".from_scratch",
    "report": ".reporting",
    "train_head": ".head_training",
    "tune": ".tuning",
}
__all__ = [
    "Cache",
    "GraphDataset",
    "HistoGraphHead",
    "HistographError",
    "TrainingOptions",
    "cache",
    "export",
    "finetune",
    "load",
    "load_data",
    "predict",
    "pretrain",
    "report",
    "train_head",
    "tune",
]


__getattr__ = lazy_names(__name__, _PUBLIC)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
