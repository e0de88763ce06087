"""The options that commands share, declared once: training, the head, experiments, new data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from histograph_post.utils.decoding import MOST_SEEDS
from histograph_post.utils.machine import NODE_BUDGET

from . import options as opt
from .command import OptionGroup

if TYPE_CHECKING:
    from histograph_post import ExperimentOptions

    from .progress import ExperimentWatch
    from .terminal import Terminal

#: What the letters after a number of bytes stand for.
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True)
class TrainingFlags(OptionGroup):
    """How to train, except for the learning rate: not every command has just one."""

    PANEL = opt.TRAINING

    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Train at most N epochs.")] = 100
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Graphs per batch.")] = 64
    weight_decay: Annotated[
        float, typer.Option("--weight-decay", min=0, help="Weight decay of AdamW.")
    ] = 1e-4
    schedule: Annotated[
        opt.Schedule, typer.Option("--schedule", help="How the learning rate decays.")
    ] = "cosine"
    warmup: Annotated[
        float,
        typer.Option("--warmup", min=0, help="Raise the learning rate over the first X epochs."),
    ] = 2.0
    clip: Annotated[
        float,
        typer.Option("--clip", min=0, help="Clip the gradient norm at X; 0 for no clipping."),
    ] = 1.0
    patience: Annotated[
        int,
        typer.Option(
            "--patience",
            min=0,
            help="Stop after N epochs without a better validation score; 0 never stops early.",
        ),
    ] = 30
    balance: Annotated[
        bool, typer.Option("--balance", help="Give rare classes more weight in the loss.")
    ] = False

    def options(self, lr: float | None) -> dict[str, Any]:
        """Return what the library takes; without a learning rate it chooses one for the data."""
        given = dict(vars(self))
        return given if lr is None else {**given, "lr": lr}


@dataclass(frozen=True)
class HeadFlags(OptionGroup):
    """The options of a head."""

    PANEL = opt.HEAD

    dim: Annotated[int | None, typer.Option(min=1, help="Width of the head.")] = None
    attention_heads: Annotated[
        int | None, typer.Option(min=1, help="Attention heads, for readouts that have attention.")
    ] = None
    #: Stands for a list of readouts elsewhere.
    heads: Annotated[
        int | None,
        typer.Option("--heads", min=1, hidden=True, help="The earlier name of --attention-heads."),
    ] = None
    head_args: opt.HeadArgsOption = field(default_factory=list)

    def options(self) -> dict[str, Any]:
        """Return what the library takes: what is not given has the head's own default."""
        from histograph_post.models import parse_args

        sizes = {"dim": self.dim, "heads": self.attention_heads or self.heads}
        given = {name: value for name, value in sizes.items() if value is not None}
        return given | parse_args(self.head_args)


