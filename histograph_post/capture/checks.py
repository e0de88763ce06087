"""Check a plan by capturing again: nothing changes, and a graph's history is its own.

Also which weights the history depends on: the others may be missing from a checkpoint. An encoder's
weights are often published without the prediction head of the class that they are used in. What is
captured is the same whatever stands in a weight that only comes after it, which is tried out:
gradients would not show a buffer, nor what goes through an index.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch_geometric.data import Batch, Data

from ..data.batching import to_device
from ..errors import CaptureError, CheckpointError
from ..models import call_model
from ..utils.text import listed
from .passes import (
    apart,
    device_of,
    eager_module,
    frozen,
    is_repeatable,
    repeatable,
    same_numbers,
    tensors_in,
)
from .points import CapturePlan
from .recorder import Capture

#: The largest difference between a graph alone and in a batch, relative to the largest number of
#: the layer, that different orders of summation explain in single precision.
TOLERANCE = 1e-4

#: The same in double precision: rounding that single precision shows as 1e-3 is 1e-12 there.
DOUBLE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class LayerParity:
    """How far one layer of a graph alone is from the same graph in a batch."""

    layer: str
    graph: int  #: the position of the graph that differs most
    max_abs: float
    max_rel: float  #: relative to the largest number of the layer


@dataclass(frozen=True)
class Parity:
    """The result of :func:`check_parity`."""

    #: Whether the outputs with and without capture are the same: the same bits on a CPU.
    same_output: bool
    layers: tuple[LayerParity, ...]
    tolerance: float = TOLERANCE
    #: The same layers in double precision, where single precision left it open; else none.
    in_double: tuple[LayerParity, ...] = ()
    #: How far these outputs are apart where sums are taken in any order, relative to the largest.
    output_apart: float = 0.0

    @property
    def worst(self) -> LayerParity:
        """The layer with the largest relative difference."""
        return _worst(self.layers)

    @property
    def batch_independent(self) -> bool:
        """Whether every graph has the same history alone and in a batch, but for rounding."""
        return self.worst.max_rel <= self.tolerance or self.is_rounding

    @property
    def is_rounding(self) -> bool:
        """Whether double precision shows that a large difference is rounding, amplified."""
        return bool(self.in_double) and _worst(self.in_double).max_rel <= DOUBLE_TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether both checks passed."""
        return self.same_output and self.batch_independent

    def summary(self) -> str:
        """Return the result in one line."""
        output = "same bits" if self.same_output else "DIFFERENT output"
        if self.same_output and self.output_apart:
            output = f"same output but for the order of sums ({self.output_apart:.1e} relative)"
        worst = self.worst
        text = (
            f"with and without capture: {output}; alone and in a batch: at most "
            f"{worst.max_abs:.1e} apart ({worst.max_rel:.1e} relative; layer {worst.layer!r}, "
            f"graph {worst.graph})"
        )
        if self.in_double:
            found = "rounding" if self.is_rounding else "not rounding"
            text += f", {_worst(self.in_double).max_rel:.1e} in double precision: {found}"
        return text


def check_parity(model: nn.Module, plan: CapturePlan, graphs: Sequence[Data]) -> Parity:
    """Compare a model's output with and without capture, and each graph alone and in a batch.

    The model runs in ``eval()`` mode and is left as it was.
    """
    if not graphs:
        raise CaptureError("parity: no graphs to compare")
    model = eager_module(model)
    batch = to_device(Batch.from_data_list(list(graphs)), device_of(model))
    with torch.inference_mode(), repeatable(device_of(model)):
        with frozen(model):
            # Models may write into what they are given.
            plain = call_model(model, batch.clone(), plan.call)
        with frozen(model), Capture(model, plan) as capture:
            together = capture.run(batch.clone())
    layers = _alone_and_together(model, plan, graphs, together.history)
    same, off = _compare_outputs(plain, together.output)
    if not same and not is_repeatable(device_of(model)):
        same = _same_on_cpu(model, plan, graphs)
    parity = Parity(same, layers, output_apart=off)
    if parity.worst.max_rel > parity.tolerance:
        return replace(parity, in_double=_in_double(model, plan, graphs))
    return parity


