"""The probe pass: a model is run once on a few graphs, and all it does is recorded.

Rows of nodes are known by their number, so the graphs are changed where that is also the number of
something else.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Batch, Data
from torch_geometric.nn import MessagePassing

from ..errors import CaptureError
from ..models import call_model
from ..models.model_call import visible
from .passes import (
    Enter,
    Leave,
    frozen,
    function_name,
    is_counted,
    tensors_in,
    version_of,
    watch_calls,
)
from .trace import FunctionCall, ModuleCall, Source, Trace, Value

#: Functions that read the shape and type of their argument, never its numbers.
_SHAPE_ONLY = frozenset(
    f"{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")
) | {f"new_{name}" for name in ("zeros", "ones", "full", "empty", "tensor")}

#: Functions that do so with all arguments but the first.
_SHAPE_OF_OTHERS = frozenset({"expand_as", "view_as", "reshape_as", "type_as"})


def probe(model: nn.Module, batch: Batch, no_pass: Sequence[str]) -> Trace:
    """Run the model on a batch in which node rows cannot be mistaken for anything else."""
    refused: Exception | None = None
    traces: list[Trace] = []
    for candidate in probe_batches(model, batch):
        if traces and int(candidate.num_nodes) == traces[0].num_nodes:
            continue  # only another number of nodes tells more
        try:
            # Not inference mode: its tensors do not count in-place changes.
            with frozen(model), torch.inference_mode(False), torch.no_grad():
                # Models may write into what they are given.
                traces.append(run_trace(model, visible(candidate.clone(), no_pass)))
        except Exception as error:
            # A model may refuse graphs that were changed; it must take those it was given.
            if not traces and (candidate is batch or isinstance(error, CaptureError)):
                raise
            refused = refused or error
        # Rows as wide as there are nodes are told from pairs of nodes by other graphs.
        if traces and (len(traces) == 2 or not _pairs_of_nodes(traces[0])):
            break
    if not traces:
        others = "no other could be made of them"
        if refused is not None:
            others = f"the model does not run on others ({refused})"
        raise CaptureError(
            f"the probe graphs have as many edges as nodes ({int(batch.num_nodes)}), and {others}; "
            "name the modules to capture with --layers"
        )
    return replace(min(traces, key=_pairs_of_nodes), tells_pairs=len(traces) > 1)


def _pairs_of_nodes(trace: Trace) -> int:
    """Return how many values seem to have a number for each pair of nodes."""
    return sum(trace.num_nodes in value.shape[1:] for value in trace.values)


# --- batches in which rows of nodes cannot be mistaken for rows of anything else


def probe_batches(model: nn.Module, batch: Batch) -> Iterator[Batch]:
    """Yield batches to probe the model with, the best first.

    Node rows are known by their number. Where that is also the number of graphs or edges, the
    width of a layer or a size of the data (steps in time), a graph is added once more, or a node
    or an edge is left out. A batch with as many edges as nodes is never among them: edge states
    would be taken for node states.

    Raises:
        CaptureError: if no graph has two nodes.
    """
    if batch.num_nodes is None:
        raise CaptureError(
            "the graphs do not say how many nodes they have: found "
            f"{', '.join(sorted(map(str, batch.keys())))}; expected one set of nodes per graph, "
            "with features x, positions pos or num_nodes"
        )
    if int(batch.num_nodes) < 2:
        raise CaptureError(
            f"the probe batch has {batch.num_nodes} nodes; expected a graph with two or more"
        )
    weights, data = (*model.parameters(), *model.buffers()), tensors_in(batch)
    sizes = {size for tensor in weights for size in tensor.shape}
    dense = (tensor for tensor in data if tensor.layout == torch.strided)
    sizes |= {size for tensor in dense for size in tensor.shape[1:]}
    if plain := _is_unambiguous(batch, sizes):
        yield batch
    graphs = _taken_apart(batch)
    if not plain and len(graphs) > 1 and all(int(graph.num_nodes) < 2 for graph in graphs):
        raise CaptureError(
            f"the probe batch has {batch.num_nodes} nodes in {batch.num_graphs} graphs, so node "
            "rows cannot be told from graph rows; expected a graph with two or more nodes"
        )
    changed = list(_changed(graphs))
    yield from (other for other in changed if _is_unambiguous(other, sizes))
    if not plain:
        # A number that a weight happens to have is less of a danger than a batch that does not run.
        yield from (other for other in (batch, *changed) if not _edges_like_nodes(other))


def _taken_apart(batch: Batch) -> list[Data]:
    """Return the graphs of a batch; none if PyG cannot take it apart: sparse matrices."""
    try:
        return batch.to_data_list() if hasattr(batch, "ptr") else [batch]
    except (ValueError, TypeError, RuntimeError):
        return []


def _changed(graphs: list[Data]) -> Iterator[Batch]:
    """Yield the graphs with one of them once more, or a node less, and with an edge less."""
    if not graphs:
        return
    # What is made for a batch is made on the CPU, unless the graphs are on CUDA.
    device = tensors_in(graphs[0])[0].device
    if len(graphs) > 1:
        for extra in graphs:
            if int(extra.num_nodes) > 1:
                yield Batch.from_data_list([*graphs, extra]).to(device)
    elif (nodes := int(graphs[0].num_nodes)) > 2:
        kept = torch.arange(nodes - 1, device=device)
        yield Batch.from_data_list([graphs[0].subgraph(kept)]).to(device)
    for at, graph in enumerate(graphs):
        if (shorter := _without_an_edge(graph)) is not None:
            others = [*graphs[:at], shorter, *graphs[at + 1 :]]
            yield Batch.from_data_list(others).to(device)


def _without_an_edge(graph: Data) -> Data | None:
    """Return the graph without its last edge, in both directions."""
    edges = graph.get("edge_index")
    if not isinstance(edges, torch.Tensor) or edges.dim() != 2 or edges.shape[1] < 3:
        return None
    source, target = edges[0, -1], edges[1, -1]
    same = (edges[0] == source) & (edges[1] == target)
    back = (edges[0] == target) & (edges[1] == source)
    return graph.edge_subgraph(~(same | back))


def _is_unambiguous(batch: Batch, sizes: set[int]) -> bool:
    graphs = {int(getattr(batch, "num_graphs", 1))}
    if (numbers := getattr(batch, "batch", None)) is not None and len(numbers):
        graphs.add(int(numbers.max()) + 1)  # the last may be empty
    return int(batch.num_nodes) not in {*sizes, *graphs} and not _edges_like_nodes(batch)


def _edges_like_nodes(batch: Batch) -> bool:
    """Whether there are as many edges as nodes, counted in one direction or in both."""
    nodes, edges = int(batch.num_nodes), int(batch.num_edges)
    return nodes in (edges, edges / 2)


# --- the recording


def run_trace(model: nn.Module, batch: Batch) -> Trace:
    """Run the model once, recording every call; nothing is left on it whatever happens."""
    recorder = _Recorder(model, batch)
    with ExitStack() as watched:
        for name, module in model.named_modules():
            watched.enter_context(watch_calls(module, *recorder.around(name)))
            if isinstance(module, MessagePassing):
                steps = recorder.around(name, "propagate")
                watched.enter_context(watch_calls(module, *steps, "propagate"))
        with _ScriptedOperators(), recorder:
            output = call_model(model, batch)
        outputs = tuple(recorder.value_of(tensor) for tensor in tensors_in(output))
    return Trace(
        num_nodes=int(batch.num_nodes),
        num_graphs=int(getattr(batch, "num_graphs", 1)),
        values=recorder.values,
        functions=recorder.functions,
        modules=recorder.modules,
        steps=recorder.steps,
        outputs=outputs,
    )


class _ScriptedOperators(TorchDispatchMode):
    """Calls operators from Python, so that those of scripted functions are seen like others."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


