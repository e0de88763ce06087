"""Ten seeds of one head trained as one, against one seed."""

from __future__ import annotations

import numpy as np

from histograph_post.training import Trainer, run_epoch

from .head_trainings import HeadTraining
from .measuring import Ratio, cost, race
from .workloads import Subject, Workloads

CEILING = 4.0
SEEDS = 10
TOGETHER, ALONE = f"{SEEDS} seeds as one", "one seed"
#: Largest difference of the outputs after an epoch, in units of their deviation.
TOLERANCE = 1e-2


def seeds_together(work: Workloads) -> list[Ratio]:
    """Compare an epoch of all seeds with an epoch of one of them."""
    subjects = {"NCI1": work.shallow_gin, "PROTEINS": work.deep_gin, "BBBP": work.molecule_gcn}
    return [_seeds(work, subject, name) for name, subject in subjects.items()]


def _seeds(work: Workloads, subject: Subject, name: str) -> Ratio:
    training = HeadTraining.of(work, work.cache(subject))
    together, (alone,) = training.trainers(range(SEEDS)), training.trainers([SEEDS - 1])
    medians = race(
        {TOGETHER: lambda: run_epoch(together), ALONE: alone.run_epoch},
        rounds=work.sizes.rounds,
    )
    difference = _difference(*training.trainers(range(SEEDS)))
    return cost(
        f"{SEEDS} seeds trained as one, {name}",
        medians,
        TOGETHER,
        ALONE,
        CEILING,
        note=f"outputs after an epoch differ by {difference:.0e} deviations; {subject.about}",
        same_results=difference <= TOLERANCE,
    )


def _difference(*trainers: Trainer) -> float:
    """Return how far the last seed's outputs after an epoch are from those it has alone."""
    last = trainers[-1]
    state = last.state()
    start = {name: value.clone() for name, value in state["network"].items()}
    run_epoch(trainers)
    found = last.predict(last.split.valid)  # [rows, out_dim]
    alone = Trainer(last.network, last.source, last.split, last.task, last.options, seed=last.seed)
    last.network.load_state_dict(start)
    alone.run_epoch()
    expected = alone.predict(last.split.valid)
    return float(np.abs(found - expected).max() / max(expected.std(), 1e-12))
