"""Fits side by side: the same bytes for any number of jobs, killed or not, and no process left."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import histograph_post as hg
from histograph_post.caches.caching import cache
from histograph_post.data import load_data
from histograph_post.errors import ConfigError, MissingExtraError, WorkerError
from histograph_post.experiments import parallel
from histograph_post.experiments.options import FitProgress
from histograph_post.experiments.search import Values
from histograph_post.models import build_model
from histograph_post.training.loaded_cache import KEPT_SHARE, row_bytes
from histograph_post.training.loop import train_resumably
from histograph_post.training.options import TrainingOptions
from histograph_post.utils.files import save_tensors

from ..helpers import histograph

QUICK = TrainingOptions(epochs=3, batch_size=16, lr=1e-2)

#: Also what could depend on where a fit runs: times are in none of them.
RESULTS = ("results.json", "predictions.csv", "metrics.jsonl", "trials.csv", "best.toml")

MODEL = """
from layers import Conv
from torch import nn
from torch_geometric.nn import global_mean_pool

class Net(nn.Module):
    def __init__(self, num_features, num_classes):
        super().__init__()
        self.convs = nn.ModuleList([Conv(num_features, 8), Conv(8, 8)])
        self.last = nn.Linear(8, num_classes)

    def forward(self, x, edge_index, batch):
        print("a model that talks")
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.last(global_mean_pool(x, batch))
"""

LAYERS = """
from torch import nn
from torch_geometric.nn import MessagePassing

class Conv(MessagePassing):
    def __init__(self, width_in, width_out):
        super().__init__(aggr="sum")
        self.linear = nn.Linear(width_in, width_out)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.linear(x))

    def message(self, x_j):
        return x_j
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model from a user's file, which imports another, and its cache."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "net.py").write_text(MODEL)
    (folder / "layers.py").write_text(LAYERS)
    torch.manual_seed(0)
    model = build_model(f"{folder}/net.py:Net", {}, in_dim=4, out_dim=1)
    save_tensors(folder / "net.safetensors", model.state_dict())
    dataset = load_data("demo:", args={"num_graphs": 60})
    for name, layers in (("demo", "auto"), ("equal", "1:")):  # of many widths, and of one
        cache(model, dataset, folder / f"{name}.cache", splits="kfold:3", layers=layers)
    return folder


#: A readout from a file, and one as a script or notebook has it, which no other process imports.
OWN_HEAD = f"{Path(__file__).parents[2] / 'examples' / 'my_head.py'}:MeanAndMax"
SCRIPT = """
from histograph_post.heads import Readout
from histograph_post.heads.base import last_layer

class Sum(Readout):
    def build(self):
        self.finish(self.in_dims[-1])

    def pool_graphs(self, history, graphs, edge_index):
        return graphs.sum(last_layer(history))
"""


def contents(run: Path) -> dict[str, bytes]:
    """Return what a run is made of, without how long it took."""
    found = {name: (run / name).read_bytes() for name in RESULTS if (run / name).exists()}
    for path in (*run.rglob("*.safetensors"), *run.glob("fold-*/*")):
        found[str(path.relative_to(run))] = path.read_bytes()
    assert not list(run.rglob("state.pt"))
    return found


def train(
    folder: Path,
    out: Path,
    jobs: int | None,
    on_epoch: Callable[[FitProgress], None] | None = None,
) -> None:
    options: dict[str, Any] = {"dim": 8, "dropout": 0.3, "on_epoch": on_epoch, "jobs": jobs}
    limit = None
    if jobs is not None:  # room for the activations of one fold at a time
        limit = int(row_bytes(hg.Cache.open(folder / "demo.cache")) / KEPT_SHARE) + 1
    hg.train_head(
        folder / "demo.cache", out, seeds=[0, 1], training=QUICK, memory_limit=limit, **options
    )


def compare(folder: Path, out: Path, jobs: int | None) -> None:
    script = {"__name__": "__main__"}
    exec(SCRIPT, script)
    hg.compare(
        folder / "equal.cache",
        out,
        heads=["mean", "concat", "gmt", "histograph", OWN_HEAD, script["Sum"]],
        dim=8,
        training=QUICK,
        split="stratified",
        standardize=False,
        memory_limit=10_000,  # for a batch at a time
        jobs=jobs,
    )


