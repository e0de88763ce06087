"""Where a history came from: the code that computed it, and one graph to run that code on again.

The hash of its weights identifies a backbone, but the same weights give other activations once the
model's code is edited. So a cache records a hash of the model's classes and a *canary*: one small
graph of the data and its activations. When the backbone is built again, the canary is run again:
activations that differ by more than rounding are refused. Edited classes are refused even if the
activations agree, since other graphs may reach what was edited. Comments, docstrings and the rest
of a file may change. What is recorded is only compared, never opened or run.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import platform
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import torch
import torch_geometric
from safetensors import SafetensorError
from torch import Tensor, nn
from torch_geometric.data import Data

from .. import __version__
from ..capture import Capture, CapturePlan
from ..capture.passes import TOLERANCES, apart, device_of, eager_module, frozen, repeatable
from ..data import GraphDataset
from ..data.batching import make_batch, probe_graphs, surroundings, to_device
from ..errors import CacheError, HistographError, ModelError
from ..models.model_call import LABELS
from ..utils.decoding import parse_json
from ..utils.sources import code_text
from .manifest import CANARY_NAME, Provenance, read_hashed

#: Bytes of a canary, at most; a longer file is not one.
CANARY_LIMIT = 64 * 2**20

#: Packages that are recorded by their version, not by their source.
_LIBRARIES = ("torch", "torch_geometric", "histograph_post")

#: A larger graph is cut down to the surroundings of one node.
_CANARY_NODES = 256

#: The most that a layer may differ (relative). It may differ by ten times the rounding error of
#: single precision on the canary, or by what other machines and devices explain.
_MOST = 5e-2


def take_provenance(
    model: nn.Module, plan: CapturePlan, dataset: GraphDataset
) -> tuple[Provenance, bytes | None]:
    """Return what is recorded about a model's code, and the contents of the canary's file."""
    canary = Canary.take(model, plan, dataset)
    contents = None if canary is None else canary.to_bytes()
    if contents is not None and len(contents) > CANARY_LIMIT:
        contents = None
    sha256 = None if contents is None else hashlib.sha256(contents).hexdigest()
    return Provenance(_sources(model), _versions(), str(Path.cwd()), sha256), contents


def read_canary(folder: Path, sha256: str) -> Canary:
    """Read the canary of a cache or a run, refusing any but the one that is recorded."""
    path = folder / CANARY_NAME
    return Canary.from_bytes(read_hashed(path, CANARY_LIMIT, sha256), str(path))


def check_provenance(
    recorded: Provenance, folder: Path, model: nn.Module, plan: CapturePlan
) -> None:
    """Refuse a model whose code, or whose activations on the canary, differ from what is recorded.

    Args:
        folder: The cache or the run, where the canary is.
        model: The backbone as it was built now, with the recorded weights.

    Raises:
        ModelError: with both hashes, and the first layer that differs.
    """
    changed = _changed(recorded.sources, model)
    again = "restore that code, or cache again"
    if recorded.canary_sha256 is None:
        if changed:
            raise ModelError(f"{changed}; {again}")
        return
    canary = read_canary(folder, recorded.canary_sha256)
    try:
        described = _described(list(canary.differences(model, plan)), len(plan.points))
    except HistographError as error:
        described = f"on its canary graph: {error}"
    if described:
        raise ModelError(
            f"the model's activations are not those that {folder} was made with: {described}"
            f"{_other_versions(recorded.versions)}; {changed or 'its source is the same'}; {again}"
        )
    if changed:
        raise ModelError(
            f"{changed}; its activations on the canary graph of {folder} are the same, but other "
            f"graphs may reach what was edited; {again}"
        )


def _described(differing: Sequence[tuple[str, float]], total: int) -> str:
    if not differing:
        return ""
    name, difference = differing[0]
    return (
        f"layer {name!r} differs by {difference:.1e} (relative), the first of {len(differing)} "
        f"of {total} layers that do"
    )


# --- the canary


@dataclass(frozen=True)
class Canary:
    """One graph, the activations of each layer on it, and how far rounding may take them off."""

    graph: Data
    history: list[Tensor]
    tolerances: list[float]

    @classmethod
    def take(cls, model: nn.Module, plan: CapturePlan, dataset: GraphDataset) -> Canary | None:
        """Run the model on a small graph of the data; None if it does not run on one."""
        for graph in _small_graphs(dataset):
            try:
                history = _run(model, plan, graph)
            except (HistographError, ArithmeticError, LookupError, RuntimeError, TypeError):
                continue
            return cls(graph, history, _tolerances(model, plan, graph, history))
        return None

    def differences(self, model: nn.Module, plan: CapturePlan) -> Iterator[tuple[str, float]]:
        """Yield the layers whose activations differ now, and by how much."""
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
        # A capture point may refer to an attribute by its position, so the order is kept.
        names = list(self.graph.to_dict())
        about = {"names": names, "values": values, "tolerances": self.tolerances}
        return safetensors.torch.save(tensors, {"canary": json.dumps(about)})

    @classmethod
    def from_bytes(cls, contents: bytes, where: str) -> Canary:
        """Read what :meth:`to_bytes` returned."""
        try:
            tensors = safetensors.torch.load(contents)
            length = int.from_bytes(contents[:8], "little")
            header = parse_json(contents[8 : 8 + length], where)
            # Not by the strict decoder: a value of a graph may be NaN.
            about = json.loads(header["__metadata__"]["canary"])
            values, graph = about["values"], Data()
            for name in about["names"]:
                graph[name] = values[name] if name in values else tensors[f"graph.{name}"]
            tolerances = [float(number) for number in about["tolerances"]]
            return cls(graph, [tensors[f"layer.{at}"] for at in range(len(tolerances))], tolerances)
        except SafetensorError as error:
            raise CacheError(f"{where}: found {error}, expected a canary") from error
        except (ValueError, LookupError, TypeError, RuntimeError, OverflowError) as error:
            raise CacheError(f"{where}: found {error!r}, expected a canary") from error


def _small_graphs(dataset: GraphDataset) -> Iterator[Data]:
    """Yield a small graph without labels and strings, then the same graph with everything."""
    graphs = sorted(probe_graphs(dataset, whole=False), key=lambda graph: int(graph.num_nodes))
    fitting = (graph for graph in graphs if graph.num_nodes > 1 and graph.num_edges)
    graph = next(fitting, graphs[-1])
    if graph.num_nodes > _CANARY_NODES:
        graph = surroundings(graph, _CANARY_NODES)
    yield _inputs_only(graph)
    yield graph


def _inputs_only(graph: Data) -> Data:
    """Return a graph with its tensors only, and without labels and masks."""
    bare = copy.copy(graph)
    for name, value in graph.to_dict().items():
        is_label = name in LABELS or "label" in name or name.endswith("_mask")
        if is_label or not isinstance(value, Tensor):
            del bare[name]
    return bare


def _run(
    model: nn.Module, plan: CapturePlan, graph: Data, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the activations of one graph: ``[num_nodes, D_l]`` per layer."""
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
    """Return how much each layer may differ: by rounding, which some models amplify."""
    try:
        exact = _run(copy.deepcopy(model).cpu().double(), plan, graph, torch.float64)
        rounding = [_difference(*pair) for pair in zip(history, exact, strict=True)]
    except Exception:  # the user's code may fail in any way in another precision
        rounding = [0.0] * len(history)
    least = [TOLERANCES.get(layer.dtype, 1e-4) for layer in history]
    return [
        max(low, min(10 * off, _MOST)) if off == off else low
        for low, off in zip(least, rounding, strict=True)
    ]


