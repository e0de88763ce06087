"""Fits that several processes share: jobs of an array, and the workers of a cluster."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import histograph_post as hg
from histograph_post.errors import ConfigError, MissingExtraError, OutputExistsError
from histograph_post.experiments.head_training import Experiment
from histograph_post.utils.outputs import OutputLock

from ..helpers import histograph

QUICK = hg.TrainingOptions(epochs=2, batch_size=16, lr=1e-2)

#: All that a run is made of; only how long it took is in ``fit.json`` alone.
RESULTS = ("results.json", "predictions.csv", "metrics.jsonl", "head.safetensors", "config.toml")


def contents(run: Path) -> dict[str, bytes]:
    """Return what a run is made of, without how long it took."""
    names = [name for name in RESULTS if (run / name).exists()]
    names += sorted(str(path.relative_to(run)) for path in run.rglob("*.safetensors"))
    assert not list(run.rglob("*.writing"))
    assert "writing" not in (run / "SHA256SUMS").read_text()
    return {name: (run / name).read_bytes() for name in names}


def train(cache: Path, out: Path, **options: Any) -> hg.Run:
    return hg.train_head(cache, out, head="jk-cat", dim=8, seeds=[0, 1], training=QUICK, **options)


@pytest.fixture(scope="module")
def alone(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    train(demo_cache, out, jobs=1)
    return out


def test_jobs_of_an_array_give_the_bytes_of_one_process(
    demo_cache: Path, alone: Path, tmp_path: Path
) -> None:
    out, notes = tmp_path / "run", list[str]()
    first = train(demo_cache, out, fits=(1, 3), jobs=1, on_note=notes.append)
    assert not first.is_finished
    assert notes[0].startswith("3 fits of 4 left to other jobs")
    # The array is given again with another number of jobs: what is done stays done.
    assert not train(demo_cache, out, fits=(0, 2), jobs=1).is_finished
    done = {path: path.stat().st_mtime_ns for path in out.rglob("fit.json")}
    assert len(done) == 3
    assert train(demo_cache, out, fits=(1, 2), jobs=1).is_finished
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert contents(out) == contents(alone)


def test_the_command_without_fits_writes_the_results(
    demo_cache: Path, alone: Path, tmp_path: Path
) -> None:
    words = ["train-head", demo_cache, "-o", tmp_path / "run", "--head", "jk-cat"]
    words += [
        "--dim",
        8,
        "--seeds",
        "0-1",
        "--epochs",
        2,
        "--batch-size",
        16,
        "--lr",
        1e-2,
        "--jobs",
        1,
    ]
    shared = histograph(*words, "--fits", "0/2", "--json")
    assert shared.exit_code == 0, shared.stderr
    assert '"complete": false' in shared.stdout
    assert histograph(*words).exit_code == 0
    assert "fits =" not in (tmp_path / "run/config.toml").read_text()
    found, expected = contents(tmp_path / "run"), contents(alone)
    assert {**found, "config.toml": b""} == {**expected, "config.toml": b""}
    refused = histograph(*words, "--fits", "2/2")
    assert refused.exit_code == 2
    assert "--fits 2/2: expected I/N with I from 0 to N - 1" in refused.stderr


def test_a_fit_has_one_writer_and_is_left_to_it(demo_cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    busy = out / "fits/jk-cat/fold-0-seed-0"
    assert not train(demo_cache, out, fits=(3, 4), jobs=1).is_finished
    with OutputLock(busy):
        assert not train(demo_cache, out, fits=(0, 1), jobs=1).is_finished
        assert not busy.exists()
        assert len(list(out.rglob("fit.json"))) == 3
    assert train(demo_cache, out, fits=(0, 1), jobs=1).is_finished


def test_another_run_and_options_that_do_not_go_with_shares_are_refused(
    demo_cache: Path, tmp_path: Path
) -> None:
    train(demo_cache, tmp_path / "run", fits=(0, 4), jobs=1)
    with pytest.raises(
        OutputExistsError, match="found a run with standardize true, expected false"
    ):
        train(demo_cache, tmp_path / "run", fits=(1, 4), standardize=False)
    with pytest.raises(ConfigError, match=r"fits: found 4/4, expected i/n"):
        train(demo_cache, tmp_path / "run", fits=(4, 4))
    with pytest.raises(ConfigError, match="fits: found 0/4 and overwrite, expected one"):
        train(demo_cache, tmp_path / "run", fits=(0, 4), overwrite=True)
    with pytest.raises(ConfigError, match="fits: found one, but jobs search together"):
        hg.tune(demo_cache, tmp_path / "tuned", fits=(0, 4))


def pretrain(out: Path, **options: Any) -> hg.Run:
    given: dict[str, Any] = {"model_args": {"hidden": 8}, "data_args": {"num_graphs": 24}}
    return hg.pretrain("gin", "demo:", out, split="kfold:3", training=QUICK, **given, **options)


def test_folds_of_a_pretraining_are_shared_too(tmp_path: Path) -> None:
    pretrain(tmp_path / "alone", jobs=1)
    for number in (0, 1):
        run = pretrain(tmp_path / "run", fits=(number, 2), jobs=1)
        assert run.is_finished == (number == 1)
    assert contents(tmp_path / "run") == contents(tmp_path / "alone")


# --- a cluster


def test_a_backend_that_is_missing_is_one_line(
    demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtraError, match=r"histograph-post\[cluster\]"):
        train(demo_cache, tmp_path / "run", backend="dask", scheduler="tcp://localhost:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="found no Ray; pip install ray"):
        train(demo_cache, tmp_path / "run", backend="ray")
    with pytest.raises(ConfigError, match="backend: found 'slurm', expected one of loky, dask"):
        train(demo_cache, tmp_path / "run", backend="slurm")


@pytest.fixture(scope="module")
def cluster() -> Any:
    distributed = pytest.importorskip("distributed", reason="needs histograph-post[cluster]")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs="ERROR"
    ) as found:
        yield found


@pytest.mark.long
def test_a_cluster_gives_the_same_bytes_though_a_worker_is_killed(
    demo_cache: Path, alone: Path, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Experiment, "fit", None)  # not in this process
    victim = next(iter(cluster.workers.values())).pid
    done: list[int] = []

    def fit_done(fit: Any, count: int, total: int) -> None:
        done.append(count)
        if count == 1:
            os.kill(victim, signal.SIGKILL)

    out = tmp_path / "run"
    train(demo_cache, out, backend="dask", scheduler=cluster.scheduler_address, on_fit=fit_done)
    assert done == [1, 2, 3, 4]
    assert contents(out) == contents(alone)
