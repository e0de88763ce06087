"""The canary of a cache: one small graph of its data, and what the model made of it.

It is a file of tensors: reading it runs nothing. Labels and texts are left out of the graph where
the model can do without.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch_geometric.data import Data

from ..capture import Capture, CapturePlan
from ..capture.passes import TOLERANCES, apart, device_of, eager_module, frozen, repeatable
from ..data import GraphDataset
from ..data.batching import make_batch, probe_graphs, surroundings, to_device
from ..errors import CacheError, HistographError
from ..models.model_call import LABELS

#: A larger graph is cut down to the surroundings of one node.
_CANARY_NODES = 256

#: Besides what other machines and devices explain, a model may be off by ten times what single
#: precision is off on the canary, but by no more than this.
_MOST = 5e-2


@dataclass(frozen=True)
class Canary:
    """One graph, the activations of each layer on it, and how far off rounding may take them."""

    graph: Data
    history: list[Tensor]
    tolerances: list[float]

    @classmethod
    def take(cls, model: nn.Module, plan: CapturePlan, dataset: GraphDataset) -> Canary | None:
        """Run the model on a small graph of the data; None if it cannot be run on one."""
        for graph in _small_graphs(dataset):
            try:
                history = _run(model, plan, graph)
            except (HistographError, ArithmeticError, LookupError, RuntimeError, TypeError):
                continue
            return cls(graph, history, _tolerances(model, plan, graph, history))
        return None

    def differences(self, model: nn.Module, plan: CapturePlan) -> Iterator[tuple[str, float]]:
        """Yield the layers whose activations are other ones by now, and by how much."""
        if len(self.history) != len(plan.points):
            raise CacheError(
                f"canary: found {len(self.history)} layers, expected {len(plan.points)}"
            )
        history = _run(model, plan, self.graph)
        found = zip(plan.names, self.history, history, self.tolerances, strict=True)
        for name, before, now, tolerance in found:
            difference = _difference(before, now)
            if not difference <= tolerance:
                yield name, difference

    def to_bytes(self) -> bytes:
        """Return the contents of the file: tensors, and plain values beside them."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for name, value in self.graph.to_dict().items():
            if isinstance(value, Tensor):
                tensors[f"graph.{name}"] = value.contiguous()
            else:
                values[name] = value
        tensors |= {f"layer.{at}": layer.contiguous() for at, layer in enumerate(self.history)}
        # A capture point may name an attribute by its position, so the order is kept.
        names = list(self.graph.to_dict())
        about = {"names": names, "values": values, "tolerances": self.tolerances}
        return safetensors.torch.save(tensors, {"canary": json.dumps(about)})

    @classmethod
    def from_bytes(cls, contents: bytes, where: str) -> Canary:
        """Read what :meth:`to_bytes` returned."""
        try:
            tensors = safetensors.torch.load(contents)
            length = int.from_bytes(contents[:8], "little")
            about = json.loads(json.loads(contents[8 : 8 + length])["__metadata__"]["canary"])
            values, graph = about["values"], Data()
            for name in about["names"]:
                graph[name] = values[name] if name in values else tensors[f"graph.{name}"]
            tolerances = [float(number) for number in about["tolerances"]]
            return cls(graph, [tensors[f"layer.{at}"] for at in range(len(tolerances))], tolerances)
        except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError) as error:
            raise CacheError(f"{where}: found {error!r}, expected a canary") from error


def _small_graphs(dataset: GraphDataset) -> Iterator[Data]:
    """Yield a small graph without labels and texts, and the same with all it has."""
    graphs = sorted(probe_graphs(dataset, whole=False), key=lambda graph: int(graph.num_nodes))
    fitting = (graph for graph in graphs if graph.num_nodes > 1 and graph.num_edges)
    graph = next(fitting, graphs[-1])
    if graph.num_nodes > _CANARY_NODES:
        graph = surroundings(graph, _CANARY_NODES)
    yield _inputs_only(graph)
    yield graph


def _inputs_only(graph: Data) -> Data:
    """Return the tensors of a graph that a model may be given, labels and masks aside."""
    bare = copy.copy(graph)
    for name, value in graph.to_dict().items():
        is_label = name in LABELS or "label" in name or name.endswith("_mask")
        if is_label or not isinstance(value, Tensor):
            del bare[name]
    return bare


def _run(
    model: nn.Module, plan: CapturePlan, graph: Data, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return what the model makes of one graph: ``[num_nodes, D_l]`` per layer."""
    device = device_of(model)
    batch = to_device(make_batch([graph.clone()]), device)
    if dtype is not None:
        batch = batch.apply(lambda value: value.to(dtype) if value.is_floating_point() else value)
    with (
        torch.inference_mode(),
        repeatable(device),
        frozen(eager_module(model)),
        Capture(model, plan) as recorder,
    ):
        return [layer.cpu() for layer in recorder.run(batch).history]


def _tolerances(
    model: nn.Module, plan: CapturePlan, graph: Data, history: Sequence[Tensor]
) -> list[float]:
    """Return how far off each layer may be: rounding, which some models amplify."""
    try:
        exact = _run(copy.deepcopy(model).cpu().double(), plan, graph, torch.float64)
        rounding = [_difference(*pair) for pair in zip(history, exact, strict=True)]
    except Exception:  # of whatever kind: code that insists on a precision
        rounding = [0.0] * len(history)
    least = [TOLERANCES.get(layer.dtype, 1e-4) for layer in history]
    return [
        max(low, min(10 * off, _MOST)) if off == off else low
        for low, off in zip(least, rounding, strict=True)
    ]


def _difference(before: Tensor, now: Tensor) -> float:
    """Return the largest difference, relative to the largest number; infinite of other shapes."""
    return apart(before, now) if before.shape == now.shape else float("inf")
