"""The options that all experiments share: train-head, compare, tune, finetune and pretrain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..errors import ConfigError
from ..heads.registry import head_info
from ..runs.fits import Fit
from ..training.options import TrainingOptions
from ..utils.decoding import MOST_SEEDS, require_number
from ..utils.text import notebook_bar

if TYPE_CHECKING:
    from .stage import Stage

#: What runs the fits of an experiment.
Backend = Literal["loky", "dask", "ray"]

#: Default seeds of a run on a cache.
DEFAULT_SEEDS: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True)
class HeadSpec:
    """A readout by name, with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for option in ("name", "in_dims", "out_dim", "level"):  # what the data decide
            if option in self.options:
                raise ConfigError(
                    f"head {self.name!r}: found the option {option!r}, expected none of that name"
                )

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the code of a custom readout is part of them."""
        source = head_info(self.name).source
        return asdict(self) | ({"source": source} if source else {})


def with_baseline(head: HeadSpec, level: str) -> list[HeadSpec]:
    """Return the baseline, a readout of the last layer alone, and the requested head."""
    baseline = "mean" if level == "graph" else "mlp"
    width = {name: value for name, value in head.options.items() if name == "dim"}
    return [head] if head.name == baseline else [HeadSpec(baseline, width), head]


@dataclass(frozen=True)
class FitProgress:
    """The progress of an experiment after an epoch."""

    #: What is fitted.
    head: str
    fold: int
    seed: int
    #: Fits that are done, running ones by the share of their epochs, and fits in all.
    done: float
    total: int
    #: The share of the epochs of this fit that are over; all of them once training has stopped.
    share_done: float
    #: Fits that are left of each readout, less what running ones have done.
    left: Mapping[str, float]
    #: What was measured in the epoch: its number, ``loss``, ``lr``, ``valid_loss`` and so on.
    measured: Mapping[str, float]


@dataclass(frozen=True)
class ExperimentOptions:
    """The options that all experiments share.

    Each of these can also be given to an experiment as a keyword of its own::

        hg.train_head(cache, out, seeds=[0, 1], metric="roc_auc", epochs=5)
    """

    #: One fit per seed and fold, which predict together. By default :data:`DEFAULT_SEEDS`; after a
    #: search 0 to 4; for a run that is fine-tuned, the seeds of that run.
    seeds: Sequence[int] | None = None
    #: Another split than the one of the cache or the data: a file, ``kfold:10``, ...
    split: str | None = None
    #: Seed of a split that is drawn at random.
    split_seed: int = 0
    #: ``binary``, ``multiclass``, ``multilabel`` or ``regression``; by default what the labels say.
    task: str = "auto"
    #: The metric that selects the best epoch and ranks; by default the usual one of the task.
    metric: str | None = None
    #: Standardise every layer with the mean and deviation of the training graphs.
    standardize: bool = True
    #: Start the head at the checkpoint's own predictions (``histograph`` only).
    warm_start: bool = False
    #: Calibrate probabilities by a temperature that is fitted on the validation part.
    calibrate: bool = True
    #: Bytes that training may take beyond its libraries; a cache that needs more is read batch by
    #: batch. Two thirds of the machine's memory by default.
    memory_limit: int | None = None
    #: How to train: all of it, or a mapping with what differs from the defaults. A mapping without
    #: ``lr`` gets the learning rate that suits readout and data.
    training: TrainingOptions | Mapping[str, Any] | None = None
    #: ``auto``, ``cpu``, ``cuda`` or ``mps``.
    device: str = "auto"
    #: Fits at once, each in a process of its own, with the same results for any number; by default
    #: as many as the cores and the memory carry. 1 starts no process.
    jobs: int | None = None
    #: ``(i, n)``: do share ``i`` of ``n`` of the fits, and leave the others to other calls into the
    #: same folder. Whichever finds all fits done writes the results.
    fits: tuple[int, int] | None = None
    #: What runs the fits: ``loky``, processes of this machine; ``dask`` or ``ray``, the workers of
    #: a cluster, which see the same files (extra ``cluster``; for Ray, its own package).
    backend: Backend = "loky"
    #: Address of the cluster, such as ``tcp://host:8786``.
    scheduler: str | None = None
    #: Replace another run in the folder.
    overwrite: bool = False
    #: The options of the command, saved in the run as ``config.toml``.
    config: Mapping[str, Any] | None = None
    #: Called once, before the first fit, with the name of the metric and notes for the user.
    on_start: Callable[[str, Sequence[str]], None] | None = None
    #: Called with notes, such as that a damaged fit is fitted again.
    on_note: Callable[[str], None] | None = None
    #: Called after every epoch.
    on_epoch: Callable[[FitProgress], None] | None = None
    #: Called after every fit with the number of fits that are done, and of all.
    on_fit: Callable[[Fit, int, int], None] | None = None

    def __post_init__(self) -> None:
        if self.seeds is not None and not len(self.seeds):
            raise ConfigError("seeds: found none, expected at least one")
        if self.seeds is not None:
            require_number("seeds", len(self.seeds), low=1, high=MOST_SEEDS, whole=True)
            for seed in self.seeds:
                require_number("seeds", seed, low=0, high=2**63 - 1, whole=True)
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"jobs: found {self.jobs}, expected 1 or more")
        if self.backend not in get_args(Backend):
            known = ", ".join(get_args(Backend))
            raise ConfigError(f"backend: found {self.backend!r}, expected one of {known}")
        if self.fits is not None:
            number, count = self.fits
            if not 0 <= number < count:
                raise ConfigError(f"fits: found {number}/{count}, expected i/n with 0 <= i < n")
            for name in ("backend", "overwrite"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ConfigError(
                        f"fits: found {number}/{count} and {name}, expected one of them"
                    )

    def training_options(self, lr: float = TrainingOptions.lr) -> TrainingOptions:
        """Return how to train; ``lr`` is the default learning rate."""
        if isinstance(self.training, TrainingOptions):
            return self.training
        return TrainingOptions(**{"lr": lr, **(self.training or {})})

    def refuse(self, *names: str, reason: str) -> None:
        """Refuse options that an experiment cannot use, rather than ignore them."""
        for name in names:
            if getattr(self, name) != getattr(_DEFAULTS, name):
                raise ConfigError(f"{name}: found one, but {reason}")

    def note(self, text: str) -> None:
        """Pass a note to the caller, if it asked for notes."""
        if self.on_note is not None:
            self.on_note(text)

    @contextmanager
    def watching(self) -> Iterator[Callable[[FitProgress], None] | None]:
        """Yield the callback of epochs: the caller's function, or a bar in a notebook."""
        if self.on_epoch is not None or self.on_fit is not None:
            yield self.on_epoch
            return
        with notebook_bar("training") as update:
            yield None if update is None else lambda progress: update(progress.done, progress.total)

    def start(self, stage: Stage) -> None:
        """Tell the caller, if it asked, that training starts."""
        if self.on_start is not None:
            self.on_start(stage.task.metric, stage.notes())


