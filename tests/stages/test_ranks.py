"""One network, several processes: what torchrun starts gives what one process would."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import histograph_post as hg
from histograph_post.caches.caching import cache
from histograph_post.data import GraphDataset, from_graphs, load_data
from histograph_post.errors import ConfigError, WorkerError
from histograph_post.experiments.options import FitProgress
from histograph_post.tasks import infer_task
from histograph_post.training.loop import Step, train_resumably
from histograph_post.training.networks import GraphBatches
from histograph_post.training.ranks import Ranks

from ..helpers import demo_graphs, make_model, node_labelled

#: Seven graphs a batch: halves that are not alike, and a last one that is too small for all.
QUICK = hg.TrainingOptions(epochs=2, batch_size=7, lr=1e-2)

# Processes that begin as this one is save seconds of importing; no thread of it holds a lock.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


def run_ranks(work: Callable[[int], None], size: int = 2) -> list[int | None]:
    """Do some work in processes that know of each other as those of torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def enter(rank: int) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size}
        given = {**place, "RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in given.items()})
        work(rank)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=enter, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module, GraphDataset]:
    """A cache, the model with batch norms that it is of, and its data."""
    folder = tmp_path_factory.mktemp("ranks") / "demo.cache"
    model, data = make_model("gin"), load_data("demo:", args={"num_graphs": 30})
    cache(model, data, folder)
    return folder, model, data


def pretrain(out: Path) -> hg.Run:
    args: dict[str, Any] = {"hidden": 8, "norm": "none", "num_layers": 2}
    data: dict[str, Any] = {"data_args": {"num_graphs": 30}}
    return hg.pretrain("gcn", "demo:", out, model_args=args, training=QUICK, **data)


def finetune(
    source: tuple[Path, torch.nn.Module, GraphDataset], out: Path, dropout: float = 0.0, **more: Any
) -> hg.Run:
    folder, model, data = source
    head_options = {"dim": 8, "dropout": dropout}
    options: dict[str, Any] = {"head_options": head_options, "model": model, "data": data, **more}
    options = {"training": QUICK, **options}
    return hg.finetune(folder, out, head="jk-cat", backbone_lr=1e-2, unfreeze_every=1, **options)


def test_two_ranks_give_what_one_process_gives(source: Any, tmp_path: Path) -> None:
    def both(out: Path) -> None:
        pretrain(out / "pretrained")
        finetune(source, out / "tuned")

    both(tmp_path / "one")
    assert run_ranks(lambda rank: both(tmp_path / "two")) == [0, 0]
    for name in ("pretrained", "tuned"):
        one, two = (tmp_path / place / name for place in ("one", "two"))
        assert (two / "run.json").read_bytes() == (one / "run.json").read_bytes()
        expected = load_file(one / "fold-0/model.safetensors")
        found = load_file(two / "fold-0/model.safetensors")
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4)
        logs = [(run / "metrics.jsonl") for run in (one, two)] if name == "tuned" else []
        logs = logs or [run / "fold-0/metrics.jsonl" for run in (one, two)]
        read = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
        for before, after in zip(*read, strict=True):
            assert after["loss"] == pytest.approx(before["loss"], abs=1e-5)
    # What started at the checkpoint has moved away from it, and the frozen statistics have not.
    tuned = load_file(tmp_path / "two/tuned/fold-0/model.safetensors")
    start = source[1].state_dict()
    changed = {key for key, value in tuned.items() if not torch.equal(value, start[key].cpu())}
    assert changed
    assert not any("running" in key for key in changed)


