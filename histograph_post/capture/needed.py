"""Which weights the history depends on: the others may be missing from a checkpoint.

An encoder's weights are often published without the prediction head of the class that they are
used in. What is captured is the same whatever stands in a weight that only comes after it, which
is tried out: gradients would not show a buffer, nor what goes through an index.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from ..errors import CheckpointError
from ..utils.text import listed
from .points import CapturePlan
from .recorder import Capture
from .repeating import same_numbers


def needed_parameters(
    model: nn.Module, batch: Batch, plan: CapturePlan, among: Collection[str] | None = None
) -> set[str]:
    """Return the parameters and buffers on which the captured history of a batch depends.

    Args:
        model: In ``eval()``; its weights are the same afterwards.
        batch: A few graphs.
        plan: What is captured.
        among: Only these are looked at; all by default.
    """
    tensors = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and (among is None or name in among)
    }
    before = _history(model, batch, plan)
    if before is None:
        return set(tensors)
    if not _changes(model, batch, plan, tensors, before):  # the common case, in two passes
        return set()
    needed = {
        name
        for name, value in tensors.items()
        if _changes(model, batch, plan, {name: value}, before)
    }
    return needed or set(tensors)  # they matter together only


def require_unneeded(
    model: nn.Module, batch: Batch, plan: CapturePlan, missing: Collection[str]
) -> None:
    """Refuse a checkpoint that lacks weights on which the history depends.

    Raises:
        CheckpointError: naming them.
    """
    needed = needed_parameters(model, batch, plan, missing) if missing else set()
    if needed:
        raise CheckpointError(
            f"the checkpoint has no {listed(sorted(needed))}, on which the captured layers depend; "
            "expected all weights up to the last layer (other names: --key-map FILE)"
        )


def _changes(
    model: nn.Module,
    batch: Batch,
    plan: CapturePlan,
    tensors: dict[str, Tensor],
    before: list[Tensor],
) -> bool:
    """Whether other values in these tensors give another history."""
    for seed in (0, 1):
        with _other_values(list(tensors.values()), seed):
            after = _history(model, batch, plan)
        if after is None:
            return True
        for one, other in zip(before, after, strict=True):  # [num_nodes, width] each
            if not same_numbers(one, other):
                return True
    return False


@contextmanager
def _other_values(tensors: list[Tensor], seed: int) -> Iterator[None]:
    """Put random numbers into tensors; positive ones, since some are variances."""
    kept = [tensor.detach().clone() for tensor in tensors]
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for tensor in tensors:
                values = torch.rand(tensor.shape, generator=generator) + 0.5
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.copy_(values)
                elif tensor.dtype == torch.bool:
                    tensor.logical_not_()
                else:
                    tensor.copy_((values > 1).long())
        yield
    finally:
        with torch.no_grad():
            for tensor, values in zip(tensors, kept, strict=True):
                tensor.copy_(values)


def _history(model: nn.Module, batch: Batch, plan: CapturePlan) -> list[Tensor] | None:
    """Return what is captured of a batch; None if the model cannot run with these weights."""
    try:
        with torch.no_grad(), Capture(model, plan) as recorder:
            return [layer.clone() for layer in recorder.run(batch.clone()).history]
    except Exception:  # of a model's own kind: it minds what stands in its weights
        return None
