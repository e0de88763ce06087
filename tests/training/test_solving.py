"""Linear maps against scikit-learn, and against the gradient that is zero at the optimum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

from histograph_post.errors import DataError
from histograph_post.tasks import Task, infer_task
from histograph_post.training.solving import STRENGTHS, USUAL_STRENGTH, Solution, solve_linear

NONE = np.empty(0, np.int64)


def make(kind: str, rows: int = 150, columns: int = 12, targets: int = 1, seed: int = 0) -> Any:
    """Features of many scales, and labels that depend on them."""
    random = np.random.default_rng(seed)
    mixed = random.normal(size=(rows, columns)) @ random.normal(size=(columns, columns))
    features = (mixed * random.uniform(0.5, 2, columns) + 3).astype(np.float32)
    signal = (
        (features - features.mean(0))
        / features.std(0)
        @ random.normal(size=(columns, 3 if kind == "multiclass" else targets))
    )
    signal += random.normal(size=signal.shape) * signal.std()
    if kind == "regression":
        labels = 10 + 5 * signal
    elif kind == "multiclass":
        labels = signal.argmax(1)[:, None].astype(float)
    else:
        labels = (signal > 0.3 * signal.std()).astype(float)
    return features, labels, infer_task(labels, "graph", kind=kind)


def standardized(features: np.ndarray, train: np.ndarray) -> np.ndarray:
    return (features - features[train].mean(0)) / features[train].std(0)


def outputs(found: Solution, features: np.ndarray) -> np.ndarray:
    return features @ found.weight.numpy().T + found.bias.numpy()


def objective(
    found: Solution, features: np.ndarray, labels: np.ndarray, task: Task, train: np.ndarray
) -> tuple[float, float]:
    """The penalised loss on all of torch's own ground, and its largest derivative."""
    rows = torch.from_numpy(standardized(features, train)[train]).double()
    scale = torch.from_numpy(features[train].std(0)).double()
    mean = torch.from_numpy(features[train].mean(0)).double()
    weight = found.weight.double() * scale
    bias = (found.bias.double() + found.weight.double() @ mean).requires_grad_()
    weight.requires_grad_()
    targets = found.scale.apply(
        task.targets(labels)[train].double()
        if task.kind != "multiclass"
        else task.targets(labels)[train]
    )
    predicted = rows @ weight.T + bias
    if task.kind == "multiclass":
        loss = task.loss(predicted, targets)
    else:
        loss = sum(
            (task.loss(predicted[:, [t]], targets[:, [t]]) for t in range(targets.size(1))),
            torch.zeros(()),
        )
    value = loss + found.strength / 2 * weight.square().sum()
    value.backward()
    return float(value.detach()), max(float(v.grad.abs().max()) for v in (weight, bias))


@pytest.mark.parametrize("columns", [12, 300], ids=["tall", "wide"])
@pytest.mark.parametrize("kind", ["binary", "multiclass", "multilabel", "regression"])
@pytest.mark.parametrize("strength", [1.0, 0.01])
def test_the_gradient_is_zero_with_missing_labels(kind: str, columns: int, strength: float) -> None:
    features, labels, task = make(kind, columns=columns, targets=1 if kind == "binary" else 3)
    labels[np.random.default_rng(1).random(labels.shape) < 0.3] = np.nan
    train, valid = np.arange(100), np.arange(100, 150)
    found = solve_linear(features, task.targets(labels), task, train, valid, strengths=[strength])
    labelled = train[~np.isnan(labels[train]).all(1)]
    _, slope = objective(found, features, labels, task, labelled)
    assert slope < 2e-4


@pytest.mark.parametrize("columns", [12, 300], ids=["tall", "wide"])
@pytest.mark.parametrize("kind", ["binary", "multiclass"])
def test_it_is_the_logistic_regression_of_scikit_learn(kind: str, columns: int) -> None:
    features, labels, task = make(kind, columns=columns)
    train, valid, strength = np.arange(100), np.arange(100, 150), 0.05
    found = solve_linear(features, task.targets(labels), task, train, valid, strengths=[strength])
    model = LogisticRegression(C=1 / (strength * len(train)), tol=1e-9, max_iter=10_000)
    rows = standardized(features, train).astype(float)
    model.fit(rows[train], labels[train, 0])
    expected = model.decision_function(rows).reshape(len(rows), -1)
    np.testing.assert_allclose(
        task.probabilities(torch.from_numpy(outputs(found, features))),
        task.probabilities(torch.from_numpy(expected)),
        atol=2e-4,
    )


