"""Tasks: found from the labels, scored as scikit-learn does, never upset by missing labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from histograph_post.errors import DataError
from histograph_post.metrics import METRICS, class_scores, ranking_scores
from histograph_post.tasks import TargetScale, Task, infer_task, label_summary

NAN = float("nan")


def close(score: float) -> object:
    return pytest.approx(score, rel=1e-12, abs=1e-15)


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
    as_probabilities = task.scores(task.logits(1 / (1 + np.exp(-logits))), labels)
    two_columns = task.scores(np.hstack([np.zeros_like(logits), logits]), labels)
    assert as_logits == pytest.approx(as_probabilities)
    assert as_logits == pytest.approx(two_columns)
    keep = ~np.isnan(labels[:, 0])
    assert as_logits["roc_auc"] == close(sk.roc_auc_score(labels[keep, 0], logits[keep, 0]))
    assert as_logits["accuracy"] == sk.accuracy_score(labels[keep, 0], logits[keep, 0] > 0)


def test_labels_may_leave_out_a_few_classes_but_no_million() -> None:
    few = infer_task(column(0, 1, 999, 0, 1, 999, 0, 1, 999), "graph")
    assert len(few.classes) == 1000
    for last in (10**12, 1e30):
        many = infer_task(column(0, 1, last, 0, 1, last, 0, 1, last), "graph")
        assert (many.kind, many.classes) == ("multiclass", (0.0, 1.0, float(last)))


def test_classes_may_have_any_numbers() -> None:
    truth, chosen = np.array([0, 10**6, 7]), np.array([0, 10**6, 10**6])
    assert class_scores(truth, chosen) == pytest.approx(
        {"accuracy": 2 / 3, "balanced_accuracy": 2 / 3, "f1": (1 + 2 / 3 + 0) / 3}
    )


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("rows", [1, 2, 5, 200])
def test_scores_of_classes_are_sklearns(classes: int, rows: int) -> None:
    random = np.random.default_rng(rows)
    for _ in range(20):
        truth, chosen = random.integers(0, classes, (2, rows))
        found = class_scores(truth, chosen)
        seen = np.unique(truth)
        macro = {"labels": seen, "average": "macro", "zero_division": 0.0}
        assert found["accuracy"] == pytest.approx(sk.accuracy_score(truth, chosen))
        assert found["balanced_accuracy"] == pytest.approx(sk.recall_score(truth, chosen, **macro))
        assert found["f1"] == pytest.approx(sk.f1_score(truth, chosen, **macro))


@given(
    st.lists(st.tuples(st.booleans(), st.integers(-3, 3) | st.floats(-3, 3)), min_size=2),
    st.sampled_from([np.float32, np.float64]),
)
def test_scores_of_an_order_are_sklearns(
    rows: list[tuple[bool, float]], kind: type[np.floating]
) -> None:
    truth = np.array([is_positive for is_positive, _ in rows]).astype(int)
    values = np.array([value for _, value in rows]).astype(kind)
    found = ranking_scores(truth, values)
    if len(set(truth)) < 2:
        assert found == {}
        return
    assert found["roc_auc"] == close(sk.roc_auc_score(truth, values))
    assert found["ap"] == close(sk.average_precision_score(truth, values))


def test_values_that_have_no_order_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        ranking_scores(np.array([0, 1, 1]), np.array([0.5, NAN, 0.5]))


def test_small_logits_are_not_taken_for_probabilities() -> None:
    task = infer_task(column(0, 1, 1, 1), "graph")
    assert task.scores(column(0.1, 0.2, 0.3, 0.4), column(0, 1, 1, 1))["accuracy"] == 0.75


def test_class_probabilities_turn_into_logits_and_back() -> None:
    labels = column(0, 2, 1, 0, 1, 2, 2, 0, 1)
    task = infer_task(labels, "node")
    probabilities = np.random.default_rng(0).dirichlet([1, 1, 1], size=9)
    found = task.probabilities(torch.from_numpy(task.logits(probabilities)))
    np.testing.assert_allclose(found.numpy(), probabilities, atol=1e-9)


def test_multilabel_averages_the_columns_that_have_both_classes() -> None:
    labels = np.array([[0, 1, NAN], [1, 1, NAN], [1, NAN, NAN], [0, 1, NAN]], dtype=float)
    outputs = np.array([[-1, 2, 0], [2, 2, 0], [-2, 1, 0], [-3, 1, 0]], dtype=float)
    task = infer_task(labels, "graph")
    scores = task.scores(outputs, labels)
    assert scores["roc_auc"] == close(sk.roc_auc_score(labels[:, 0], outputs[:, 0]))
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


@pytest.mark.parametrize("positive_weight", [None, torch.tensor([3.0, 0.5])])
def test_the_loss_ignores_missing_labels(positive_weight: torch.Tensor | None) -> None:
    outputs = torch.randn(4, 2, requires_grad=True)
    labels = np.array([[0, 1], [1, NAN], [NAN, NAN], [1, 0]], dtype=float)
    task = infer_task(labels, "graph")
    targets = task.targets(labels)
    loss = task.loss(outputs, targets, positive_weight=positive_weight)
    present = ~torch.isnan(targets)
    weights = None if positive_weight is None else positive_weight.expand(4, 2)[present]
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        outputs[present], targets[present], pos_weight=weights
    )
    assert torch.allclose(loss, expected)
    loss.backward()
    assert outputs.grad is not None
    assert torch.equal(outputs.grad[2], torch.zeros(2))
    assert task.loss(outputs, torch.full((4, 2), NAN)) == 0


def test_the_loss_of_two_classes_wants_one_column() -> None:
    task = infer_task(column(0, 1, 1), "graph")
    with pytest.raises(ValueError, match="must be the same as input size"):
        task.loss(torch.randn(3, 2), task.targets(column(0, 1, 1)))


@pytest.mark.parametrize("missing", [True, False])
def test_the_loss_of_a_regression_is_the_mean_square(missing: bool) -> None:
    labels = column(0.5, 1.5, NAN if missing else 2, 4)
    task = infer_task(labels, "graph")
    outputs, targets = torch.randn(4, 1), task.targets(labels)
    expected = (outputs - targets)[~torch.isnan(targets)].square().mean()
    assert torch.allclose(task.loss(outputs, targets), expected)


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize("class_weight", [None, torch.tensor([0.2, 1.0, 5.0])])
def test_the_multiclass_loss_is_the_cross_entropy_over_the_labelled(
    missing: bool, class_weight: torch.Tensor | None
) -> None:
    labels = column(0, 2, NAN if missing else 1, 1, 0, 1, 2, 0, 1)
    task = infer_task(labels, "node")
    outputs = torch.randn(9, 3)
    targets = torch.from_numpy(np.nan_to_num(labels[:, 0], nan=-1)).long()
    expected = torch.nn.functional.cross_entropy(
        outputs[targets >= 0], targets[targets >= 0], weight=class_weight
    )
    loss = task.loss(outputs, task.targets(labels), class_weight=class_weight)
    assert torch.allclose(loss, expected)
    assert task.loss(outputs, torch.full((9,), -1)) == 0
    with pytest.raises(DataError, match="found the value 7"):
        task.targets(column(7))


@given(st.lists(st.floats(-1e4, 1e4), min_size=2, max_size=20))
def test_probabilities_are_probabilities(values: list[float]) -> None:
    task = infer_task(column(0, 1), "graph", kind="binary")
    probabilities = task.probabilities(torch.from_numpy(column(*values)))
    assert ((probabilities >= 0) & (probabilities <= 1)).all()


def test_links_that_are_there_are_a_binary_task_even_without_negatives() -> None:
    for labels in (column(1, 1, 0, 1), column(1, 1, 1)):
        task = infer_task(labels, "link")
        assert (task.kind, task.classes, task.metric) == ("binary", (0.0, 1.0), "roc_auc")
    assert infer_task(column(1, 0), "link", metric="hits@20").metric == "hits@20"
    assert infer_task(column(0.5, 2.5, 1), "link").kind == "regression"
    with pytest.raises(DataError, match="found 'hits@20'"):
        infer_task(column(1, 0), "graph", metric="hits@20")


def test_link_ranks_by_hand() -> None:
    # Negatives 5, 3, 3, 1: the links rank 1st, between 2nd and 4th (ties), and 5th.
    outputs, labels = column(6, 3, 0, 5, 3, 3, 1), column(1, 1, 1, 0, 0, 0, 0)
    scores = infer_task(labels, "link").scores(outputs, labels)
    assert scores["mrr"] == pytest.approx((1 + 1 / 3 + 1 / 5) / 3)
    assert scores["roc_auc"] == pytest.approx((4 + 2 + 0) / 12)
    assert list(scores)[:3] == ["roc_auc", "ap", "mrr"]
    assert not [name for name in scores if name.startswith("hits")]  # fewer than 20 negatives


def test_hits_count_the_links_above_the_kth_negative_and_ties_are_below() -> None:
    negatives = np.arange(60.0)  # the 20th highest is 40, the 50th is 10
    links = np.array([100, 40.5, 40, 39, 10.5, 10, -1])
    labels = np.concatenate([np.ones(7), np.zeros(60)])[:, None]
    task = infer_task(labels, "link")
    scores = task.scores(np.concatenate([links, negatives])[:, None], labels)
    assert scores["hits@20"] == pytest.approx(2 / 7)
    assert scores["hits@50"] == pytest.approx(5 / 7)


def test_large_outputs_are_ranked_although_their_probabilities_are_all_one() -> None:
    labels = column(1, 0, 1, 0)
    scores = infer_task(labels, "link").scores(column(90, 80, 70, 60), labels)
    assert scores["roc_auc"] == pytest.approx(0.75)
    assert scores["mrr"] == pytest.approx((1 + 1 / 2) / 2)


def test_training_links_alone_have_no_score() -> None:
    task = infer_task(column(1, 0), "link")
    assert task.scores(column(1, 2, 3), column(1, 1, 1)) == {}
    assert task.balancing_weights(column(1, 1, 1))["positive_weight"].tolist() == [1.0]


@given(
    links=st.lists(st.integers(0, 8), min_size=1, max_size=10),
    negatives=st.lists(st.integers(0, 8), min_size=1, max_size=10),
)
def test_a_links_rank_is_the_mean_of_the_best_and_the_worst(
    links: list[int], negatives: list[int]
) -> None:
    labels = column(*[1] * len(links), *[0] * len(negatives))
    scores = infer_task(labels, "link").scores(column(*links, *negatives), labels)
    ranks = [
        1 + sum(n > link for n in negatives) + sum(n == link for n in negatives) / 2
        for link in links
    ]
    assert scores["mrr"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
    assert scores["roc_auc"] == pytest.approx(
        1 - np.mean([(r - 1) / len(negatives) for r in ranks])
    )


LABELS = np.array([[100.5, 2.0, 7.0], [101.0, np.nan, 7.0], [104.0, 6.0, 7.0]])


def test_targets_are_learned_around_zero_and_come_back() -> None:
    scale = TargetScale.of(infer_task(LABELS, "graph", kind="regression"), LABELS)
    learned = scale.apply(torch.from_numpy(LABELS))  # [rows, targets]
    assert learned.nanmean(dim=0).tolist() == pytest.approx([0, 0, 0])
    assert learned[:, 1].tolist() == pytest.approx([-1, float("nan"), 1], nan_ok=True)
    np.testing.assert_allclose(scale.undo(learned), LABELS)
    np.testing.assert_allclose(scale.undo(learned.numpy()), LABELS)


def test_a_tensor_keeps_its_precision_and_an_array_becomes_double() -> None:
    scale = TargetScale((100.0,), (3.0,))
    assert scale.undo(torch.zeros(2, 1)).dtype == torch.float32
    assert scale.undo(np.zeros((2, 1), np.float32)).dtype == np.float64


def test_other_tasks_are_left_alone() -> None:
    labels = np.array([[0.0], [1.0], [1.0]])
    scale = TargetScale.of(infer_task(labels, "graph"), labels)
    assert scale == TargetScale()
    assert scale.undo(labels) is labels


@pytest.mark.parametrize(
    ("kind", "metric"), [(kind, metric) for kind in METRICS for metric in METRICS[kind]]
)
def test_the_tracked_metric_alone_is_the_one_among_all(kind: str, metric: str) -> None:
    random = np.random.default_rng(0)
    columns = 2 if kind == "multilabel" else 1
    top = {"multiclass": 3, "regression": 100}.get(kind, 2)
    labels = random.integers(top, size=(40, columns)).astype(float)
    task = infer_task(labels, "graph", kind=kind, metric=metric)
    outputs = random.normal(size=(40, 3 if kind == "multiclass" else columns))
    assert task.score(outputs, labels) == task.scores(outputs, labels)[metric]
    samples = random.integers(40, size=(50, 40))
    expected = [task.score(outputs[rows], labels[rows]) for rows in samples]
    np.testing.assert_allclose(task.resample(outputs, labels, samples), expected, rtol=1e-12)
