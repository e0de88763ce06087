"""Tuning: trials are chosen by validation, survive a kill, and end in a run like any other."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import histograph_post as hg
from histograph_post.errors import ConfigError, MissingExtraError, NotFoundError, OutputExistsError
from histograph_post.experiments.options import HeadSpec
from histograph_post.experiments.search import Range, Values, default_space, plan_search, read_space
from histograph_post.runs.run import Run
from histograph_post.training.options import TrainingOptions

from ..helpers import histograph

QUICK = TrainingOptions(epochs=4)
SPACE = {"lr": Range(1e-3, 1e-1, log=True), "dim": Values((4, 8)), "heads": Values((1, 2))}


@pytest.fixture(scope="module")
def demo_cache(make_demo_cache: Callable[..., Path]) -> Path:
    return make_demo_cache("random:0.6,0.2,0.2")


def tune(cache: Path, out: Path, **options: Any) -> Run:
    given = {"trials": 3, "space": SPACE, "seeds": [0, 1], "training": QUICK, **options}
    return hg.tune(cache, out, **given)


def table(run: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((run / "trials.csv").read_text().splitlines()))


def contents(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in ("trials.csv", "best.toml", "results.json")}


def test_the_best_trial_by_validation_is_trained_beside_the_defaults(
    demo_cache: Path, tmp_path: Path
) -> None:
    run = tune(demo_cache, tmp_path / "run", trials=4, prune=False)
    trials = table(tmp_path / "run")
    assert len(trials) == 4
    best = max(trials, key=lambda trial: float(trial["valid_accuracy"]))
    tuning = run.results["tuning"]
    assert tuning["trial"] == int(best["trial"])
    # Trial 0 has the defaults, as far as the space has them.
    assert float(trials[0]["lr"]) == QUICK.lr
    assert run.results["head"] == "histograph-tuned"
    assert {"mean", "histograph-tuned"} <= set(run.results["readouts"])
    assert not (tmp_path / "run/trials").exists()
    # A trial is nothing but a fit with those options.
    values = dict(tuning["values"])
    training = TrainingOptions(epochs=4, lr=values.pop("lr"))
    other = hg.train_head(demo_cache, tmp_path / "other", training=training, seeds=[0], **values)
    (fit,) = [fit for fit in other.results["fits"] if fit["head"] == "histograph"]
    assert fit["scores"]["valid"]["accuracy"] == float(best["valid_accuracy"])
    ((first, *_),) = [
        [fit for fit in run.results["fits"] if fit["head"] == "histograph-tuned"],
    ]
    assert first["scores"] == fit["scores"]


def test_what_a_score_is_decides_which_trial_is_the_best(demo_cache: Path, tmp_path: Path) -> None:
    run = tune(demo_cache, tmp_path / "run", task="regression", metric="rmse", prune=False)
    scores = [float(trial["valid_rmse"]) for trial in table(tmp_path / "run")]
    assert run.results["tuning"]["trial"] == scores.index(min(scores))


def test_a_trial_is_the_mean_over_folds_and_seeds(demo_cache: Path, tmp_path: Path) -> None:
    space = {"dim": Values((4,))}
    tune(demo_cache, tmp_path / "run", trials=1, space=space, split="kfold:3", trial_seeds=[0, 1])
    other = hg.train_head(
        demo_cache, tmp_path / "other", dim=4, seeds=[0, 1], split="kfold:3", training=QUICK
    )
    mean = other.results["readouts"]["histograph"]["valid"]["mean"]
    (trial,) = table(tmp_path / "run")
    assert float(trial["valid_accuracy"]) == pytest.approx(mean, abs=1e-12)


def test_the_tuned_run_predicts_and_trains_again(demo_cache: Path, tmp_path: Path) -> None:
    run = tune(demo_cache, tmp_path / "run")
    words = ["train-head", demo_cache, "-o", tmp_path / "again", "--seeds", "0-1", "--config"]
    words.append(tmp_path / "run/best.toml")
    result = histograph(*words)
    assert result.exit_code == 0, result.output
    again = Run.open(tmp_path / "again").results["readouts"]["histograph"]
    assert again["test"] == run.results["readouts"]["histograph-tuned"]["test"]


def test_more_trials_go_on_where_fewer_ended(demo_cache: Path, tmp_path: Path) -> None:
    tune(demo_cache, tmp_path / "whole", trials=5)
    for trials in (2, 5, 4):  # fewer than there are change nothing
        tune(demo_cache, tmp_path / "parts", trials=trials)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


_KILLED = """
import os, signal
import histograph_post as hg
from histograph_post.experiments.search import Range, Values

space = {"lr": Range(1e-3, 1e-1, log=True), "dim": Values((4, 8)), "heads": Values((1, 2))}

