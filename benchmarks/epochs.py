"""Epochs: of the head against the padded algorithm, and from the cache against the backbone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from histograph_post.caches import Cache
from histograph_post.capture import CapturePlan
from histograph_post.experiments.folds import Fold
from histograph_post.experiments.head_fits import make_head
from histograph_post.heads.histograph import accelerate
from histograph_post.runs.fits import FitSpec
from histograph_post.tasks import infer_task
from histograph_post.training.batches import HeadBatches, HeadNetwork
from histograph_post.training.loaded_cache import LoadedCache
from histograph_post.training.loop import Progress, Source, Trainer
from histograph_post.training.networks import GraphBatches, HistoryNetwork
from histograph_post.training.options import TrainingOptions

from . import head_steps
from .measuring import Ratio, race, speedup
from .workloads import GraphRows, Subject, Workloads

_CPU = torch.device("cpu")


class HeadTraining:
    """The default head on the first fold of a cache, always from the same weights.

    Args:
        cache: The cache.
        batch_size: Graphs of a batch.
        dim: Width of the head.
        memory_limit: Bytes that training may take.
    """

    def __init__(
        self, cache: Cache, *, batch_size: int, dim: int, memory_limit: int | None = None
    ) -> None:
        self._loaded = LoadedCache(cache, memory_limit=memory_limit)
        self.split = cache.splits.folds[0]
        self.task = infer_task(self._loaded.labels, "graph")
        self._options = TrainingOptions(epochs=1, batch_size=batch_size)
        self._spec = FitSpec("histograph", {"dim": dim}, self._options, fold=0, seed=0)
        self._made = make_head(self._spec, Fold(0, self._loaded, self.split), self.task)

    @classmethod
    def of(cls, work: Workloads, cache: Cache, *, memory_limit: int | None = None) -> HeadTraining:
        """Return it with the batch size and width of a suite."""
        sizes = work.sizes
        return cls(cache, batch_size=sizes.batch_size, dim=sizes.width, memory_limit=memory_limit)

    def run(self, epochs: int = 1, device: torch.device = _CPU) -> Progress:
        """Train and validate on the rows of the cache."""
        history = self._loaded.history(self.split.train)
        statistics = self._loaded.statistics(self.split.train)
        source = HeadBatches(self._loaded, history, self.task, device, statistics=statistics)
        head = copy.deepcopy(self._made.head)
        with accelerate.threads(head):
            return self._train(HeadNetwork(head).to(device), source, epochs)

    def run_plain(self) -> Progress:
        """Train and validate on the rows of the cache without the fast path."""
        accelerate.enabled = False
        try:
            return self.run()
        finally:
            accelerate.enabled = True

    def run_with_backbone(self, subject: Subject, *, trainable: bool) -> Progress:
        """Train and validate for an epoch on the graphs themselves.

        Args:
            subject: What was cached.
            trainable: Train the backbone as well.
        """
        network = HistoryNetwork(
            copy.deepcopy(subject.model).requires_grad_(trainable),
            CapturePlan.from_json(self._loaded.cache.manifest.capture),
            copy.deepcopy(self._made.head),
            self._made.standardizer,
            statistics="frozen",
        )
        return self._train(network, GraphBatches(subject.dataset, self.task, _CPU))

    def _train(self, network: nn.Module, source: Source, epochs: int = 1) -> Progress:
        options = replace(self._options, epochs=epochs)
        return Trainer(network, source, self.split, self.task, options, seed=0).run()


PADDED_FLOOR = 40.0
#: Speedup of an epoch over one with the frozen backbone, and over one that trains it.
DEEP_FLOORS = 3.5, 9.0
MOLECULE_FLOORS = 4.0, 10.0

#: A fast path that gains less than this is not worth its code.
RUNG_FLOOR = 1.3

CACHED, RECOMPUTED, TRAINED = "from the cache", "frozen backbone recomputed", "backbone trained"


def padded_epoch(work: Workloads) -> list[Ratio]:
    """Compare the head steps of an epoch with the literal algorithm, padded batch by batch."""
    sizes, nodes = work.sizes, work.proteins.num_nodes
    shuffled = nodes[torch.randperm(len(nodes), generator=torch.Generator().manual_seed(0))]
    batches = [
        GraphRows.random(shuffled[start : start + sizes.batch_size], sizes.deep + 1, sizes.width)
        for start in range(0, sizes.padded_batches * sizes.batch_size, sizes.batch_size)
        if start < len(nodes)
    ]
    head = head_steps.make_head(batches[0], sizes.width, head_steps.FORMS["default form"])

    def epoch(name: str) -> None:
        for rows in batches:
            head_steps.train_step(head, partial(head_steps.FORWARDS[name], head, rows))

    contenders = (head_steps.HEAD, head_steps.PADDED)
    medians = race({name: partial(epoch, name) for name in contenders}, rounds=sizes.rounds)
    largest = max(int(rows.batch.bincount().max()) for rows in batches)
    return [
        speedup(
            f"head steps of an epoch, PROTEINS, L = {sizes.deep + 1}",
            medians,
            *contenders,
            PADDED_FLOOR,
            note=f"{len(batches)} random batches of {sizes.batch_size}, largest graph {largest}; "
            f"{work.about('PROTEINS', work.proteins)}",
        )
    ]


def deep_epochs(work: Workloads) -> list[Ratio]:
    """Compare epochs of the deep GIN on PROTEINS."""
    return _cached_epochs(work, work.deep_gin, "PROTEINS", DEEP_FLOORS)


def molecule_epochs(work: Workloads) -> list[Ratio]:
    """Compare epochs of the molecule GCN on BBBP."""
    return _cached_epochs(work, work.molecule_gcn, "BBBP", MOLECULE_FLOORS)


def ladder(work: Workloads) -> list[Ratio]:
    """Compare epochs of the head in kernels with those of the same head in plain PyTorch."""
    subjects = {"BBBP": work.molecule_gcn, "NCI1": work.shallow_gin, "PROTEINS": work.deep_gin}
    found = []
    for name, subject in subjects.items():
        training = HeadTraining.of(work, work.cache(subject))
        kernels, plain = "kernels", "plain PyTorch"
        contenders = {kernels: training.run, plain: training.run_plain}
        medians = race(contenders, rounds=work.sizes.rounds)
        found.append(
            speedup(
                f"train-head epoch in kernels, {name}",
                medians,
                kernels,
                plain,
                RUNG_FLOOR,
                note=f"{len(training.split.train)} training graphs; {subject.about}",
            )
        )
    return found


def _cached_epochs(
    work: Workloads, subject: Subject, name: str, floors: tuple[float, float]
) -> list[Ratio]:
    """Compare an epoch of `train-head` with those of the same head on the running backbone."""
    training = HeadTraining.of(work, work.cache(subject))
    contenders: dict[str, Callable[[], Progress]] = {
        CACHED: training.run,
        RECOMPUTED: partial(training.run_with_backbone, subject, trainable=False),
        TRAINED: partial(training.run_with_backbone, subject, trainable=True),
    }
    medians = race(contenders, rounds=work.sizes.rounds)
    count = len(training.split.train)
    note = f"{count} training graphs in batches of {work.sizes.batch_size}; {subject.about}"
    return [
        speedup(f"train-head epoch, {name}", medians, CACHED, other, floor, note=note)
        for other, floor in zip((RECOMPUTED, TRAINED), floors, strict=True)
    ]
