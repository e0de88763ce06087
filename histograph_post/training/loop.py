"""The one training loop.

It knows nothing of heads, backbones or caches: a *source* yields batches and a *network* maps their
inputs to outputs. The stages differ only in where the batches come from and in which parameters are
trainable.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..splits import Split
from ..tasks import Missing, TargetScale, Task
from ..utils.files import save_state
from ..utils.inert import read_plain
from .options import LOWEST_LR, PLATEAU_EPOCHS, TrainingOptions
from .ranks import Ranks

#: Called after every epoch.
OnEpoch = Callable[["Progress"], None]

#: Seed of the order of batches in every run, so that compared runs do not differ in it.
ORDER_SEED = 0


@dataclass(frozen=True)
class Step:
    """One batch as the loop sees it."""

    #: What the network's forward pass takes.
    inputs: Any
    #: What it should return: ``[rows]`` or ``[rows, targets]``.
    targets: Tensor
    #: Label row of each target, to put predictions back in order: ``[rows]``.
    rows: np.ndarray
    #: Whether targets are missing; None if that is not known.
    missing: Missing | None = None


class Source(Protocol):
    """Where batches come from."""

    #: Every label, missing ones NaN: ``[rows, targets]``.
    labels: np.ndarray

    def batches(self, rows: np.ndarray, *, batch_size: int, seed: int | None) -> Iterator[Step]:
        """Yield the rows in batches: shuffled by ``seed``, or in a fixed order without one."""
        ...

    def num_batches(self, rows: np.ndarray, *, batch_size: int) -> int:
        """Return how many batches these rows make."""
        ...


@dataclass
class Progress:
    """How far a run has come, and its best epoch so far."""

    epoch: int = 0
    #: The first one is 0; -1 is the network before training.
    best_epoch: int = -1
    #: Validation scores of the best epoch; empty without a validation part.
    best_valid: dict[str, float] = field(default_factory=dict)
    best_loss: float = math.inf
    best_state: dict[str, Tensor] = field(default_factory=dict)
    log: list[dict[str, float]] = field(default_factory=list)
    #: The share of the epochs that are over; all of them once training has stopped.
    share_done: float = 0.0
    #: Whether the loss or an output has become NaN or infinite, which ends training.
    diverged: bool = False


class Trainer:
    """Train a network on the training part and keep the weights of its best epoch.

    The best epoch is the one with the best validation score, and among equals the one with the
    lowest validation loss; without a validation part it is the last one. The test part is never
    used.

    Args:
        network: Maps :attr:`Step.inputs` to outputs; its ``aux_loss``, if any, joins the loss.
        source: Yields batches.
        split: Which rows train and validate.
        task: The loss and the tracked metric.
        options: How to train.
        seed: Of dropout. Initial weights are the caller's, and the order of the batches is the
            same for every seed and every network that is compared.
        parameters: Parameter groups with an ``lr`` each; all trainable parameters by default.
        before_epoch: Called with the number of every epoch before it starts, to freeze or
            unfreeze parameters.
        starts_solved: Whether the network may be best before it is trained.
    """

    def __init__(
        self,
        network: nn.Module,
        source: Source,
        split: Split,
        task: Task,
        options: TrainingOptions,
        *,
        seed: int,
        parameters: Sequence[Mapping[str, Any]] | None = None,
        before_epoch: Callable[[int], None] | None = None,
        starts_solved: bool = False,
    ) -> None:
        self.network = network
        self.source = source
        self.split = split
        self.task = task
        self.options = options
        self.seed = seed
        self.progress = Progress()
        #: The processes that train this network together, if the source splits its batches.
        self.ranks: Ranks | None = getattr(source, "ranks", None)
        self._before_epoch = before_epoch
        self._starts_solved = starts_solved
        trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
        groups = [dict(group) for group in parameters or [{"params": trainable}]]
        if not any(list(group["params"]) for group in groups):
            raise ConfigError("training: found no trainable parameters, expected at least one")
        self.optimizer = torch.optim.AdamW(
            groups, lr=options.lr, weight_decay=options.weight_decay, fused=True
        )
        groups = self.optimizer.param_groups
        #: Number of trainable values.
        self.num_parameters = sum(each.numel() for group in groups for each in group["params"])
        self._top_lrs = [float(group["lr"]) for group in groups]
        self._plateau_factor = 1.0
        training_labels = source.labels[split.train]  # [rows, targets]
        self.scale = TargetScale.of(task, training_labels)
        weights = task.balancing_weights(training_labels) if options.balance else {}
        device = groups[0]["params"][0].device
        self._loss_weights = {name: value.to(device) for name, value in weights.items()}

    # --- resuming --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return all that :meth:`restore` needs to continue as if never interrupted."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "plateau_factor": self._plateau_factor,
            "progress": vars(self.progress),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state` returned."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._plateau_factor = state["plateau_factor"]
        self.progress = Progress(**state["progress"])

    # --- the loop --------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether all epochs are over, or the score has not improved for long enough."""
        waited = self.progress.epoch - 1 - self.progress.best_epoch
        stale = 0 < self.options.patience <= waited
        return self.progress.epoch >= self.options.epochs or stale or self.progress.diverged

    def run(self, on_epoch: OnEpoch | None = None) -> Progress:
        """Train to the end; leave the network with the weights of the best epoch."""
        while not self.is_done:
            self.run_epoch()
            if on_epoch is not None:
                on_epoch(self.progress)
        return self.finish()

    def run_epoch(self) -> None:
        """Train for an epoch, validate, and keep the weights if they are the best so far."""
        if self._starts_solved and not self.progress.best_state and len(self.split.valid):
            self.progress.epoch = -1
            self._compare(*self._evaluate(self.split.valid))
            self.progress.epoch = 0
        # Seeded by epoch: a resumed run draws the same numbers as an uninterrupted one.
        # Each rank draws dropout of its own, for its own graphs.
        rank = () if self.ranks is None or self.ranks.is_first else (self.ranks.rank,)
        torch.manual_seed(_mixed(self.seed, self.progress.epoch, *rank))
        if self._before_epoch is not None:
            self._before_epoch(self.progress.epoch)
        if not self.progress.best_state:
            self.progress.best_state = self._weights()  # in case the first epoch diverges
        loss, lr = self._train_epoch()
        measured = {"epoch": self.progress.epoch, "loss": loss, "lr": lr}
        if not math.isfinite(loss):
            self.progress.diverged = True
        elif len(self.split.valid):
            measured |= self._compare(*self._evaluate(self.split.valid))
        elif all(bool(value.isfinite().all()) for value in self._weights().values()):
            self._keep({}, math.inf)
        else:
            self.progress.diverged = True
        finite = {name: value for name, value in measured.items() if math.isfinite(value)}
        self.progress.log.append(finite)
        self.progress.epoch += 1
        over = self.progress.epoch / self.options.epochs
        self.progress.share_done = 1.0 if self.is_done else over

    def finish(self) -> Progress:
        """Leave the network with the weights of the best epoch; without one, with the first."""
        self.network.load_state_dict(self.progress.best_state)
        return self.progress

    def predict(self, rows: np.ndarray) -> np.ndarray:
        """Return the outputs for these rows, in the units of the labels: ``[rows, out_dim]``."""
        outputs, _ = self._evaluate(rows)
        return outputs

    def _train_epoch(self) -> tuple[float, float]:
        """Train for an epoch; return the mean loss and the last learning rate."""
        self.network.train()
        network = self.network if self.ranks is None else self.ranks.wrap(self.network)
        # The host reads no result before the epoch is over: it would wait for the device.
        total, seen, lr = torch.zeros(()), 0, 0.0
        rows, size = self.split.train, self.options.batch_size
        num_steps = self.source.num_batches(rows, batch_size=size)
        seed = _mixed(ORDER_SEED, self.progress.epoch)
        batches = self.source.batches(rows, batch_size=size, seed=seed)
        for number, step in enumerate(batches, start=1):
            lr = self._set_lr(self.progress.epoch + number / num_steps)
            self.optimizer.zero_grad(set_to_none=True)
            outputs = network(step.inputs)  # [rows, out_dim]
            targets = self.scale.apply(step.targets)  # [rows] or [rows, targets]
            loss = self.task.loss(outputs, targets, missing=step.missing, **self._loss_weights)
            auxiliary = getattr(self.network, "aux_loss", None)
            whole = loss if auxiliary is None else loss + auxiliary
            if self.ranks is not None:
                # The mean is over the labels of the whole batch, of which this rank has a part;
                # gradients are averaged over the ranks.
                part = self.task.loss_weight(targets, self._loss_weights.get("class_weight"))
                whole = whole * (self.ranks.size * part / self.ranks.sum(part).clamp(min=1e-12))
            whole.backward()
            if self.options.clip:
                for group in self.optimizer.param_groups:
                    nn.utils.clip_grad_norm_(group["params"], self.options.clip)
            self.optimizer.step()
            count = len(targets) if len(step.rows) else 0  # a rank without graphs counts none
            total, seen = torch.add(total, loss.detach(), alpha=count), seen + count
            del step, outputs, loss, whole  # the next batch can have their memory
        if self.ranks is not None:
            self.ranks.same_buffers(self.network)
        return self._mean(total, seen), lr

    def _mean(self, total: Tensor, seen: int) -> float:
        """Return the mean of a sum over so many rows, and over those of other ranks."""
        if self.ranks is not None:
            total, count = self.ranks.sum(torch.stack([total, total.new_tensor(seen)]))
            seen = int(count)
        return float(total) / max(seen, 1)

    def _set_lr(self, epochs_done: float) -> float:
        """Set the learning rates of a step that ends ``epochs_done`` epochs into the run."""
        factor = self.options.lr_factor(epochs_done, self._plateau_factor)
        for group, top in zip(self.optimizer.param_groups, self._top_lrs, strict=True):
            group["lr"] = top * factor
        return self._top_lrs[0] * factor

    def _compare(self, outputs: np.ndarray, loss: float) -> dict[str, float]:
        """Score the validation part; keep the weights if they are the best so far."""
        if not (np.isfinite(outputs).all() and math.isfinite(loss)):
            self.progress.diverged = True
            return {}
        scores = self.task.scores(outputs, self.source.labels[self.split.valid])
        if self._is_better(scores, loss):
            self._keep(scores, loss)
        else:
            waited = self.progress.epoch - self.progress.best_epoch
            if self.options.schedule == "plateau" and waited % PLATEAU_EPOCHS == 0:
                self._plateau_factor = max(LOWEST_LR, self._plateau_factor / 2)
        return {"valid_loss": loss} | {f"valid_{name}": value for name, value in scores.items()}

    def _is_better(self, scores: Mapping[str, float], loss: float) -> bool:
        metric, sign = self.task.metric, 1 if self.task.higher_is_better else -1
        score, best = scores.get(metric), self.progress.best_valid.get(metric)
        if score is None or best is None or score == best:
            return loss < self.progress.best_loss  # infinite before the first
        return sign * score > sign * best

    def _keep(self, scores: Mapping[str, float], loss: float) -> None:
        self.progress.best_epoch = self.progress.epoch
        self.progress.best_valid = dict(scores)
        self.progress.best_loss = loss
        self.progress.best_state = self._weights()

    def _weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights as they are now."""
        return {name: value.detach().clone() for name, value in self.network.state_dict().items()}

    @torch.no_grad()
    def _evaluate(self, rows: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the outputs for these rows, in the units of the labels, and the mean loss."""
        self.network.eval()
        total, seen = torch.zeros(()), 0
        parts, order = [], []  # outputs and the rows they are of
        for step in self.source.batches(rows, batch_size=self.options.batch_size, seed=None):
            outputs = self.network(step.inputs)  # [rows, out_dim]
            targets = self.scale.apply(step.targets)  # [rows] or [rows, targets]
            total = total + self.task.loss(outputs, targets, missing=step.missing) * len(step.rows)
            seen += len(step.rows)
            parts.append(outputs.float())
            order.append(step.rows)
        if self.ranks is not None:
            found_by_each = self.ranks.gather(([part.cpu() for part in parts], order))
            parts = [part for own, _ in found_by_each for part in own]
            order = [each for _, own in found_by_each for each in own]
        # The position of each row in the result: batches may come in any order.
        position = np.empty(len(self.source.labels), dtype=np.int64)
        position[rows] = np.arange(len(rows))
        found = np.empty((len(rows), self.task.out_dim))
        if parts:
            outputs = torch.cat(parts).cpu()  # [rows, out_dim], in one transfer
            found[position[np.concatenate(order)]] = self.scale.undo(outputs.numpy())
        return found, self._mean(total, seen)