def count(progress):
    global epochs
    epochs -= 1
    if epochs < 0:
        os.kill(os.getpid(), signal.SIGKILL)

hg.tune(cache, out, trials=3, space=space, seeds=[0, 1], on_epoch=count,
        training=hg.TrainingOptions(epochs=4))
"""


@pytest.fixture(scope="module")
def whole(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that nothing has killed."""
    return tune(demo_cache, tmp_path_factory.mktemp("search") / "whole").folder


@pytest.mark.parametrize(  # in the first trial, a later one, the last fits
    "epochs", [1, *(pytest.param(epoch, marks=pytest.mark.long) for epoch in (6, 14))]
)
def test_a_killed_search_ends_as_if_it_had_not_been(
    demo_cache: Path, whole: Path, tmp_path: Path, epochs: int, forked: Callable[..., int]
) -> None:
    names = {"cache": demo_cache, "out": tmp_path / "killed", "epochs": epochs}
    assert forked(_KILLED, **names) == -signal.SIGKILL
    tune(demo_cache, tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(whole)


@pytest.mark.parametrize("damage", [b"\xf2\n", b"[" * 100_000 + b"\n", b'{"op_code": "x"}\n'])
def test_a_search_of_a_damaged_log_begins_again(
    demo_cache: Path, whole: Path, tmp_path: Path, damage: bytes
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    with (tmp_path / "run" / "study.log").open("ab") as log:
        log.write(damage)
    with pytest.warns(UserWarning, match=r"study\.log: found a damaged log .* begins again"):
        tune(demo_cache, tmp_path / "run")
    assert contents(tmp_path / "run") == contents(whole)


def test_searches_share_a_storage(demo_cache: Path, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.db"
    tune(demo_cache, tmp_path / "first", trials=2, storage=storage)
    seen = []
    tune(
        demo_cache,
        tmp_path / "second",
        trials=3,
        storage=storage,
        on_trial=lambda trial, *_: seen.append(trial.number),
    )
    assert seen == [2]
    assert table(tmp_path / "second")[:2] == table(tmp_path / "first")


def test_trials_that_are_worse_are_given_up(demo_cache: Path, tmp_path: Path) -> None:
    # A learning rate of 1e-9 learns nothing: the median of the others is soon better.
    space = {"lr": Values((1e-2, 1e-9)), "dim": Values((8,))}
    tune(
        demo_cache,
        tmp_path / "run",
        trials=16,
        space=space,
        seeds=[0],
        metric="roc_auc",
        training=TrainingOptions(epochs=8, lr=1e-2),
    )
    given_up = [trial for trial in table(tmp_path / "run") if trial["state"] == "pruned"]
    assert given_up
    assert all(float(trial["lr"]) == 1e-9 and not trial["valid_roc_auc"] for trial in given_up)


def test_options_that_do_not_go_together_are_passed_over(demo_cache: Path, tmp_path: Path) -> None:
    said = []
    space = {"dim": Values((8,)), "heads": Values((4, 3))}
    run = tune(
        demo_cache,
        tmp_path / "run",
        trials=6,
        space=space,
        on_trial=lambda trial, *_: said.append(trial),
    )
    assert run.results["tuning"]["values"]["heads"] == 4
    failed = [trial for trial in said if trial.state == "fail"]
    assert failed
    assert all("heads" in trial.reason for trial in failed)
    with pytest.raises(ConfigError, match="found no trial with a score"):
        tune(demo_cache, tmp_path / "none", space={"dim": Values((8,)), "heads": Values((3,))})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "random:0.8,0,0.2"}, "found no validation part"),
        ({"space": {"depth": Values((1,))}}, "search space: found 'depth', expected one of"),
        ({"space": {}}, "search space: found nothing"),
        ({"dim": 8}, "dim: found a value and a choice"),
        ({"trials": 0}, "trials: found 0, expected 1 or more"),
        ({"trial_seeds": []}, "trial seeds: found none"),
        ({"storage": "nosql://there"}, "storage nosql://there: cannot be used"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    demo_cache: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tune(demo_cache, tmp_path / "run", **options)


def test_another_search_is_not_mixed_with_the_one_that_is_there(
    demo_cache: Path, tmp_path: Path
) -> None:
    tune(demo_cache, tmp_path / "run", trials=1)
    with pytest.raises(OutputExistsError, match="found a run with search_seed 0, expected 1"):
        tune(demo_cache, tmp_path / "run", trials=1, search_seed=1)
    tune(demo_cache, tmp_path / "run", trials=1, search_seed=1, overwrite=True)


def test_optuna_is_asked_for_by_the_name_of_the_extra(
    demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"histograph-post\[tune\]"):
        tune(demo_cache, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_readout_has_a_space() -> None:
    usual = TrainingOptions()
    assert {"lr", "weight_decay", "dim", "heads", "normalization"} <= set(
        default_space("histograph", usual)
    )
    # The paper's form stays what it is.
    assert "normalization" not in default_space("histograph-paper", usual)
    assert set(default_space("jk-cat", usual)) <= {"lr", "weight_decay", "dim", "dropout"}


def test_training_is_searched_around_what_was_asked_for() -> None:
    asked = TrainingOptions(lr=0.3, weight_decay=0.5)
    space = default_space("mean", asked)
    assert asked.lr in space["lr"]
    assert 1e-3 not in space["lr"]
    assert asked.weight_decay in space["weight_decay"]
    assert TrainingOptions().weight_decay not in space["weight_decay"]
    assert "weight_decay" not in default_space("mean", TrainingOptions(weight_decay=0))


def test_the_default_learning_rate_of_a_readout_is_searched_around(demo_cache: Path) -> None:
    search = plan_search(demo_cache, HeadSpec("mean"), hg.ExperimentOptions())
    assert search.defaults()["lr"] == 1e-2
    assert search.space["lr"] == default_space("mean", TrainingOptions(lr=1e-2))["lr"]
    _, training = search.options_for({"lr": 0.5})
    assert training.lr == 0.5


def test_a_space_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text(
        "[lr]\nlow = 1e-4\nhigh = 1e-2\nlog = true\n[dim]\nvalues = [8, 16]\n"
        "[mlp_layers]\nlow = 0\nhigh = 3\n[dropout]\nlow = 0.0\nhigh = 0.5\nstep = 0.25\n"
    )
    assert read_space(path, "histograph") == {
        "lr": Range(1e-4, 1e-2, log=True),
        "dim": Values((8, 16)),
        "mlp_layers": Range(0, 3),
        "dropout": Range(0.0, 0.5, step=0.25),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[depth]\nvalues = [1]", "found 'depth', expected one of"),
        ("[dim]\nvalues = []", "dim: found no values"),
        ("[dim]\nvalues = 8", "expected values = "),
        ("dim = 8", "expected values = "),
        ("[lr]\nlow = 1.0\nhigh = 0.5", "found low 1 and high 0.5, expected low < high"),
        ("[lr]\nlow = 0.0\nhigh = 0.5\nlog = true", "expected 0 < low < high"),
        ("[lr]\nlow = 0.1\nhigh = 0.5\nlog = true\nstep = 0.1", "found a step"),
        ("[lr]\nlow = 0.1", "expected values = "),
        ("[lr]\nlow = '0.1'\nhigh = 1", "expected values = "),
        ("", "found no option"),
        ("[", "not a readable TOML file"),
    ],
)
def test_a_space_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_space(path, "histograph")


def test_a_space_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"space\.toml: found no file"):
        read_space(tmp_path / "space.toml", "histograph")


def test_the_command_says_what_it_tried_and_what_is_next(demo_cache: Path, tmp_path: Path) -> None:
    space = tmp_path / "space.toml"
    space.write_text("[dim]\nvalues = [4, 8]\n[lr]\nvalues = [1e-3, 1e-2]\n")
    words = ["tune", demo_cache, "-o", tmp_path / "run", "--trials", 2, "--epochs", 2]
    words += ["--seeds", "0", "--space", space]
    shown = histograph(*words)
    assert shown.exit_code == 0, shown.output
    assert "[2/2] trial 1: valid accuracy" in shown.stderr
    assert "The best of 2 trials" in shown.stdout
    assert f"next: histograph report {tmp_path / 'run'}" in shown.stdout
    found = histograph(*words, "--json", "-q")
    assert found.exit_code == 0
    assert len(json.loads(found.stdout)["tuning"]["trials"]) == 2
    inspected = histograph("inspect", tmp_path / "run")
    assert inspected.exit_code == 0, inspected.output
    assert "histograph-tuned" in inspected.stdout


def test_the_command_searches_around_its_options(demo_cache: Path, tmp_path: Path) -> None:
    words = ["tune", demo_cache, "-o", tmp_path / "run", "--trials", 1, "--epochs", 1, "--seeds", 0]
    words += ["--lr", 0.02, "--weight-decay", 0, "--head", "jk-cat", "--json", "-q"]
    done = histograph(*words)
    assert done.exit_code == 0, done.output
    (trial,) = json.loads(done.stdout)["tuning"]["trials"]
    assert trial["values"]["lr"] == 0.02
    assert "weight_decay" not in trial["values"]


def test_the_report_shows_the_search(demo_cache: Path, tmp_path: Path) -> None:
    run = tune(demo_cache, tmp_path / "run", trials=3, prune=False)
    written = hg.report(run)
    assert "search" in written.figures
    page = written.path.read_text()
    assert "3 trials, of which trial 0 has the default options" in page
    for trial in table(tmp_path / "run"):
        assert f"{float(trial['valid_accuracy']):.3f}" in page