@dataclass(frozen=True)
class ExperimentFlags(OptionGroup):
    """What every experiment on a cache takes: ``ExperimentOptions`` as flags."""

    PANEL = opt.EXPERIMENT

    task: opt.TaskOption = "auto"
    metric: opt.MetricOption = None
    folds: opt.FoldsOption = None
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="FILE|SPEC",
            help="Replace the cache's own split: a splits file, random, stratified, kfold:K, ...",
        ),
    ] = None
    splits: Annotated[
        str | None, typer.Option("--splits", hidden=True, help="The earlier name of --split.")
    ] = None
    split_seed: opt.SplitSeedOption = 0
    seeds: opt.SeedsOption = "0-2"
    standardize: Annotated[
        bool,
        typer.Option(
            "--standardize/--no-standardize",
            help="Standardize every layer with the statistics of the training graphs.",
        ),
    ] = True
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Calibrate probabilities by a temperature fitted on the validation part.",
        ),
    ] = True
    memory_limit: Annotated[
        str | None,
        typer.Option(
            "--memory-limit",
            metavar="SIZE",
            help="Memory that training may use beyond the libraries, such as 4GB; a cache that "
            "needs more is read batch by batch.",
        ),
    ] = None
    device: opt.DeviceOption = "auto"
    jobs: opt.JobsOption = None
    backend: opt.BackendOption = "loky"
    scheduler: opt.SchedulerOption = None
    overwrite: opt.OverwriteOption = False

    def options(
        self,
        terminal: Terminal,
        watch: ExperimentWatch,
        training: Mapping[str, Any],
        *,
        warm_start: bool = False,
    ) -> ExperimentOptions:
        """Return what the library takes."""
        from histograph_post import ExperimentOptions

        given = dict(vars(self))
        folds, split, earlier = (given.pop(name) for name in ("folds", "split", "splits"))
        given |= {
            "seeds": None if self.seeds is None else parse_seeds(self.seeds),
            "split": split_spec("--split", split or earlier, folds),
            "memory_limit": parse_size(self.memory_limit),
        }
        if "fits" in given:  # the trials of a search are shared out otherwise
            given["fits"] = parse_share("--fits", given["fits"])
        return ExperimentOptions(
            **given,
            warm_start=warm_start,
            training=training,
            config=terminal.options,
            on_start=watch.started,
            on_note=terminal.note,
            on_epoch=watch.epoch_done,
            on_fit=watch.fit_done,
        )


@dataclass(frozen=True)
class ArrayFlags(ExperimentFlags):
    """What an experiment takes whose fits the jobs of an array can share."""

    fits: opt.FitsOption = None


@dataclass(frozen=True)
class NewDataFlags(OptionGroup):
    """What every command takes that uses a run on new data."""

    checkpoint: opt.MovedCheckpointOption = None
    model: opt.MovedModelOption = None
    head: opt.RunHeadOption = None
    key_map: opt.KeyMapOption = None
    data_root: opt.DataRootOption = None
    data_args: opt.DataArgsOption = field(default_factory=list)
    node_budget: opt.NodeBudgetOption = NODE_BUDGET
    device: opt.DeviceOption = "auto"
    trust_checkpoint: opt.TrustOption = False
    overwrite: opt.OverwriteOption = False

    def options(self, terminal: Terminal) -> dict[str, Any]:
        """Return what the library takes."""
        from histograph_post.models import parse_args

        given = {**vars(self), "data_args": parse_args(self.data_args), "config": terminal.options}
        return given | {"trust": given.pop("trust_checkpoint")}


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that `0-4` or `0,3,7` stand for."""
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part.strip())
        if found is None:
            raise typer.BadParameter(f"--seeds {text}: expected numbers such as 0-4 or 0,3,7")
        first, last = int(found[1]), int(found[2] or found[1])
        if last - first >= MOST_SEEDS:
            raise typer.BadParameter(f"--seeds {text}: expected at most {MOST_SEEDS} of them")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


def parse_share(flag: str, text: str | None) -> tuple[int, int] | None:
    """Return which job of how many `0/4` stands for."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise typer.BadParameter(f"{flag} {text}: expected I/N with I from 0 to N - 1, as in 0/4")
    return int(found[1]), int(found[2])


def parse_size(text: str | None) -> int | None:
    """Return the bytes that `4GB` or `500M` stand for."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)b?\s*", text.lower())
    if found is None:
        raise typer.BadParameter(f"--memory-limit {text}: expected a size such as 4GB or 500MB")
    size = int(float(found[1]) * _UNITS[found[2]])
    if size < _UNITS["k"]:  # a unit was forgotten
        raise typer.BadParameter(f"--memory-limit {text}: found {size} bytes, expected 4GB or so")
    return size


def split_spec(flag: str, split: str | None, folds: int | None) -> str | None:
    """Return the split that is asked for, by that flag or by `--folds`; None for neither."""
    if split is not None and folds is not None:
        raise typer.BadParameter(f"give --folds or {flag}, not both")
    return split if folds is None else f"kfold:{folds}"