def _mixed(*seeds: int) -> int:
    """Mix seeds into one, so that neighbouring seeds and epochs give unrelated streams."""
    return int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0] >> 1)


# --- resuming after a kill

#: The state of a fit in training; the caller removes it once the fit is saved.
STATE_NAME = "state.pt"

#: Seconds between saved states: saving takes a few milliseconds, a small fit seconds.
SAVE_EVERY = 1.0


def _resume(trainer: Trainer, path: Path, plan: str) -> None:
    """Resume from a saved state of the same plan; warn of a damaged one and ignore it."""
    fresh = copy.deepcopy(trainer.state())
    try:
        found = cast(dict[str, Any], read_plain(path))
        if found.pop("plan", "") == plan:
            trainer.restore(found)
    except Exception as error:  # an edited file can raise anything
        trainer.restore(fresh)
        reason = " ".join(str(error).split())[:200]
        text = f"{path}: found a state that cannot be resumed ({reason}); the fit begins again"
        warnings.warn(text, stacklevel=3)


def train_resumably(
    trainer: Trainer,
    folder: Path,
    *,
    plan: str = "",
    on_epoch: OnEpoch | None = None,
    save_every: float = SAVE_EVERY,
) -> float:
    """Train to the end, from the state in ``folder`` if there is one; return the median epoch time.

    A run that was killed and resumed has the weights of one that was not.

    Args:
        trainer: Made just as it was when the state was saved.
        folder: Where the state is saved; it exists.
        plan: Identifies the run; a state of another one is ignored.
        on_epoch: Called after every epoch.
        save_every: Seconds between saved states.
    """
    path = folder / STATE_NAME
    ranks, writes = trainer.ranks, trainer.ranks is None or trainer.ranks.is_first
    if writes and path.exists():
        _resume(trainer, path, plan)
    if ranks is not None:  # all ranks continue from the state of the first
        trainer.restore(ranks.state_of_first(trainer.state()))
    seconds: list[float] = []
    saved = time.perf_counter()
    while not trainer.is_done:
        started = time.perf_counter()
        trainer.run_epoch()
        now = time.perf_counter()
        seconds.append(now - started)
        if writes and now - saved >= save_every:
            save_state(path, {**trainer.state(), "plan": plan})
            saved = time.perf_counter()
        if on_epoch is not None:
            on_epoch(trainer.progress)
    trainer.finish()
    return float(np.median(seconds)) if seconds else 0.0