@pytest.mark.parametrize("columns", [12, 300], ids=["tall", "wide"])
def test_it_is_the_ridge_of_scikit_learn_for_each_target_by_itself(columns: int) -> None:
    features, labels, task = make("regression", columns=columns, targets=3)
    labels[:40, 1] = np.nan
    train, valid, strength = np.arange(100), np.arange(100, 150), 0.2
    found = solve_linear(features, task.targets(labels), task, train, valid, strengths=[strength])
    rows = standardized(features, train).astype(float)
    for target in range(3):
        present = train[~np.isnan(labels[train, target])]
        truth = labels[present, target]
        # In single units: the penalty is on weights of targets at their scale.
        scaled = (truth - truth.mean()) / truth.std()
        model = Ridge(alpha=strength * len(present) / 2).fit(rows[present], scaled)
        expected = model.predict(rows) * truth.std() + truth.mean()
        got = found.scale.undo(outputs(found, features))[:, target]
        np.testing.assert_allclose(got, expected, atol=2e-3 * truth.std())


def test_the_strength_is_the_best_on_validation_and_the_path_ends_behind_it() -> None:
    features, labels, task = make("binary", rows=400, columns=60)
    train, valid = np.arange(100), np.arange(100, 400)
    targets = task.targets(labels)
    found = solve_linear(features, targets, task, train, valid)
    assert [point.strength for point in found.path] == list(STRENGTHS[: len(found.path)])
    assert len(found.path) < len(STRENGTHS)
    scores = [point.valid_scores[task.metric] for point in found.path]
    assert found.chosen == int(np.argmax(scores))
    assert found.strength == STRENGTHS[found.chosen]
    losses = [point.train_loss for point in found.path]
    assert losses == sorted(losses, reverse=True)
    # What is said of a strength is what the map gives that is solved for it alone.
    alone = solve_linear(features, targets, task, train, valid, strengths=[found.strength])
    torch.testing.assert_close(alone.weight, found.weight, atol=1e-3, rtol=1e-2)
    predicted = found(torch.from_numpy(features[valid])).double().numpy()
    score = task.score(predicted, labels[valid])
    assert score == pytest.approx(scores[found.chosen], abs=1e-3)


def test_equal_scores_are_decided_by_the_loss() -> None:
    features, labels, task = make("binary", rows=300)
    task = infer_task(labels, "graph", metric="accuracy")
    train, valid = np.arange(100), np.arange(100, 104)
    found = solve_linear(features, task.targets(labels), task, train, valid)
    best = max(point.valid_scores["accuracy"] for point in found.path)
    equal = [point for point in found.path if point.valid_scores["accuracy"] == best]
    assert len(equal) > 1
    assert found.path[found.chosen].valid_loss == min(point.valid_loss for point in equal)


def test_without_a_validation_part_the_strength_is_fixed() -> None:
    features, labels, task = make("regression", targets=2)
    found = solve_linear(features, task.targets(labels), task, np.arange(150), NONE)
    assert found.strength == USUAL_STRENGTH
    assert len(found.path) == 1
    assert not found.path[0].valid_scores
    _, slope = objective(found, features, labels, task, np.arange(150))
    assert slope < 2e-4


def test_rows_unlike_the_training_rows_are_read_where_those_end() -> None:
    features = torch.tensor([[-1.0, 3.0], [3.0, -1.0], [-1.0, -1.0], [3.0, 3.0]] * 5)
    far = torch.tensor([[1e6, -1e6], [3.0, -1.0], [4.0, 0.0]])
    labels = np.concatenate([2 * features[:, :1].double().numpy() + 4, np.zeros((3, 1))])
    task = infer_task(labels, "graph", kind="regression")
    rows, train = torch.cat([features, far]), np.arange(20)
    found = solve_linear(rows, task.targets(labels), task, train, train, strengths=[1e-6])
    predicted = found.scale.undo(found(rows).double().numpy())[:, 0]
    np.testing.assert_allclose(predicted[:20], labels[:20, 0], atol=1e-3)
    np.testing.assert_allclose(predicted[20:], [10.0] * 3, atol=1e-3)


