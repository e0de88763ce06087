"""What figures show, against values computed by hand or by another library."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, roc_auc_score

from histograph_post.caches import Cache
from histograph_post.heads.histograph import HistoGraphHead
from histograph_post.reporting.building import find_caches, gather_evidence
from histograph_post.reporting.depth import layer_rows, score_depths
from histograph_post.reporting.drawings import attention_shares, layout, neighbourhood
from histograph_post.reporting.layer_charts import group_weights, weight_sets_figure
from histograph_post.reporting.outcomes import (
    Outcome,
    choose_examples,
    chosen_outcomes,
    combined,
    row_losses,
    row_title,
)
from histograph_post.reporting.prediction_charts import confusion_counts, target_areas
from histograph_post.runs.run import Run
from histograph_post.tasks import Task
from histograph_post.utils.text import MINUS


def outcome(predicted: list[list[float]], labels: list[list[float]]) -> Outcome:
    rows = np.arange(len(labels))
    names = [str(row) for row in rows]
    return Outcome(0, 0, rows, names, np.array(predicted), np.array(labels))


def test_layer_weights_are_those_of_explain(binary_run: Path) -> None:
    run = Run.open(binary_run)
    caches, _ = find_caches(run, None)
    (cache,) = caches
    figures = {figure.name: figure for figure in gather_evidence(run, caches).layer_figures}
    # every graph alone, through the head of the fold that tests it
    weights: dict[float, list[np.ndarray]] = {0.0: [], 1.0: []}
    for fold, split in enumerate(run.splits.folds):
        head, standardizer = run.load_head(fold, 0)
        assert isinstance(head, HistoGraphHead)
        assert standardizer is not None
        for row in split.test:
            history = cache[int(row)].history
            assert isinstance(history, torch.Tensor)
            layers = standardizer(history.unbind(1))
            explained = head.explain(torch.stack(layers, 1)).layer_weights
            mean = explained.reshape(-1, explained.size(-1)).mean(0)
            weights[float(cache.labels()[row, 0])].append(mean.numpy())
    for label, members in weights.items():
        part = figures["layer-weights"].alternative.split(f"class {label:g}: ")[1].split(";")[0]
        texts = re.findall(r"layer \d+ (\S+?)[,.]? ", part.replace(MINUS, "-") + " ")
        shown = [float(text) for text in texts]
        assert shown == pytest.approx(np.mean(members, axis=0), abs=0.006)


def test_over_smoothing_of_a_layer_is_that_of_the_cache(binary_run: Path) -> None:
    run = Run.open(binary_run)
    caches, _ = find_caches(run, None)
    profile = gather_evidence(run, caches).profile
    assert profile is not None
    fold, _ = run.chosen
    energies, distances = [], []
    for row in run.splits.folds[fold].test:
        graph = caches[0][int(row)]
        assert isinstance(graph.history, torch.Tensor)
        assert graph.edge_index is not None
        first, last = graph.history[:, 1].double(), graph.history[:, -1].double()
        source, target = graph.edge_index
        energies.append(float((last[source] - last[target]).square().sum()) / len(last))
        distances.append(float((first - last).norm(dim=1).mean()))
    assert profile.smoothness[-1].dirichlet.median == pytest.approx(np.median(energies))
    assert profile.distance[1] is not None
    assert profile.distance[1].median == pytest.approx(np.median(distances))
    assert profile.distance[-1] is not None
    assert profile.distance[-1].high == 0.0
    assert set(profile.head) == {"after layer attention", "after node attention"}


def test_confusion_is_sklearns_and_counts_a_row_once() -> None:
    task = Task("multiclass", "graph", 1, "accuracy", (0.0, 0.5, 5.0))  # labels need not be whole
    first = outcome([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]], [[0], [0.5]])
    second = outcome([[0.1, 0.8, 0.1], [0.0, 0.0, 1.0]], [[0.5], [float("nan")]])
    apart = replace(second, rows=np.array([2, 3]))
    oracle = confusion_matrix([0, 1, 1], [0, 2, 1], labels=[0, 1, 2])
    assert np.array_equal(confusion_counts(combined([first, apart]), task), oracle)
    # A row that two folds test is the mean of both.
    again = replace(first, fold=1, predicted=np.array([[0.1, 0.8, 0.1], [0.1, 0.6, 0.3]]))
    both = combined([first, again])
    assert both.predicted == pytest.approx(np.array([[0.4, 0.5, 0.1], [0.1, 0.4, 0.5]]))
    oracle = confusion_matrix([0, 1], [1, 2], labels=[0, 1, 2])
    assert np.array_equal(confusion_counts(both, task), oracle)


def test_attention_has_one_scale_whatever_the_graph() -> None:
    assert attention_shares(np.full(5, 0.2)) == pytest.approx(np.full(5, 0.4))  # at the mean
    times = np.array([0.1, 0.25, 0.5, 2, 4, 8, 30, 0, 0, 0, 0, 0, 0, 0])
    received = times / times.mean() / len(times)
    given = received / received.mean()  # in times the mean
    expected = np.log2(np.clip(given, 1 / 4, 8) * 4) / 5
    assert attention_shares(received) == pytest.approx(expected)


def test_layers_kept_are_means_of_the_cached_ones(binary_run: Path) -> None:
    run = Run.open(binary_run)
    (cache,), _ = find_caches(run, None)
    found = score_depths(run, [cache])
    assert found is not None
    assert found.depths == (1, 2, 3, 4)
    assert found.num_folds == 3
    assert found.is_whole
    rows = np.array([5, 0, 7])
    for layer, values in enumerate(layer_rows(cache, rows)):
        for row, value in zip(rows, values, strict=True):
            history = cache[int(row)].history
            assert isinstance(history, torch.Tensor)
            assert value.numpy() == pytest.approx(
                history[:, layer].float().mean(0).numpy(), abs=1e-5
            )


def test_rows_are_named() -> None:
    assert row_title("317", "graph", 600) == "graph 317"
    assert row_title("aspirin", "graph", 600) == "aspirin"
    assert row_title("0:12", "node", 1) == "node 12"
    assert row_title("3:4-9", "link", 5) == "graph 3, nodes 4 and 9"


def test_targets_skip_missing_labels() -> None:
    nan = float("nan")
    labels = [[0, 1, 1], [1, nan, 1], [1, 0, nan], [0, 1, 1]]
    predicted = [[0.3, 0.2, 0.5], [0.4, 0.9, 0.5], [0.2, 0.6, 0.5], [0.1, 0.7, 0.5]]
    areas = target_areas([outcome(predicted, labels)], 3)
    assert areas[0] == roc_auc_score([0, 1, 1, 0], [0.3, 0.4, 0.2, 0.1])
    assert areas[1] == roc_auc_score([1, 0, 1], [0.2, 0.6, 0.7])
    assert np.isnan(areas[2])  # one class only


@pytest.mark.parametrize(
    ("task", "predicted", "labels", "expected"),
    [
        (
            Task("binary", "graph", 1, "accuracy", (0.0, 1.0)),
            [[0.9], [0.9], [0.5]],
            [[1], [0], [float("nan")]],
            [-np.log(0.9), -np.log(0.1), np.nan],
        ),
        (
            Task("multiclass", "graph", 1, "accuracy", (2.0, 3.0, 4.0)),
            [[0.2, 0.5, 0.3]],
            [[4]],
            [-np.log(0.3)],
        ),
        (
            Task("multilabel", "graph", 2, "roc_auc"),
            [[0.8, 0.4], [0.8, 0.4]],
            [[1, 0], [float("nan"), 1]],
            [-(np.log(0.8) + np.log(0.6)) / 2, -np.log(0.4)],
        ),
        (
            Task("regression", "graph", 2, "rmse"),
            [[1.0, 5.0], [2.0, 2.0]],
            [[3, 4], [float("nan"), float("nan")]],
            [1.5, np.nan],
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Task) else "",
)
def test_how_wrong_a_row_is(
    task: Task, predicted: list[list[float]], labels: list[list[float]], expected: list[float]
) -> None:
    found = row_losses(outcome(predicted, labels), task)
    assert found == pytest.approx(np.array(expected), nan_ok=True)


def test_examples_are_the_extremes_of_the_test_part(binary_run: Path) -> None:
    run = Run.open(binary_run)
    own = next(o for o in chosen_outcomes(run) if o.fold == run.chosen[0])
    examples = choose_examples(own, run.task, Cache.open(binary_run.parent / "binary.cache"))
    order = [own.ids[at] for at in np.argsort(row_losses(own, run.task), kind="stable")]
    assert [example.name for example in examples] == [*order[:3], *order[: -1 - 3 : -1]]
    assert all(example.graph == example.row for example in examples)


def test_weights_are_grouped_by_class_or_by_thirds() -> None:
    weights = np.arange(12.0).reshape(6, 2)
    classes = Task("multiclass", "graph", 1, "accuracy", (0.0, 1.0))
    found = group_weights(weights, np.array([[0], [1], [1], [0], [np.nan], [1]]), classes)
    assert np.array_equal(found["class 0"], weights[[0, 3]])
    assert np.array_equal(found["class 1"], weights[[1, 2, 5]])
    quantity = Task("regression", "graph", 1, "rmse")
    thirds = group_weights(weights, np.array([[6.0], [1], [2], [5], [3], [4]]), quantity)
    assert [len(members) for members in thirds.values()] == [2, 2, 2]
    assert list(group_weights(weights, np.zeros((6, 1)), Task("binary", "node", 1, "f1"))) == [
        "all graphs"
    ]


def test_a_path_is_drawn_as_a_line() -> None:
    places = layout(5, np.array([[0, 1, 2, 3], [1, 2, 3, 4]]))
    gaps = np.linalg.norm(np.diff(places, axis=0), axis=1)
    assert gaps == pytest.approx([1] * 4, rel=0.02)
    assert np.ptp(places[:, 0]) == pytest.approx(4, rel=0.02)  # lying down


def test_parts_that_no_path_joins_stand_apart() -> None:
    places = layout(4, np.array([[0, 2], [1, 3]]))
    assert np.isfinite(places).all()
    assert np.linalg.norm(places[0] - places[2]) > np.linalg.norm(places[0] - places[1])


def test_neighbourhood_is_breadth_first() -> None:
    edges = np.array([[0, 0, 1, 3, 4], [1, 2, 3, 4, 5]])
    assert neighbourhood(edges, [0], 3).tolist() == [0, 1, 2]
    assert neighbourhood(edges, [0], 4).tolist() == [0, 1, 2, 3]
    assert neighbourhood(edges, [5], 10).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_weight_that_rounds_to_zero_has_no_sign() -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    weight_sets_figure(np.array([[[-0.001, 0.5, -0.25]]]), 0, about="").picture.draw(axes)
    assert [text.get_text() for text in axes.texts] == ["0.00", "0.50", "\N{MINUS SIGN}0.25"]