_DEFAULTS = ExperimentOptions()


def with_keywords(
    options: ExperimentOptions | None, keywords: Mapping[str, Any]
) -> tuple[ExperimentOptions, dict[str, Any]]:
    """Return the options with those keywords that name one of them, and all other keywords.

    Options of training may be given by themselves, too, such as ``epochs=5``; and ``folds=10``
    for ``split="kfold:10"`` and ``attention_heads=2`` for a readout's own ``heads``, as at the
    command line.
    """
    if "folds" in keywords:
        if keywords.get("split") is not None:
            raise ConfigError("give folds or split, not both")
        rest = {name: value for name, value in keywords.items() if name != "folds"}
        keywords = {**rest, "split": f"kfold:{keywords['folds']}"}
    if "attention_heads" in keywords:
        if "heads" in keywords:
            raise ConfigError("give attention_heads or heads, not both")
        rest = {name: value for name, value in keywords.items() if name != "attention_heads"}
        keywords = {**rest, "heads": keywords["attention_heads"]}
    names = {field.name for field in fields(ExperimentOptions)}
    training = {field.name for field in fields(TrainingOptions)}
    given = {name: value for name, value in keywords.items() if name in names}
    others = {name: value for name, value in keywords.items() if name not in names | training}
    trained = {name: value for name, value in keywords.items() if name in training}
    for name in others:
        near = get_close_matches(name, names | training, n=1, cutoff=0.9)
        if near:
            raise ConfigError(f"found option {name!r}, expected {near[0]!r}")
    found = replace(options or _DEFAULTS, **given)
    if isinstance(found.training, TrainingOptions):
        return replace(found, training=replace(found.training, **trained)), others
    return replace(found, training={**(found.training or {}), **trained} or None), others