def test_a_validation_part_of_one_class_is_decided_by_the_loss() -> None:
    features, labels, task = make("binary")
    valid = np.flatnonzero(labels[:, 0] == 1)[:20]
    train = np.setdiff1d(np.arange(150), valid)
    task = infer_task(labels, "graph", metric="roc_auc")
    found = solve_linear(features, task.targets(labels), task, train, valid)
    losses = [point.valid_loss for point in found.path]
    assert found.chosen == int(np.argmin(losses))


def test_constant_columns_do_no_harm() -> None:
    features, labels, task = make("binary")
    train, valid, targets = np.arange(100), np.arange(100, 150), task.targets(labels)
    padded = np.hstack([features, np.full((150, 2), 7.0, np.float32)])
    padded[140:, -1] = -1e3  # moves outside of the training part only
    plain = solve_linear(features, targets, task, train, valid)
    found = solve_linear(padded, targets, task, train, valid, widths=[12, 2])
    torch.testing.assert_close(found.weight[:, :12], plain.weight, atol=1e-4, rtol=1e-3)
    assert found.weight[:, 12:].abs().max() < 1e-6


def test_targets_of_one_class_or_no_label_have_a_constant_output() -> None:
    features, labels, task = make("multilabel", targets=4)
    labels[:, 1], labels[:100, 2] = 1.0, np.nan
    train, valid = np.arange(100), np.arange(100, 150)
    found = solve_linear(features, task.targets(labels), task, train, valid)
    assert found.weight[1:3].eq(0).all()
    assert found.weight[[0, 3]].ne(0).all()
    assert found.bias[1] == pytest.approx(np.log(100.5 / 0.5))
    assert found.bias[2] == 0
    only = np.ones((150, 1))
    task = Task("binary", "graph", 1, "roc_auc", (0.0, 1.0))
    found = solve_linear(features, task.targets(only), task, train, valid)
    assert found.weight.eq(0).all()
    assert found.bias[0] > 4


def test_a_class_that_no_training_row_has_is_never_predicted() -> None:
    features, labels, task = make("multiclass")
    train = np.flatnonzero(labels[:100, 0] != 1)
    found = solve_linear(features, task.targets(labels), task, train, np.arange(100, 150))
    assert found.weight[1].eq(0).all()
    assert set(outputs(found, features).argmax(1)) == {0, 2}


def test_rare_classes_count_as_much_if_asked_to() -> None:
    for kind in ("binary", "multiclass"):
        features, labels, task = make(kind, rows=600)
        rare = np.flatnonzero(labels[:, 0] == 1)
        train = np.setdiff1d(np.arange(600), rare[10:])
        targets = task.targets(labels)
        found = [
            solve_linear(features, targets, task, train, NONE, balance=balance)
            for balance in (False, True)
        ]
        shares = [
            task.probabilities(torch.from_numpy(outputs(each, features)[train]))[
                :, -1 if kind == "binary" else 1
            ].mean()
            for each in found
        ]
        assert shares[0] < 0.1
        assert shares[1] > 2 * shares[0]


def test_no_label_at_all_and_no_number_are_refused() -> None:
    features, labels, task = make("binary")
    train, valid = np.arange(100), np.arange(100, 150)
    for row, scaled in ((0, True), (100, False)):  # of the training part, and of validation
        odd = features.copy()
        odd[row, 1] = np.nan
        with pytest.raises(DataError, match=r"solve: found NaN or infinity, .*histograph verify"):
            solve_linear(odd, task.targets(labels), task, train, valid, scaled=scaled)
    labels[:100] = np.nan
    with pytest.raises(DataError, match="found no training row with a label"):
        solve_linear(features, task.targets(labels), task, train, valid)