def _difference(before: Tensor, now: Tensor) -> float:
    """Return the largest difference, relative to the largest value; infinite if shapes differ."""
    return apart(before, now) if before.shape == now.shape else float("inf")


# --- the code


def _sources(model: nn.Module) -> dict[str, str]:
    """Return a hash of the model's classes in each file, without comments and docstrings."""
    parts: dict[Path, set[str]] = {}
    for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
        if kind is object or kind.__module__.partition(".")[0] in _LIBRARIES:
            continue
        try:
            path = Path(inspect.getsourcefile(kind) or "")
            code = code_text(textwrap.dedent(inspect.getsource(kind)))
        except (OSError, TypeError, SyntaxError):  # defined interactively, or by a function
            continue
        if path.is_file():
            parts.setdefault(path.resolve(), set()).add(code)
    return {
        str(path): hashlib.sha256("\n".join(sorted(codes)).encode()).hexdigest()
        for path, codes in sorted(parts.items())
    }


def _changed(recorded: Mapping[str, str], model: nn.Module) -> str:
    """Describe the first file whose classes differ, with both hashes; files may have moved."""
    found = _sources(model)
    # Earlier versions recorded the hash of the whole file.
    whole = {hashlib.sha256(Path(path).read_bytes()).hexdigest(): path for path in found}
    known = {sha256: found[whole[sha256]] for sha256 in recorded.values() if sha256 in whole}
    lost = [
        path for path, sha256 in recorded.items() if known.get(sha256, sha256) not in found.values()
    ]
    new = [
        path
        for path, sha256 in found.items()
        if sha256 not in {*recorded.values(), *known.values()}
    ]
    if not lost:  # for an additional class, the canary decides
        return ""
    expected = f"{recorded[lost[0]][:12]} ({lost[0]})"
    shown = f"{new[0]}: found source {found[new[0]][:12]}" if new else "found no source file"
    return f"{shown}, expected {expected}"


def _versions() -> dict[str, str]:
    return {
        "histograph_post": __version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "torch_geometric": torch_geometric.__version__,
    }


def _other_versions(recorded: Mapping[str, str]) -> str:
    now = _versions()
    changed = [
        f"{name} {version} then, {now.get(name, 'none')} now"
        for name, version in recorded.items()
        if now.get(name) != version
    ]
    return f" ({'; '.join(changed or ['with the same versions of the libraries'])})"
