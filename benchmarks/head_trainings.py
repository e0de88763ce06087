"""A head trained as `train-head` trains it, and with its backbone running."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from histograph_post.caches import Cache
from histograph_post.capture import CapturePlan
from histograph_post.experiments.head_fits import make_head
from histograph_post.heads.histograph import accelerate
from histograph_post.runs.fits import FitSpec
from histograph_post.tasks import infer_task
from histograph_post.training.graph_batches import GraphBatches
from histograph_post.training.head_batches import HeadBatches
from histograph_post.training.loaded_cache import LoadedCache
from histograph_post.training.loop import Progress, Source, Trainer
from histograph_post.training.networks import HeadNetwork, HistoryNetwork
from histograph_post.training.options import TrainingOptions

from .workloads import Subject, Workloads

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
        self._made = make_head(self._spec, self._loaded, self.split, self.task)

    @classmethod
    def of(cls, work: Workloads, cache: Cache, *, memory_limit: int | None = None) -> HeadTraining:
        """Return it in the sizes of a suite."""
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

    def run_with_backbone(self, subject: Subject, *, moves: bool) -> Progress:
        """Train and validate for an epoch on the graphs themselves.

        Args:
            subject: What was cached.
            moves: Train the backbone, too.
        """
        network = HistoryNetwork(
            copy.deepcopy(subject.model).requires_grad_(moves),
            CapturePlan.from_json(self._loaded.cache.manifest.capture),
            copy.deepcopy(self._made.head),
            self._made.standardizer,
            statistics="frozen",
        )
        return self._train(network, GraphBatches(subject.dataset, self.task, torch.device("cpu")))

    def _train(self, network: nn.Module, source: Source, epochs: int = 1) -> Progress:
        options = replace(self._options, epochs=epochs)
        return Trainer(network, source, self.split, self.task, options, seed=0).run()