class _Known(NamedTuple):
    """A tensor that was seen; holding it keeps its id and its storage from being used again."""

    tensor: Tensor
    version: int
    value: int


class _Recorder(TorchFunctionMode):
    """Numbers the values and records the calls."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.functions: list[FunctionCall] = []
        self.modules: list[ModuleCall] = []
        self.steps: list[ModuleCall] = []
        self._open: list[ModuleCall] = []
        self._counts: Counter[str] = Counter()
        self._tick = itertools.count(1).__next__
        self._known: dict[int, _Known] = {}
        self._latest_on_storage: dict[int, int] = {}
        for weight in (*model.parameters(), *model.buffers()):
            self._add(weight, version_of(weight), sources=Source.WEIGHT)
        for key, attribute in batch.to_dict().items():
            for tensor in tensors_in(attribute):
                self._add(tensor, version_of(tensor), sources=_source_of(key, tensor))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function and record it if it returned or changed a tensor."""
        kwargs = kwargs or {}
        arguments = tensors_in(args, kwargs)
        versions = [version_of(tensor) for tensor in arguments]
        result = func(*args, **kwargs)
        returned = tensors_in(result)
        changed = [
            tensor
            for tensor, version in zip(arguments, versions, strict=True)
            if version_of(tensor) != version
        ]
        if returned or changed:
            name = function_name(func)
            values = tuple(map(self._value_at, arguments, versions))
            inputs = values[: 0 if name in _SHAPE_ONLY else 1 if name in _SHAPE_OF_OTHERS else None]
            if isinstance(func, OpOverload) and name.endswith("_") and not changed:
                # Inside a scripted function the version is counted after the operator has run.
                self._add(arguments[0], versions[0], inputs)
            outputs = [self.value_of(tensor, inputs) for tensor in (*returned, *changed)]
            slots = [self.value_of(tensor) for tensor in (*returned, *arguments)]
            self.functions.append(
                FunctionCall(
                    time=self._tick(),
                    name=name,
                    counted=is_counted(func, returned),
                    inputs=inputs,
                    outputs=tuple(dict.fromkeys(outputs)),
                    slots=tuple(slots),
                )
            )
        return result

    def around(self, name: str, method: str = "") -> tuple[Enter, Leave]:
        """Return what records the calls of the module called ``name``, or of a method of it."""
        if method:
            name = f"{name}.{method}" if name else method
        calls = self.steps if method else self.modules

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._counts[name] += 1
            with torch._C.DisableTorchFunction():
                call = ModuleCall(
                    name=name,
                    module=module,
                    number=self._counts[name],
                    start=self._tick(),
                    inputs=tuple(map(self.value_of, tensors_in(args, kwargs))),
                    parent=self._open[-1] if self._open else None,
                    first_value=len(self.values),
                )
            calls.append(call)
            self._open.append(call)

        def leave(module: nn.Module, output: Any) -> None:
            with torch._C.DisableTorchFunction():
                call = self._open.pop()
                while call.name != name:  # a call that raised, and the model went on
                    call = self._open.pop()
                # Where an operation was not seen, a module's output comes from its input.
                outputs = [self.value_of(tensor, call.inputs) for tensor in tensors_in(output)]
                call.outputs = tuple(outputs)
                call.end_value = len(self.values)
                call.end = self._tick()

        return enter, leave

    def value_of(self, tensor: Tensor, parents: Iterable[int] = ()) -> int:
        """Return the value of the tensor as it is now; a new one is made of ``parents``."""
        return self._value_at(tensor, version_of(tensor), tuple(parents))

    def _value_at(self, tensor: Tensor, version: int, parents: tuple[int, ...] = ()) -> int:
        known = self._known.get(id(tensor))
        if known is not None and known.version == version:
            return known.value
        if not parents:
            # Seen for the first time, or changed behind our back: through a view of the same
            # memory, if anything.
            latest = self._latest_on_storage.get(_storage(tensor))
            parents = () if latest is None else (latest,)
            parents += () if known is None else (known.value,)
        return self._add(tensor, version, parents)

    def _add(
        self,
        tensor: Tensor,
        version: int,
        parents: tuple[int, ...] = (),
        sources: Source = Source.NONE,
    ) -> int:
        for parent in parents:
            sources |= self.values[parent].sources
        value = Value(
            index=len(self.values),
            shape=(tensor.size(0),) if tensor.is_nested else tuple(tensor.shape),
            floating=tensor.is_floating_point(),
            integer=tensor.dtype in (torch.int32, torch.int64),
            sources=sources,
            parents=tuple(dict.fromkeys(parents)),
        )
        self.values.append(value)
        self._known[id(tensor)] = _Known(tensor, version, value.index)
        if (storage := _storage(tensor)) != 0:
            self._latest_on_storage[storage] = value.index
        return value.index


def _storage(tensor: Tensor) -> int:
    """Return the address of the tensor's memory; 0 if it has none, or not one piece of it."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, tensors that wrap others
        return 0


def _source_of(key: str, tensor: Tensor) -> Source:
    if key == "y" or key.startswith("edge_label"):
        return Source.NONE
    if key.startswith(("edge", "adj")) or tensor.layout != torch.strided:
        return Source.EDGE
    # The batch vector holds which rows belong together, nothing of the nodes themselves.
    return Source.NONE if key in ("batch", "ptr") else Source.NODE
