"""Second-order readouts against the formulas of their papers, written out graph by graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from histograph_post.heads import build_head
from histograph_post.heads.set_pooling import matrix_square_root

SIZES = [6, 1, 30, 2]
BATCH = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
IN_DIMS = [4, 3]


@pytest.fixture
def history():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(len(BATCH), dim, generator=generator) for dim in IN_DIMS]


def make_head(name, **options):
    torch.manual_seed(1)
    return build_head(name, IN_DIMS, 2, dim=5, **options).eval()


def per_graph(history):
    return [own.numpy().astype(np.float64) for own in torch.cat(history, 1).split(SIZES)]


def classify(head, rows):
    return head.classifier(torch.tensor(np.stack(rows), dtype=torch.float32))


def test_bilinear_second_order_pooling(history):
    head = make_head("sopool", rank=3)
    weight = head.map.weight.detach().numpy().T  # [7, 3]
    expected = [((own @ weight).T @ (own @ weight)).reshape(-1) for own in per_graph(history)]
    torch.testing.assert_close(head(history, BATCH), classify(head, expected))
    assert head.num_parameters == 7 * 3 + (9 * 5 + 5) + (5 * 2 + 2)


def test_attentional_second_order_pooling(history):
    head = make_head("sopool-attention")
    attention = head.map.weight.detach().numpy()[0]  # [7]
    expected = [own.T @ (own @ attention) for own in per_graph(history)]
    torch.testing.assert_close(head(history, BATCH), classify(head, expected))
    assert head.num_parameters == 7 + (7 * 5 + 5) + (5 * 2 + 2)


def test_distribution_embedding(history):
    head = make_head("dkepool")
    weight = head.map.weight.detach().numpy()  # [5, 7]
    expected = [
        weight @ np.cov(own, rowvar=False, bias=True) @ own.mean(axis=0)
        for own in per_graph(history)
    ]
    torch.testing.assert_close(head(history, BATCH), classify(head, expected))
    assert head.num_parameters == 5 * 7 + (5 * 5 + 5) + (5 * 2 + 2)


def test_robust_distribution_embedding(history):
    head = make_head("dkepool-robust")
    weight = head.map.weight.detach().numpy()  # [5, 5]
    projection = head.projection.weight.detach().numpy().T  # [7, 5]
    expected = []
    for own in per_graph(history):
        own = own @ projection
        covariance = np.cov(own, rowvar=False, bias=True)
        root = matrix_square_root(torch.from_numpy(covariance).unsqueeze(0), 5)[0].numpy()
        expected.append(weight @ root @ own.mean(axis=0))
    torch.testing.assert_close(head(history, BATCH), classify(head, expected), rtol=1e-4, atol=1e-5)


def test_square_root_converges_to_that_of_the_eigenvalues():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 50, 6, generator=generator, dtype=torch.float64)
    matrices = rows.transpose(1, 2) @ rows / 50 * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)
    values, vectors = torch.linalg.eigh(matrices)
    expected = vectors @ torch.diag_embed(values.sqrt()) @ vectors.transpose(1, 2)
    torch.testing.assert_close(matrix_square_root(matrices, 20), expected)
    few = matrix_square_root(matrices, 5)
    assert (few - expected).norm() / expected.norm() < 0.05


def test_square_root_has_a_gradient_where_there_is_no_covariance():
    matrices = torch.zeros(1, 4, 4, requires_grad=True)
    root = matrix_square_root(matrices, 5)
    assert torch.equal(root, torch.zeros(1, 4, 4))
    root.sum().backward()
    assert matrices.grad.isfinite().all()


def test_noise_is_for_training_only_and_15_decibels_below_the_features():
    torch.manual_seed(0)
    batch = torch.arange(2).repeat_interleave(4000)
    # Two graphs of very different scale: each has noise in proportion to its own.
    scale = torch.tensor([1.0, 100.0])[batch].unsqueeze(1)
    history = [scale * torch.randn(8000, 7) + 3]
    head = build_head("dkepool-robust", [7], 2, dim=7)
    torch.nn.init.eye_(head.projection.weight)
    torch.nn.init.eye_(head.map.weight)

    head.eval()
    assert torch.equal(head(history, batch), head(history, batch))
    head.train()
    assert not torch.equal(head(history, batch), head(history, batch))

    # Independent noise adds its power to the diagonal of the covariance, of which W S^(1/2) m with
    # W = I shows the root: for a spherical graph (1 + 10^-1.5)^(1/2).
    head.classifier = torch.nn.Identity()
    with torch.no_grad():
        noisy = head(history, batch)
        clean = head.eval()(history, batch)
    ratio = noisy[0].norm() / clean[0].norm()
    assert float(ratio) == pytest.approx((1 + 10**-1.5) ** 0.5, rel=5e-3)