def tune(folder: Path, out: Path, jobs: int | None) -> None:
    hg.tune(
        folder / "equal.cache",
        out,
        trials=12,
        # A learning rate of 1e-9 learns nothing and is given up; 3 heads do not go with a dim of 8.
        space={"lr": Values((1e-9, 3e-2)), "heads": Values((2, 4, 3))},
        dim=8,
        seeds=[0],
        trial_seeds=[0, 1],
        search_seed=2,
        metric="roc_auc",
        training=TrainingOptions(epochs=8, batch_size=16, lr=3e-2),
        split="stratified",
        jobs=jobs,
    )


def finetune(folder: Path, out: Path, jobs: int | None) -> None:
    hg.finetune(
        folder / "demo.cache",
        out,
        seeds=[0],
        training=QUICK,
        backbone_lr=1e-2,
        head_options={"dim": 8},
        model=f"{folder}/net.py:Net",
        checkpoint=folder / "net.safetensors",
        data=load_data("demo:", args={"num_graphs": 60}),
        jobs=jobs,
    )


def pretrain(folder: Path, out: Path, jobs: int | None) -> None:
    options: dict[str, Any] = {"data_args": {"num_graphs": 40}, "split": "kfold:3"}
    hg.pretrain(f"{folder}/net.py:Net", "demo:", out, training=QUICK, jobs=jobs, **options)


def end_to_end(folder: Path, out: Path, jobs: int | None) -> None:
    options: dict[str, Any] = {"data_args": {"num_graphs": 40}, "seeds": [0, 1]}
    model = f"{folder}/net.py:Net"
    hg.pretrain(model, "demo:", out, head="histograph", training=QUICK, jobs=jobs, **options)


@pytest.mark.long
@pytest.mark.parametrize("run", [compare, tune, finetune, pretrain, end_to_end])
def test_any_number_of_jobs_gives_the_same_bytes(
    folder: Path, tmp_path: Path, run: Callable[[Path, Path, int | None], None]
) -> None:
    for jobs in (1, 2):
        run(folder, tmp_path / str(jobs), jobs)
    alone = contents(tmp_path / "1")
    assert alone
    assert contents(tmp_path / "2") == alone
    if run is tune:
        states = [line.split(",")[1] for line in alone["trials.csv"].decode().split()[1:]]
        assert {"complete", "pruned", "fail"} <= set(states)


def children(process: int | str = "self") -> list[int]:
    """Return the processes that a process has started, and that are still there."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]


def wait_for_end(processes: list[int]) -> None:
    """Wait until these processes, of whoever, have ended; fail if they do not."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            file = os.pidfd_open(process)
            waiting = select.poll()
            waiting.register(file, select.POLLIN)
            ended = waiting.poll(60_000)
            os.close(file)
            assert ended, Path(f"/proc/{process}/cmdline").read_text().split("\0")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """What :func:`train` gives in one process."""
    train(folder, folder / "alone", 1)
    return folder / "alone"


KILLED = """
import os, signal, sys
from pathlib import Path
import histograph_post as hg

left = 20
def epoch_done(progress):
    global left
    left -= 1
    if left == 0:
        print(*((thread / "children").read_text() for thread in Path("/proc/self/task").iterdir()))
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

# Unlike the processes of multiprocessing, ours do not run this script again.
training = hg.TrainingOptions(epochs=3, batch_size=16, lr=1e-2)
hg.train_head(sys.argv[1], sys.argv[2], seeds=[0, 1], training=training, dim=8, dropout=0.3,
              jobs=2, on_epoch=epoch_done)
"""


