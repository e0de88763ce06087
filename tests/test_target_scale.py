"""The scale of regression targets: there and back, for tensors and for arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from histograph_post.tasks import TargetScale, infer_task

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