@torch.inference_mode()
def _alone_and_together(
    model: nn.Module, plan: CapturePlan, graphs: Sequence[Data], together: list[Tensor] | None
) -> tuple[LayerParity, ...]:
    """Compare the layers of each graph alone with those of all graphs in a batch."""
    device = device_of(model)

    def run(*members: Data) -> list[Tensor]:
        batch = to_device(Batch.from_data_list([graph.clone() for graph in members]), device)
        with frozen(model), repeatable(device), Capture(model, plan) as capture:
            return capture.run(batch).history

    together = run(*graphs) if together is None else together
    histories = [run(graph) for graph in graphs]
    return tuple(
        _compare(name, [history[at] for history in histories], together[at])
        for at, name in enumerate(plan.names)
    )


def _in_double(
    model: nn.Module, plan: CapturePlan, graphs: Sequence[Data]
) -> tuple[LayerParity, ...]:
    """Compare in double precision, which tells rounding from mixing; none if that cannot be run.

    A norm whose running variance is tiny amplifies the rounding of a sum a thousandfold. In double
    precision it amplifies as much, but of next to nothing. All devices do it on the CPU: not every
    one has double precision.
    """
    doubled = [
        graph.clone().apply(lambda each: each.cpu().double() if each.is_floating_point() else each)
        for graph in graphs
    ]
    try:
        with _Double():
            return _alone_and_together(copy.deepcopy(model).cpu().double(), plan, doubled, None)
    except Exception:  # whatever a model does not do in double precision, the question stays open
        return ()


class _Double(TorchFunctionMode):
    """Gives double precision to a model that asks for single, as in ``x.float()``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function in double precision."""
        func = Tensor.double if func is Tensor.float else func
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*(torch.float64 if each is torch.float32 else each for each in args), **kwargs)


def _compare(name: str, alone: list[Tensor], together: Tensor) -> LayerParity:
    """Compare one layer, given for each graph alone and for all of them together."""
    parts = together.split([len(part) for part in alone])  # each [num_nodes of a graph, width]
    # One scale for all graphs: in a small one a layer may hold next to nothing but rounding errors.
    scale = float(together.nan_to_num(0.0, 0.0, 0.0).abs().max()) if together.numel() else 0.0
    differences = []
    for graph, (one, part) in enumerate(zip(alone, parts, strict=True)):
        if one.numel() == 0:
            continue
        max_abs = float((one.cpu().double() - part.cpu().double()).abs().max())
        max_rel = max_abs / scale if scale else max_abs
        differences.append(LayerParity(name, graph, max_abs, max_rel))
    if not differences:
        raise CaptureError("parity: the graphs have no nodes")
    return _worst(differences)


def _worst(layers: Sequence[LayerParity]) -> LayerParity:
    # NaN compares as neither larger nor smaller, and is the worst of all.
    return max(layers, key=lambda layer: (layer.max_rel != layer.max_rel, layer.max_rel))


def _compare_outputs(first: Any, second: Any) -> tuple[bool, float]:
    """Say whether two outputs are the same, and how far apart if they need not be the same bits."""
    same, off = True, 0.0
    for one, other in zip(tensors_in(first), tensors_in(second), strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False, math.inf
        if torch.equal(_bits(one), _bits(other)):
            continue
        same = same and not is_repeatable(one.device) and same_numbers(one, other)
        off = max(off, apart(one.nan_to_num(), other.nan_to_num()))
    return same, off


def _same_on_cpu(model: nn.Module, plan: CapturePlan, graphs: Sequence[Data]) -> bool:
    """Ask a CPU, which gives the same bits: some models amplify the rounding of sums."""
    try:
        on_cpu = [graph.clone().cpu() for graph in graphs]
        return check_parity(copy.deepcopy(model).cpu(), plan, on_cpu).same_output
    except Exception:  # of whatever kind: code that is made for the device
        return False


def _bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes, so that NaN equals NaN and 0 differs from -0."""
    return tensor.contiguous().flatten().view(torch.uint8)


# --- which weights the history depends on


def needed_parameters(
    model: nn.Module, batch: Batch, plan: CapturePlan, among: Collection[str] | None = None
) -> set[str]:
    """Return the parameters and buffers on which the captured history of a batch depends.

    The model is in ``eval()``, and its weights are the same afterwards. Only those ``among`` are
    looked at; all by default.
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
