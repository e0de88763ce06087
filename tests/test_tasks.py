"""Tasks: found from the labels, scored as scikit-learn does, never upset by missing labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from histograph_post.errors import DataError
from histograph_post.tasks import Task, infer_task, label_summary

NAN = float("nan")


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)[:, None]


@pytest.mark.parametrize(
    ("labels", "kind", "classes"),
    [
        (column(0, 1, 1, 0), "binary", (0.0, 1.0)),
        (column(-1, 1, 1, -1), "binary", (-1.0, 1.0)),
        (column(0, NAN, 1, 1), "binary", (0.0, 1.0)),
        (column(0, 1, 2, 2, 1, 0, 1, 0, 2), "multiclass", (0.0, 1.0, 2.0)),
        # Class 1 is missing from the data, not from the model.
        (column(0, 2, 2, 0, 0, 2, 2, 0, 2), "multiclass", (0.0, 1.0, 2.0)),
        (np.array([[0, 1], [NAN, 0], [1, 1]]), "multilabel", ()),
        (column(0.5, 1.25, -3), "regression", ()),
        (np.array([[0.5, 1], [2, 3]]), "regression", ()),
        # Whole numbers, but nearly one value per row: a count, not a class.
        (column(*range(40)), "regression", ()),
    ],
)
def test_task_is_found_from_the_labels(
    labels: np.ndarray, kind: str, classes: tuple[float, ...]
) -> None:
    task = infer_task(labels, "graph")
    assert (task.kind, task.classes) == (kind, classes)
    assert Task.from_json(task.to_json()) == task


def test_override_and_refusals() -> None:
    labels = column(0, 1, 2, 2, 0, 1, 1, 0, 2)
    assert infer_task(labels, "graph", kind="regression", metric="mae").metric == "mae"
    for kind, metric in [("binary", None), ("multilabel", None), ("ranking", None)]:
        with pytest.raises(DataError, match="found"):
            infer_task(labels, "graph", kind=kind, metric=metric)
    with pytest.raises(DataError, match="expected one of"):
        infer_task(labels, "graph", metric="rmse")
    with pytest.raises(DataError, match="found none"):
        infer_task(column(NAN, NAN), "node")


def test_binary_scores_agree_for_logits_probabilities_and_two_columns() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 1))
    labels = (logits + rng.normal(size=(50, 1)) > 0).astype(float)
    labels[3] = NAN
    task = infer_task(labels, "graph")
    as_logits = task.scores(logits, labels)
    as_probabilities = task.scores(1 / (1 + np.exp(-logits)), labels)
    two_columns = task.scores(np.hstack([np.zeros_like(logits), logits]), labels)
    assert as_logits == pytest.approx(as_probabilities)
    assert as_logits == pytest.approx(two_columns)
    keep = ~np.isnan(labels[:, 0])
    assert as_logits["roc_auc"] == sk.roc_auc_score(labels[keep, 0], logits[keep, 0])
    assert as_logits["accuracy"] == sk.accuracy_score(labels[keep, 0], logits[keep, 0] > 0)


def test_multilabel_averages_the_columns_that_have_both_classes() -> None:
    labels = np.array([[0, 1, NAN], [1, 1, NAN], [1, NAN, NAN], [0, 1, NAN]], dtype=float)
    outputs = np.array([[-1, 2, 0], [2, 2, 0], [-2, 1, 0], [-3, 1, 0]], dtype=float)
    task = infer_task(labels, "graph")
    scores = task.scores(outputs, labels)
    assert scores["roc_auc"] == sk.roc_auc_score(labels[:, 0], outputs[:, 0])
    assert scores["accuracy"] == pytest.approx((0.75 + 1.0) / 2)
    assert len(label_summary(task, labels, ["a", "b", "c"])) == 2
    assert task.scores(outputs[:, :3], np.full_like(labels, NAN)) == {}


def test_one_class_split_has_accuracy_but_no_roc_auc() -> None:
    task = infer_task(column(0, 1, 1, 0), "graph")
    scores = task.scores(column(1, -1), column(1, 1))
    assert scores["accuracy"] == 0.5
    assert "roc_auc" not in scores
    assert np.isnan(
        infer_task(column(0, 1), "graph", kind="binary", metric="roc_auc").score(
            column(1, -1), column(1, 1)
        )
    )


def test_regression_scores() -> None:
    task = infer_task(column(0.5, 1.5, 4), "graph")
    scores = task.scores(column(1, 1, 4), column(0.5, 1.5, NAN))
    assert scores["rmse"] == pytest.approx(0.5)
    assert scores["mae"] == pytest.approx(0.5)
    assert not task.higher_is_better


def test_losses_ignore_missing_labels() -> None:
    outputs = torch.randn(4, 2, requires_grad=True)
    task = infer_task(np.array([[0, 1], [1, NAN], [NAN, NAN], [1, 0]], dtype=float), "graph")
    targets = task.targets(np.array([[0, 1], [1, NAN], [NAN, NAN], [1, 0]], dtype=float))
    loss = task.loss(outputs, targets)
    present = ~torch.isnan(targets)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        outputs[present], targets[present]
    )
    assert torch.allclose(loss, expected)
    loss.backward()
    assert outputs.grad is not None
    assert torch.equal(outputs.grad[2], torch.zeros(2))
    assert task.loss(outputs, torch.full((4, 2), NAN)) == 0


def test_multiclass_loss_is_cross_entropy_over_the_labelled() -> None:
    labels = column(0, 2, NAN, 1, 0, 1, 2, 0, 1)
    task = infer_task(labels, "node")
    outputs = torch.randn(9, 3)
    keep = [0, 1, 3, 4, 5, 6, 7, 8]
    expected = torch.nn.functional.cross_entropy(
        outputs[keep], torch.tensor([0, 2, 1, 0, 1, 2, 0, 1])
    )
    assert torch.allclose(task.loss(outputs, task.targets(labels)), expected)
    with pytest.raises(DataError, match="found the value 7"):
        task.targets(column(7))


@given(st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=20))
def test_probabilities_are_probabilities(values: list[float]) -> None:
    task = infer_task(column(0, 1), "graph", kind="binary")
    probabilities = task.probabilities(column(*values))
    assert ((probabilities >= 0) & (probabilities <= 1)).all()
