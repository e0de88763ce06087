"""The options that all experiments share, as an object and as keywords."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import histograph_post as hg
from histograph_post.errors import ConfigError
from histograph_post.experiments.head_training import plan_experiment
from histograph_post.experiments.options import HeadSpec, with_keywords

QUICK = hg.TrainingOptions(epochs=2, batch_size=16)


def plan_of(run: hg.Run) -> dict[str, Any]:
    return json.loads((run.folder / "run.json").read_text())


def test_keywords_say_the_same_as_an_object(demo_cache: Path, tmp_path: Path) -> None:
    options = hg.ExperimentOptions(seeds=(0, 1), split="kfold:3", metric="f1", training=QUICK)
    one = hg.train_head(demo_cache, tmp_path / "one", options=options, dim=8, heads=2)
    keywords = {"seeds": (0, 1), "split": "kfold:3", "metric": "f1", "training": QUICK}
    other = hg.train_head(demo_cache, tmp_path / "other", dim=8, heads=2, **keywords)
    assert plan_of(one) == plan_of(other)
    assert one.results == other.results
    assert plan_of(one)["heads"][-1] == {"name": "histograph", "options": {"dim": 8, "heads": 2}}


def test_a_keyword_overrides_the_object() -> None:
    options, others = with_keywords(hg.ExperimentOptions(seeds=(0, 1)), {"seeds": [3], "dim": 8})
    assert options == hg.ExperimentOptions(seeds=[3])
    assert others == {"dim": 8}


def test_a_learning_rate_that_is_not_given_suits_the_data() -> None:
    assert hg.ExperimentOptions().training_options(1e-2) == hg.TrainingOptions(lr=1e-2)
    some = hg.ExperimentOptions(training={"epochs": 7})
    assert some.training_options(1e-2) == hg.TrainingOptions(lr=1e-2, epochs=7)
    given = hg.ExperimentOptions(training={"lr": 0.3})
    assert given.training_options(1e-2).lr == 0.3
    whole = hg.ExperimentOptions(training=hg.TrainingOptions(epochs=7))
    assert whole.training_options(1e-2).lr == hg.TrainingOptions().lr


def test_a_learning_rate_that_is_not_given_suits_each_readout(demo_cache: Path) -> None:
    heads = [HeadSpec(name) for name in ("mean", "jk-cat", "histograph")]

    def rates(training: Any) -> dict[str, float]:
        options = hg.ExperimentOptions(training=training, seeds=[0])
        experiment = plan_experiment(demo_cache, heads, options)
        return {spec.head: spec.training.lr for spec in experiment.fits()}

    assert rates({"epochs": 2}) == {"mean": 1e-2, "jk-cat": 3e-3, "histograph": 1e-3}
    assert set(rates({"lr": 0.2}).values()) == {0.2}
    assert set(rates(QUICK).values()) == {QUICK.lr}


def test_compare_trains_each_readout_once_and_all_with_one_width(
    demo_cache: Path, tmp_path: Path
) -> None:
    started, done = [], []
    run = hg.compare(
        demo_cache,
        tmp_path / "run",
        heads=["concat", "mean", "concat"],
        dim=4,
        seeds=[0],
        training=QUICK,
        on_start=lambda metric, notes: started.append((metric, list(notes))),
        on_fit=lambda fit, number, total: done.append((fit.spec.name, number, total)),
    )
    assert [entry["options"] for entry in plan_of(run)["heads"]] == [{"dim": 4}, {"dim": 4}]
    assert run.results["head"] == "concat"
    assert [metric for metric, _ in started] == [run.results["metric"]]
    assert done == [("concat", 1, 2), ("mean", 2, 2)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache, out: hg.train_head(cache, out, seeds=[]), "seeds: found none"),
        (lambda cache, out: hg.compare(cache, out, heads=[]), "heads: found none"),
        (lambda cache, out: hg.compare(cache, out, warm_start=True), "warm_start: found one, but"),
        (
            lambda cache, out: hg.pretrain("gin", "demo:", out, task="binary"),
            "task: found one, but",
        ),
        (
            lambda cache, out: hg.pretrain("gin", "demo:", out, seeds=[0, 1]),
            "seeds: found one, but",
        ),
        (
            lambda cache, out: hg.pretrain("gin", "demo:", out, head_options={"dim": 8}),
            "head_options: found",
        ),
    ],
)
def test_what_an_experiment_cannot_use_is_refused(
    demo_cache: Path, tmp_path: Path, call: Callable[[Path, Path], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        call(demo_cache, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_python_has_the_words_of_the_command_line() -> None:
    options, others = with_keywords(None, {"folds": 5, "attention_heads": 2})
    assert (options.split, others) == ("kfold:5", {"heads": 2})
    for same in ({"folds": 5, "split": "random"}, {"attention_heads": 2, "heads": 2}):
        with pytest.raises(ConfigError, match="not both"):
            with_keywords(None, same)


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, out: hg.train_head(cache, out, splits="random"),
        lambda cache, out: hg.pretrain("gin", "demo:", out, splits="random"),
    ],
)
def test_an_option_that_is_misspelt_is_named(
    demo_cache: Path, tmp_path: Path, call: Callable[[Path, Path], Any]
) -> None:
    with pytest.raises(ConfigError, match="found option 'splits', expected 'split'"):
        call(demo_cache, tmp_path / "run")
