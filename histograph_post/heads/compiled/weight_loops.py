"""From scores of layers to their weights and back, for one graph and one set of weights.

The formulas of :func:`histograph_post.heads.layer_weights.normalize`, which says what they are for.
"""

from __future__ import annotations

import numpy as np

from ..fast_path import LOOP_NORMALIZATIONS
from .exponential import exponential
from .loops import ONE, ZERO, Floats, loop, part_of_loop
from .products import dot
from .row_loops import copy_row

#: How scores become weights: places in ``LOOP_NORMALIZATIONS``.
BOUNDED, SIGNED, SOFTMAX = map(LOOP_NORMALIZATIONS.index, ("bounded", "signed", "softmax"))


@part_of_loop
def normalize_all(scores: Floats, kind: int, bound: np.float32, weights: Floats) -> None:
    """Do :func:`normalize` for every set of weights, ``[heads, L]``."""
    for head in range(len(scores)):
        normalize(scores[head], kind, bound, weights[head])


@part_of_loop
def normalize_all_back(
    scores: Floats, grad: Floats, kind: int, bound: np.float32, result: Floats
) -> None:
    """Do :func:`normalize_back` for every set of weights, ``[heads, L]``."""
    for head in range(len(scores)):
        normalize_back(scores[head], grad[head], kind, bound, result[head])


@loop
def normalize(scores: Floats, kind: int, bound: np.float32, weights: Floats) -> None:
    """Turn scores into weights.

    Args:
        scores: ``[L]``.
        kind: Place in ``LOOP_NORMALIZATIONS``.
        bound: The radius of bounded weights, the smallest divisor of signed ones.
        weights: Filled in, ``[L]``.
    """
    if kind == BOUNDED:
        _, norm = deviate(scores, weights)
        middle = ONE / np.float32(len(scores))
        for layer in range(len(scores)):
            weights[layer] = middle + bound * weights[layer] / norm
    elif kind == SIGNED:
        divisor, _ = signed_divisor(scores, bound)
        for layer in range(len(scores)):
            weights[layer] = scores[layer] / divisor
    elif kind == SOFTMAX:
        softmax(scores, weights)
    else:
        copy_row(scores, weights)


@loop
def normalize_back(
    scores: Floats, grad: Floats, kind: int, bound: np.float32, result: Floats
) -> None:
    """Turn the gradient of weights into that of their scores.

    Args:
        scores: ``[L]``.
        grad: Of the weights, ``[L]``.
        kind: Place in ``LOOP_NORMALIZATIONS``.
        bound: The radius of bounded weights, the smallest divisor of signed ones.
        result: Filled in, ``[L]``.
    """
    if kind == BOUNDED:
        unit, norm = deviate(scores, result)
        along = dot(result, grad) / (norm * norm)
        factor = bound / (unit * norm)
        for layer in range(len(scores)):
            result[layer] = factor * (grad[layer] - along * result[layer])
        centre(result)
    elif kind == SIGNED:
        divisor, moves = signed_divisor(scores, bound)
        along = ZERO
        for layer in range(len(scores)):
            along += grad[layer] * (scores[layer] / divisor)
        if not moves:
            along = ZERO
        for layer in range(len(scores)):
            result[layer] = (grad[layer] - along) / divisor
    elif kind == SOFTMAX:
        softmax(scores, result)
        along = dot(result, grad)
        for layer in range(len(scores)):
            result[layer] *= grad[layer] - along
    else:
        copy_row(grad, result)


@loop
def deviate(scores: Floats, result: Floats) -> tuple[np.float32, np.float32]:
    """Write how far scores are from their mean, in units of the largest of them or of one.

    Returns the unit, and the root of one plus the square of all deviations, in the same units.
    """
    copy_row(scores, result)
    for _ in range(2):  # once more, because the rounding error of a large mean is no deviation
        centre(result)
    unit = ONE
    for layer in range(len(result)):
        unit = max(unit, abs(result[layer]))
    for layer in range(len(result)):
        result[layer] /= unit
    return unit, np.sqrt(ONE / unit / unit + dot(result, result))


@loop
def signed_divisor(scores: Floats, smallest: np.float32) -> tuple[np.float32, bool]:
    """Return the sum of scores, of this size at least, and whether it moves with them."""
    total = ZERO
    for layer in range(len(scores)):
        total += scores[layer]
    size = abs(total)
    moves = not size < smallest
    if not moves:
        size = smallest
    return -size if total < ZERO else size, moves


@loop
def softmax(scores: Floats, result: Floats) -> None:
    """Write weights that are positive and sum to one."""
    largest = scores[0]
    for layer in range(len(scores)):
        largest = max(largest, scores[layer])
    total = ZERO
    for layer in range(len(scores)):
        result[layer] = exponential(scores[layer] - largest)
        total += result[layer]
    for layer in range(len(scores)):
        result[layer] /= total


@loop
def centre(values: Floats) -> None:
    """Subtract the mean of a row."""
    mean = ZERO
    for place in range(len(values)):
        mean += values[place]
    mean /= np.float32(len(values))
    for place in range(len(values)):
        values[place] -= mean
