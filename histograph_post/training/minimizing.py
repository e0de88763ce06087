"""The loss of a linear map, and L-BFGS for several smooth convex functions at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..tasks import Task

#: Largest entry of the gradient at a solution, in variables in which the curvature is about 1.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 3e-5}

#: Evaluations of the gradient for one strength; a few tens are usual.
MOST_EVALUATIONS = 1000

#: Steps that L-BFGS remembers.
MEMORY = 10


def minimize(
    evaluate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    dtype: torch.dtype,
    tolerance: float | None = None,
) -> Tensor:
    """Return the minima of several functions, by L-BFGS on all of them at once.

    Each has its own memory and step size, and is done once it has converged, or once no step larger
    than rounding improves it.

    Args:
        evaluate: From points ``[P, d]`` and the numbers of these problems ``[P]`` to their values
            ``[P]`` and gradients ``[P, d]``.
        start: ``[problems, d]``, where their curvature is about 1 in all directions.
        dtype: Precision of the values.
        tolerance: Largest entry of the gradient at a solution; that of ``TOLERANCE`` by default.
    """
    tolerance, rounding = tolerance or TOLERANCE[dtype], torch.finfo(dtype).eps
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
    """Return the direction of L-BFGS, by the two-loop recursion over its memory: ``[P, d]``."""
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


@dataclass(frozen=True)
class LinearLoss:
    """The loss of the training rows, for the outputs that their labels determine.

    Attributes:
        kind: Of the task.
        truth: What outputs should be, 0 where it is missing: ``[rows, K]``; for classes 0 or 1.
        share: Weight of a label, 0 if it is missing: ``[rows, K]``, for classes ``[rows, 1]``.
        solved: Which outputs these are, ``[K]``.
        constants: Values of the others, which do not depend on the features: ``[out_dim]``.
    """

    kind: str
    truth: Tensor
    share: Tensor
    solved: Tensor
    constants: Tensor

    @classmethod
    def of(
        cls,
        task: Task,
        targets: Tensor,
        class_weight: Tensor | None = None,
        positive_weight: Tensor | None = None,
    ) -> LinearLoss:
        """Take the loss of training targets, with the weights of :meth:`Task.loss`."""
        if task.kind == "multiclass":
            truth = F.one_hot(targets, task.out_dim).double()  # [rows, classes]
            share = truth.new_ones(len(truth), 1)
            if class_weight is not None:
                share = truth @ class_weight.double().view(-1, 1)
            share = share / share.sum()  # [rows, 1]
            solved = truth.any(0).nonzero().view(-1)
            # A class without a row: less likely than one with half a row.
            constants = truth.new_full((task.out_dim,), -math.log(2 * len(truth) + 1))
            return cls(task.kind, truth[:, solved], share, solved, constants)
        present = ~targets.isnan()  # [rows, T]
        truth = targets.double().nan_to_num()
        counts, positive = present.sum(0), truth.sum(0)  # [T] each
        share = present / counts.clamp(min=1)
        constants = torch.zeros_like(positive)
        solvable = counts > 0
        if task.kind != "regression":
            # Half a label of each class: the logit of a single one would be infinite.
            constants = ((positive + 0.5) / (counts - positive + 0.5)).log()
            solvable = (positive > 0) & (positive < counts)
            if positive_weight is not None:
                share = share * torch.where(truth > 0, positive_weight.double(), 1.0)
        solved = solvable.nonzero().view(-1)
        return cls(task.kind, truth[:, solved], share[:, solved], solved, constants)

    @property
    def num_problems(self) -> int:
        """How many independent problems there are: one per target, one for all classes."""
        return 1 if self.kind == "multiclass" else len(self.solved)

    def of_problems(self, problems: Tensor) -> LinearLoss:
        """Return the loss of some targets only."""
        if self.kind == "multiclass" or len(problems) == self.num_problems:
            return self
        truth, share = self.truth[:, problems], self.share[:, problems]
        return replace(self, truth=truth, share=share, solved=self.solved[problems])

    def __call__(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each problem, and its derivative by the outputs ``[rows, K]``."""
        if self.kind == "regression":
            off = outputs - self.truth
            return (self.share * off.square()).sum(0), 2 * self.share * off
        if self.kind == "multiclass":
            right = (self.truth * outputs).sum(1, keepdim=True)  # [rows, 1]
            losses = outputs.logsumexp(1, keepdim=True) - right
            slope = outputs.softmax(1) - self.truth
        else:
            losses = F.softplus(outputs) - self.truth * outputs
            slope = outputs.sigmoid() - self.truth
        return (self.share * losses).sum(0), self.share * slope

    def start(self, width: int) -> tuple[Tensor, Tensor]:
        """Return weights of zero, ``[K, width]``, and the best bias beside them, ``[K]``."""
        weight = self.truth.new_zeros(len(self.solved), width)
        mean = (self.share * self.truth).sum(0) / self.share.sum(0)  # [K]
        bias = {"regression": mean, "multiclass": mean.log()}.get(self.kind, mean.logit())
        return weight, bias

    def curvature(self) -> float:
        """Return the typical second derivative of the loss of an output by that output."""
        if self.kind == "regression":
            return 2.0
        total = self.share.sum(0)  # [K] or [1]
        mean = (self.share * self.truth).sum(0) / total  # [K]
        return float((total * mean * (1 - mean)).median())

    def complete(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Add the outputs that are not solved: ``[out_dim, r]``, ``[out_dim]``."""
        weights = weight.new_zeros(len(self.constants), weight.size(1))
        weights[self.solved] = weight
        biases = self.constants.clone()
        biases[self.solved] = bias
        return weights, biases
