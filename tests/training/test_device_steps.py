"""What a training step asks of a device: budgets of kernels, reads and copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import histograph_post as hg
from histograph_post.caches import Cache
from histograph_post.experiments.folds import Fold
from histograph_post.experiments.head_fits import make_head
from histograph_post.heads.base import Readout
from histograph_post.heads.registry import build_head, head_info, head_names, is_solved
from histograph_post.runs.fits import FitSpec
from histograph_post.splits import Split
from histograph_post.tasks import infer_task
from histograph_post.training.batches import HeadBatches, HeadNetwork
from histograph_post.training.loaded_cache import LoadedCache
from histograph_post.training.loop import Trainer
from histograph_post.training.options import TrainingOptions

from ..helpers import demo_graphs, make_model
from ..rehearsal import Counts, rehearse

#: Graphs of a batch.
SIZE = 16


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedCache:
    return LoadedCache(_cache(tmp_path_factory.mktemp("steps")))


def _cache(folder: Path, **options: object) -> Cache:
    made = hg.cache(make_model(), demo_graphs(3 * SIZE), folder / "c", device="cpu", **options)
    assert made is not None
    return made


def one_step(loaded: LoadedCache, name: str = "histograph", **device: int) -> Counts:
    """Return what one step more asks of the device."""
    task, found = infer_task(loaded.labels, "graph"), []
    options = TrainingOptions(epochs=1, batch_size=SIZE)
    rows = np.arange(3 * SIZE)
    for steps in (1, 2):
        split = Split(rows[: steps * SIZE], np.arange(0), np.arange(0))
        # Standardised by the same rows, however many train.
        fold = Fold(0, loaded, Split(rows, rows[:SIZE], np.arange(0)))
        head = make_head(FitSpec(name, {}, options, fold=0, seed=0), fold, task).head
        known = loaded.statistics(rows) if hasattr(head, "describe") else None
        with rehearse(**device) as counts:
            there = torch.device("cuda", 0)
            edges = head_info(name).needs_edge_index
            history = loaded.history(rows)
            source = HeadBatches(loaded, history, task, there, edges=edges, statistics=known)
            trainer = Trainer(HeadNetwork(head).to(there), source, split, task, options, seed=0)
            counts.clear()
            trainer.run()
        found.append(counts)
    first, both = found
    return Counts(
        both.kernels - first.kernels, both.reads - first.reads, both.copies - first.copies
    )


def test_a_step_of_the_default_head_reads_nothing_back(loaded: LoadedCache) -> None:
    step = one_step(loaded)
    assert not step.reads
    assert step.copies.total() == 2
    assert all(line.startswith("pinned") for line in step.copies)
    assert step.kernels.total() <= 144


def test_a_history_that_the_device_has_no_room_for_is_sent_ahead(loaded: LoadedCache) -> None:
    anew = LoadedCache(loaded.cache)  # nothing of it is on a device yet
    step = one_step(anew, memory=100_000)  # enough for the statistics
    assert not step.reads
    assert step.copies.total() == 3
    assert all(line.startswith("pinned") for line in step.copies)


def test_half_precision_is_sent_as_it_is_stored_and_widened_there(tmp_path: Path) -> None:
    cache = _cache(tmp_path, dtype="float16")
    step = one_step(LoadedCache(cache, memory_limit=40_000))  # the history stays in the file
    assert not step.reads
    assert step.copies.total() == 3
    assert step.kernels["_to_copy"] >= 1


#: Kernels, blocking reads and copies of a step: what it was when this was written. The paper's own
#: head needs no statistics; operators of PyTorch Geometric ask for sizes on the way.
BUDGETS = {
    **{"histograph": (144, 0, 2), "histograph-paper": (142, 0, 2)},
    **dict.fromkeys(("mean", "sum", "max", "layer-mean", "jk-cat", "jk-max"), (36, 0, 1)),
    **{"jk-lstm": (357, 0, 1), "attention": (71, 0, 1), "set2set": (266, 0, 1)},
    **{"sortpool": (89, 4, 2), "set-transformer": (204, 4, 3), "gmt": (206, 2, 3)},
    **{"topkpool": (280, 8, 1), "sagpool": (310, 8, 1), "edgepool": (288, 8, 5)},
    **{"diffpool": (215, 2, 2), "mincutpool": (231, 2, 4), "sopool": (48, 0, 2)},
    **{"sopool-attention": (38, 0, 1), "dkepool": (45, 0, 1), "dkepool-robust": (190, 0, 2)},
}


@pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning")  # PyG's, of its operators
def test_every_readout_trains_within_its_budget(loaded: LoadedCache) -> None:
    # A readout that is solved has no steps; ASAP makes sparse matrices, which this device has not.
    names = {name for name in head_names("graph") if not is_solved(name, "graph")} - {"asap"}
    assert names >= set(BUDGETS)  # other tests may have registered more
    for name, budget in BUDGETS.items():
        step = one_step(loaded, name)
        found = (step.kernels.total(), step.reads.total(), step.copies.total())
        assert np.less_equal(found, budget).all(), (name, found, step.reads, step.copies)


@pytest.mark.filterwarnings("ignore:at..frobenius_norm is deprecated")  # PyG's MinCut on MPS
@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_outputs_are_those_of_the_cpu(loaded: LoadedCache, kind: str) -> None:
    gathered = loaded.cache.gather(range(SIZE), edges=True)
    owners = torch.arange(SIZE).repeat_interleave(gathered.ptr.diff())  # [num_nodes]
    given = (gathered.history, owners, gathered.edge_index)
    for name in BUDGETS:
        torch.manual_seed(0)
        head = build_head(name, loaded.cache.widths, 1, dim=8).eval()
        expected = _outputs(head, *given)
        with rehearse(kind, sums="any"):
            there = torch.device(kind, 0)
            found = _outputs(head.to(there), *(each.to(there) for each in given)).cpu()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def _outputs(head: Readout, history: Tensor, owners: Tensor, edge_index: Tensor) -> Tensor:
    return head(history, owners, num_graphs=SIZE, edge_index=edge_index).detach()
