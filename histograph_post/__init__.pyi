from .caches import Cache as Cache
from .caches.caching import cache as cache
from .caches.planning import inspect as inspect
from .data import GraphDataset as GraphDataset
from .data import load_data as load_data
from .errors import HistographError as HistographError
from .experiments.end_to_end import pretrain as pretrain
from .experiments.finetuning import finetune as finetune
from .experiments.head_training import compare as compare
from .experiments.head_training import train_head as train_head
from .experiments.options import ExperimentOptions as ExperimentOptions
from .experiments.search import tune as tune
from .heads import Readout as Readout
from .heads import register_head as register_head
from .heads.histograph import HistoGraphHead as HistoGraphHead
from .reporting import report as report
from .runs.exporting import export as export
from .runs.predicting import embed as embed
from .runs.predicting import load as load
from .runs.predicting import predict as predict
from .runs.run import Run as Run
from .training.options import TrainingOptions as TrainingOptions

__version__: str
