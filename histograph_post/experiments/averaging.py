"""Seeds averaged: the fits of one readout that predict together, and what they say together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..runs.fits import Fit


@dataclass(frozen=True)
class FoldOutputs:
    """What the fits of one fold say of the rows of a part."""

    fold: int
    #: Label rows of the part, ``[rows]``.
    rows: np.ndarray
    #: Outputs of every fit, in the units of the labels: ``[fits, rows, out_dim]``.
    each: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """The mean over the fits: ``[rows, out_dim]``."""
        return self.each.mean(axis=0)


def outputs_on_test(fits: Sequence[Fit]) -> list[FoldOutputs]:
    """Return what the seeds of each fold say of its test rows."""
    return _by_fold(fits, lambda fit: (fit.test_rows, fit.test_outputs))


def outputs_on_valid(fits: Sequence[Fit]) -> list[FoldOutputs]:
    """Return what the seeds of each fold say of its validation rows; not of earlier versions."""
    return _by_fold(fits, lambda fit: (fit.valid_rows, fit.valid_outputs))


def _by_fold(
    fits: Sequence[Fit], part: Callable[[Fit], tuple[np.ndarray, np.ndarray]]
) -> list[FoldOutputs]:
    found = []
    for fold in dict.fromkeys(fit.spec.fold for fit in fits):
        parts = [part(fit) for fit in fits if fit.spec.fold == fold]
        rows = parts[0][0]
        # A fit of an earlier version lacks the validation part.
        each = [outputs for own_rows, outputs in parts if np.array_equal(own_rows, rows)]
        if len(rows):
            found.append(FoldOutputs(fold, rows, np.stack(each)))
    return found


def members_with(best: Fit, fits: Sequence[Fit], weights_of: Callable[[Fit], str]) -> list[Fit]:
    """Return the fits that predict together with the best one, those of a fold together.

    They are all fits of its readout that read exactly its backbone: other weights give other
    activations, which would need a backbone of their own to run beside it.

    Args:
        best: The fit that was chosen.
        fits: Every fit of the run.
        weights_of: The hash of the backbone that a fit reads.
    """
    own = weights_of(best)
    named = [fit for fit in fits if fit.spec.name == best.spec.name and weights_of(fit) == own]
    return sorted(named, key=lambda fit: (fit.spec.fold, fit.spec.seed))
