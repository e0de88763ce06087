"""Probabilities are told from logits by how they are made, not by their size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv, global_mean_pool

from histograph_post.caches.caching import cache
from histograph_post.data import load_data
from histograph_post.models.model_call import OutputForm


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.sigmoid(x), True),
        (lambda x: x.sigmoid().squeeze(-1), True),
        (lambda x: nn.Sigmoid()(x).view(-1), True),
        (lambda x: nn.functional.softmax(x, dim=-1), True),
        (lambda x: nn.functional.log_softmax(x, dim=-1), False),
        (lambda x: x.sigmoid() * 3, False),
        (lambda x: x, False),
    ],
)
def test_form(function, expected: bool) -> None:
    with OutputForm() as form:
        output = function(torch.randn(4, 2) + 0)
    assert form.is_probability(output) is expected


class Net(nn.Module):
    def __init__(self, squash: bool) -> None:
        super().__init__()
        self.squash = squash
        self.conv = GCNConv(4, 8)
        self.lin = nn.Linear(8, 1)
        nn.init.constant_(self.lin.bias, 0.2)

    def forward(self, x, edge_index, batch):
        logits = self.lin(global_mean_pool(self.conv(x, edge_index).relu(), batch)) * 0.1 + 0.3
        return torch.sigmoid(logits).squeeze(-1) if self.squash else logits


def test_own_score_is_the_same_for_logits_and_probabilities(tmp_path: Path) -> None:
    dataset = load_data("demo:", args={"num_graphs": 40})
    scores = []
    for squash in (False, True):
        torch.manual_seed(0)
        written = cache(Net(squash), dataset, tmp_path / f"{squash}.cache")
        assert written is not None
        outputs = written.outputs()
        # Both look like probabilities; only one is.
        assert outputs is not None
        assert ((outputs > 0) & (outputs < 1)).all()
        own = written.manifest.own_metrics
        assert own is not None
        assert own["probabilities"] is squash
        scores.append(own["all"])
    assert scores[0] == pytest.approx(scores[1])
