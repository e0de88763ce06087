"""Minima of several functions at once, against those found one by one."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import minimize as minimize_one
from torch import Tensor

from histograph_post.training.minimizing import TOLERANCE, minimize


def test_each_function_is_brought_to_its_own_minimum() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(5, 4, generator=generator, dtype=torch.float64)
    steepness = torch.tensor([0.01, 0.3, 1.0, 5.0, 40.0], dtype=torch.float64)

    def evaluate(points: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        """A smooth absolute value, and a little of a square."""
        points = points.detach().requires_grad_()
        away = points - centres[problems]
        values = steepness[problems] * ((1 + away.square()).sqrt() + 0.1 * points.square()).sum(1)
        (gradients,) = torch.autograd.grad(values.sum(), points)
        return values.detach(), gradients

    found = minimize(evaluate, torch.zeros(5, 4, dtype=torch.float64), torch.float64)
    _, gradients = evaluate(found, torch.arange(5))
    assert gradients.abs().max() <= TOLERANCE[torch.float64]
    for problem in range(1, 5):

        def alone(point: np.ndarray, problem: int = problem) -> tuple[float, np.ndarray]:
            value, gradient = evaluate(torch.from_numpy(point)[None], torch.tensor([problem]))
            return float(value), gradient[0].numpy()

        expected = minimize_one(alone, np.zeros(4), jac=True, options={"gtol": 1e-9}).x
        np.testing.assert_allclose(found[problem].numpy(), expected, atol=1e-4)


def test_what_is_solved_stays_where_it_is() -> None:
    calls = []

    def evaluate(points: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(problems.tolist())
        return points.square().sum(1) / 2, points

    start = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    found = minimize(evaluate, start, torch.float64)
    torch.testing.assert_close(found, torch.zeros(2, 2, dtype=torch.float64))
    assert calls[0] == [0, 1]
    assert all(problems == [1] for problems in calls[1:])