def test_a_killed_run_leaves_no_process_and_ends_as_if_it_had_not_been(
    folder: Path, alone: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    words = [sys.executable, "-W", "ignore", script, folder / "demo.cache", tmp_path / "run"]
    killed = subprocess.run(words, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    started = [int(process) for process in killed.stdout.split()]
    assert len(started) >= 2
    wait_for_end(started)
    assert not (tmp_path / "run/results.json").exists()
    assert 0 < len(list(tmp_path.rglob("fit.json"))) < 12
    train(folder, tmp_path / "run", 1)
    assert contents(tmp_path / "run") == contents(alone)


def test_an_interrupt_is_one_line_and_leaves_no_process(folder: Path, tmp_path: Path) -> None:
    words = ["train-head", folder / "demo.cache", "-o", tmp_path / "run", "--jobs", "2", "-v"]
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "histograph_cli", *words, "--epochs", "100000"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as command:
        assert command.stderr is not None
        for line in command.stderr:
            if ", epoch 1: " in line:
                break
        started = children(command.pid)
        assert len(started) >= 2
        os.killpg(command.pid, signal.SIGINT)  # as a terminal does: all of them get it
        said = [line for line in command.stderr if ", epoch " not in line]
    assert command.returncode == 130
    assert said == ["interrupted; run the same command again to resume\n"]
    wait_for_end(started)


@pytest.mark.long
def test_without_a_number_fits_begin_here_and_go_on_in_processes(
    folder: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "available_cores", lambda: 2)
    for name in ("START_SECONDS", "MEASURED_SECONDS"):
        monkeypatch.setattr(parallel, name, 0.0)
    assert train_resumably.__kwdefaults__ is not None
    monkeypatch.setitem(train_resumably.__kwdefaults__, "save_every", 0.0)
    before, started = children(), []
    epochs: list[tuple[str, int, int, int]] = []

    def epoch_done(progress: FitProgress) -> None:
        started.append(len(set(children()) - set(before)))
        place = (progress.head, progress.fold, progress.seed)
        epochs.append((*place, int(progress.measured["epoch"])))

    train(folder, tmp_path / "run", None, epoch_done)
    assert started[0] == 0
    assert started[-1] >= 2
    assert len(epochs) == len(set(epochs)) == 12 * 3  # the first went on with what was saved of it
    assert contents(tmp_path / "run") == contents(alone)


def test_processes_that_die_are_a_known_error_and_more_of_them_give_the_same_bytes(
    folder: Path, alone: Path, tmp_path: Path
) -> None:
    before = set(children())

    def epoch_done(progress: FitProgress) -> None:
        for process in set(children()) - before:
            if b"popen_loky" in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, signal.SIGKILL)

    found = r"^\w+, fold \d, seed \d: [^\n]* ended \(SIGKILL\), expected [^\n]* with fewer --jobs$"
    for _ in range(2):  # as when memory runs out again
        with pytest.raises(WorkerError, match=found):
            train(folder, tmp_path / "run", 2, epoch_done)
    train(folder, tmp_path / "run", 3)
    assert contents(tmp_path / "run") == contents(alone)


def test_an_error_in_a_process_is_one_line(folder: Path, alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(alone, run)
    shutil.rmtree(run / "fits/histograph")
    (run / "fits/histograph").touch()  # where folders are to be
    words = ["train-head", folder / "demo.cache", "-o", run, "--jobs", 2, "--seeds", "0-1"]
    words += ["--epochs", 3, "--batch-size", 16, "--lr", 1e-2, "--dim", 8]
    words += ["--head-args", "dropout=0.3"]
    result = histograph(*words)
    assert result.exit_code == 1
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert result.stderr.splitlines()[-1].startswith(f"error: {run}/fits/histograph/fold-0-seed-")


def test_errors_survive_the_way_from_another_process() -> None:
    error = pickle.loads(pickle.dumps(MissingExtraError("tuning", extra="tune")))
    assert isinstance(error, MissingExtraError)
    assert error.extra == "tune"
    assert "histograph-post[tune]" in str(error)


class Stays(nn.Identity):
    """A module that can be copied and not be pickled."""

    def __deepcopy__(self, memo: Any) -> Stays:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("it stays where it is")


def test_what_cannot_be_sent_is_trained_here(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "available_cores", lambda: 2)
    for name in ("START_SECONDS", "MEASURED_SECONDS"):
        monkeypatch.setattr(parallel, name, 0.0)
    model = build_model(f"{folder}/net.py:Net", {}, in_dim=4, out_dim=1)
    model.stays = Stays()
    options: dict[str, Any] = {
        "model": model,
        "checkpoint": folder / "net.safetensors",
        "data": load_data("demo:", args={"num_graphs": 60}),
        "training": QUICK,
        "head_options": {"dim": 8},
    }
    with pytest.raises(ConfigError, match=r"jobs: found 2, expected 1 .* it stays where it is"):
        hg.finetune(folder / "demo.cache", tmp_path / "run", jobs=2, **options)
    run = hg.finetune(folder / "demo.cache", tmp_path / "run", **options)
    assert len(run.results["fits"]) == 6


def test_the_number_of_threads_follows_from_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "available_cores", lambda: 8)
    assert [parallel.threads_per_fit(fits) for fits in (1, 2, 3, 8, 50)] == [8, 4, 2, 1, 1]


def test_no_jobs_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="jobs: found 0, expected 1 or more"):
        train(folder, tmp_path / "run", 0)
