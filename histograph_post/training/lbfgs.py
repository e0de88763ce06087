"""L-BFGS for several smooth convex functions at once, each with a memory and a step of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Largest entry of the gradient at a solution, in variables in which the curvature is about 1.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-5}

#: Evaluations of the gradient for one strength; a few tens are usual.
MOST_EVALUATIONS = 1000

#: Steps that L-BFGS remembers.
MEMORY = 10


def minimize(
    evaluate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], start: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return where the gradients of several functions are zero, by L-BFGS on all of them at once.

    Each has its own memory and step, and leaves once it has converged, or once no step that is not
    lost in rounding makes it better.

    Args:
        evaluate: From points ``[P, d]`` and the numbers of these problems ``[P]`` to their values
            ``[P]`` and gradients ``[P, d]``.
        start: ``[problems, d]``, where their curvature is about 1 in all directions.
        dtype: Precision of the values.
    """
    tolerance, rounding = TOLERANCE[dtype], torch.finfo(dtype).eps
    solved = start.clone()
    problems = torch.arange(len(start))
    point = start
    value, gradient = evaluate(point, problems)
    length, direction = torch.ones_like(value), -gradient
    memory: list[tuple[Tensor, Tensor, Tensor]] = []  # steps and changes [P, d], 1 / product [P, 1]
    done = gradient.abs().amax(1) <= tolerance
    for _ in range(MOST_EVALUATIONS):
        solved[problems[done]] = point[done]
        if bool(done.all()):
            break
        if bool(done.any()):
            left = ~done
            problems, point, value = problems[left], point[left], value[left]
            gradient, length, direction = gradient[left], length[left], direction[left]
            memory = [(step[left], change[left], inverse[left]) for step, change, inverse in memory]
        step = length.unsqueeze(1) * direction  # [P, d]
        new_value, new_gradient = evaluate(point + step, problems)
        fall = (gradient * step).sum(1)  # [P], negative
        better = new_value <= value + 1e-4 * fall + rounding * value.abs()
        taken = better.unsqueeze(1)
        step = torch.where(taken, step, 0.0)
        change = torch.where(taken, new_gradient - gradient, 0.0)
        product = (step * change).sum(1, keepdim=True)  # [P, 1]
        memory.append((step, change, torch.where(product > 0, 1 / product, 0.0)))
        del memory[:-MEMORY]
        point = point + step
        value = torch.where(better, new_value, value)
        gradient = gradient + change
        direction = torch.where(taken, _descent(gradient, memory), direction)
        length = torch.where(better, 1.0, length / 2)
        done = (gradient.abs().amax(1) <= tolerance) | (length < 1e-6)
    else:
        solved[problems] = point
    return solved


def _descent(gradient: Tensor, memory: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Return the direction of L-BFGS, the two loops over its memory: ``[P, d]``."""
    direction, shares = -gradient, []
    for step, change, inverse in reversed(memory):
        share = inverse * (step * direction).sum(1, keepdim=True)  # [P, 1]
        shares.append(share)
        direction = direction - share * change
    step, change, inverse = memory[-1]
    length = (change * change).sum(1, keepdim=True) * inverse  # [P, 1]
    direction = torch.where(length > 0, direction / length, direction)
    for (step, change, inverse), share in zip(memory, reversed(shares), strict=True):
        other = inverse * (change * direction).sum(1, keepdim=True)  # [P, 1]
        direction = direction + (share - other) * step
    return direction