def test_ranks_that_were_killed_resume_as_if_they_had_not_been(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_resumably.__kwdefaults__ is not None
    monkeypatch.setitem(train_resumably.__kwdefaults__, "save_every", 0.0)
    training = hg.TrainingOptions(epochs=3, batch_size=7, lr=1e-2)

    def train(out: Path, **more: Any) -> Callable[[int], None]:
        def work(rank: int) -> None:
            finetune(source, out, 0.3, training=training, **more)

        return work

    def kill(progress: FitProgress) -> None:
        if progress.head.endswith("-finetuned") and progress.measured["epoch"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    run_ranks(train(tmp_path / "whole"))
    first, other = run_ranks(train(tmp_path / "run", on_epoch=kill))
    assert first == -signal.SIGKILL
    assert other
    (state,) = (tmp_path / "run").rglob("state.pt")
    assert state.parent.parent.name == "jk-cat-finetuned"
    assert run_ranks(train(tmp_path / "run")) == [0, 0]
    for path in ("results.json", "metrics.jsonl", "fold-0/model.safetensors", "predictions.csv"):
        assert (tmp_path / "run" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes()


def test_a_rank_that_fails_ends_the_others_and_says_why_alone() -> None:
    def fail(rank: int) -> None:
        ranks = Ranks.start(torch.device("cpu"))
        assert ranks is not None
        expected = ConfigError if rank == 1 else SystemExit
        with pytest.raises(expected), ranks.failing_together():  # noqa: PT012
            if rank == 1:
                raise ConfigError("found this, expected that")
            ranks.from_first(None)
            ranks.gather(rank)
        os._exit(3)

    assert run_ranks(fail) == [3, 3]


def test_a_rank_that_is_killed_is_one_line() -> None:
    def die(rank: int) -> None:
        ranks = Ranks.start(torch.device("cpu"))
        assert ranks is not None
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ended = pytest.raises(WorkerError, match="another process of torchrun ended")
        with ended, ranks.failing_together():
            ranks.gather(rank)
        os._exit(3)

    assert run_ranks(die) == [3, -signal.SIGKILL]


# --- how a batch is shared out


def linked(count: int) -> list[Any]:
    graphs = demo_graphs(count)
    for graph in graphs:
        del graph.y
        graph.edge_label_index = graph.edge_index[:, ::3]
        graph.edge_label = torch.ones(graph.edge_label_index.shape[1])
    return graphs


def steps(dataset: GraphDataset, seed: int | None, rank: int | None, size: int = 3) -> list[Step]:
    task = infer_task(dataset.labels(), dataset.level)
    place = torch.device("cpu")
    ranks = None if rank is None else Ranks(rank, size, place, None)  # type: ignore[arg-type]
    source = GraphBatches(dataset, task, place, ranks)
    return list(source.batches(np.arange(len(dataset.labels())), batch_size=4, seed=seed))


@pytest.mark.parametrize("make", [demo_graphs, node_labelled, linked])
def test_the_parts_of_a_batch_make_it_up(make: Callable[[int], list[Any]]) -> None:
    dataset = from_graphs(make(10))  # batches of 4, 4 and 2 graphs for 3 ranks
    task = infer_task(dataset.labels(), dataset.level)
    whole, parts = steps(dataset, 0, None), [steps(dataset, 0, rank) for rank in range(3)]
    for number, batch in enumerate(whole):
        mine = [steps[number] for steps in parts]
        rows = np.concatenate([step.rows for step in mine])
        assert sorted(rows) == sorted(batch.rows)
        counts = [task.loss_weight(step.targets) for step in mine]
        assert sum(counts) == task.loss_weight(batch.targets)
        assert [count == 0 for count in counts] == [False, False, number == 2]
        # The loss of a sum of squares is the mean of the parts, by their labels.
        outputs = [torch.full((len(step.targets), task.out_dim), 0.3) for step in mine]
        losses = [task.loss(*pair) for pair in zip(outputs, [s.targets for s in mine], strict=True)]
        mean = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
        every = torch.full((len(batch.targets), task.out_dim), 0.3)
        torch.testing.assert_close(mean, task.loss(every, batch.targets))
    in_order = [steps(dataset, None, rank) for rank in range(3)]
    assert [len(own) for own in in_order] == [1, 1, 1]


def test_one_graph_cannot_be_shared_out() -> None:
    dataset = from_graphs(node_labelled(2)[:1])
    with pytest.raises(ConfigError, match=r"found 1 graphs and WORLD_SIZE=2, expected a graph"):
        steps(dataset, 0, 0, size=2)
