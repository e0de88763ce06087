"""Calling any model with a batch of graphs, and finding the prediction among its outputs.

A batch is matched with the parameters of ``forward`` by name. Nothing about the model has to be
declared or changed.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import Parameter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GAE
from torch_geometric.nn import Sequential as GraphSequential

from ..data.batching import with_sparse
from ..errors import HistographError, ModelError, one_line, raised_at
from .spec import ALL_OF_IT, CallForm

#: Other names for the attributes of a batch in ``forward`` signatures.
ALIASES: Final = {
    alias: name
    for name, aliases in {
        "x": (
            *("h", "feat", "feats", "feature", "features", "node_attr", "node_feat"),
            *("node_feats", "node_feature", "node_features"),
        ),
        "edge_index": ("edge_idx", "edge_indices", "edges"),
        "edge_attr": ("edge_feat", "edge_feats", "edge_feature", "edge_features"),
        "edge_weight": ("edge_weights",),
        "pos": ("coords", "coordinates", "position", "positions"),
        "batch": (
            *("batch_idx", "batch_ids", "batch_index", "batch_indices", "batch_vec"),
            *("batch_vector", "graph_ids"),
        ),
        "num_graphs": ("batch_size", "n_graphs"),
    }.items()
    for alias in aliases
}

#: Parameters that receive the whole batch, unless the batch has an attribute of that name.
WHOLE_BATCH: Final = frozenset(
    ["data", "graph", "graphs", "batch_data", "batched_data", "batched_graph"]
)

#: Optional parameters that would receive a label. They never do: a representation that has seen
#: its label is worthless.
LABELS: Final = frozenset({"y", "label", "labels", "target", "targets"})


def call_model(model: nn.Module, data: Batch, form: CallForm = ALL_OF_IT) -> Any:
    """Call ``model`` with what the parameters of its ``forward`` name, taken from ``data``.

    ``x``, ``edge_index``, ``edge_attr``, ``edge_weight``, ``pos``, ``batch`` and every other
    attribute of the batch are passed by name (or by one of :data:`ALIASES`), ``num_graphs`` and
    ``batch_size`` as a number. A parameter such as ``data``, or a single required one that is no
    attribute of the batch, receives the batch itself. Optional parameters are filled if the batch
    has them, except for labels, unless ``form`` says otherwise.

    Raises:
        ModelError: if a required parameter cannot be filled, or the model fails on its input.
    """
    positional: list[Any] = []
    named: dict[str, Any] = {}
    data = visible(data, form.no_pass)
    for parameter, _, value in _fill(unwrap(model), data, form):
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            named[parameter.name] = value
    try:
        return model(*positional, **named)
    except (HistographError, MemoryError, torch.OutOfMemoryError):
        raise  # the caller may try a smaller batch
    except Exception as error:
        raise _failed_call(model, error, [*positional, *named.values()], data) from error


def given_to(model: nn.Module, data: Batch, no_pass: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the parameters of ``forward`` that this batch fills."""
    filled = _fill(unwrap(model), visible(data, no_pass), ALL_OF_IT)
    return tuple(parameter.name for parameter, _, _ in filled)


#: The columns of :func:`received`.
RECEIVED_COLUMNS: Final = ("parameter", "receives", "")


def received(model: nn.Module, data: Batch, form: CallForm) -> list[tuple[str, str, str]]:
    """Return a row per parameter of ``forward``: its name, what it receives, and a remark.

    Users can see here that an optional ``edge_weight`` is filled because the data has one.
    """
    model, shown = unwrap(model), visible(data, form.no_pass)
    filled = {
        parameter.name: (source, value) for parameter, source, value in _fill(model, shown, form)
    }
    rows = []
    for parameter in _parameters_of(model):
        source, value = filled.get(parameter.name, ("", None))
        remark = ""
        if parameter.name not in filled:
            hidden = {parameter.name, ALIASES.get(parameter.name)} & set(form.no_pass)
            remark = "left out by --no-pass" if hidden else "its default: the data have none"
            if parameter.name in LABELS:
                remark = "its default: labels are not shown to a model"
        elif not _is_required(parameter) and source in shown:
            remark = f"optional; --no-pass {source} leaves it out"
        rows.append((parameter.name, _shown(source, value, shown), remark))
    return rows


def _shown(source: str, value: Any, data: Batch) -> str:
    if value is data:
        return f"the batch: {', '.join(sorted(data.keys()))}"
    if isinstance(value, Tensor):
        kind = "" if value.layout == torch.strided else f" {str(value.layout)[6:]}"
        return f"{source} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}{kind}"
    return source


def visible(data: Batch, no_pass: Collection[str]) -> Batch:
    """Return the batch as the model sees it: with sparse matrices, without these attributes."""
    data = with_sparse(data)
    hidden = [name for name in no_pass if name in data]
    if hidden:
        data = copy.copy(data)
        for name in hidden:
            del data[name]
    return data


def _fill(model: nn.Module, data: Batch, form: CallForm) -> Iterator[tuple[Parameter, str, Any]]:
    """Yield each parameter of ``forward`` that is filled, with the attribute's name and value."""
    parameters = _parameters_of(model)
    available = set(data.keys())
    required = [parameter.name for parameter in parameters if _is_required(parameter)]
    missing = set(form.given or ())
    for parameter in parameters:
        name = parameter.name
        source = name if name in available else ALIASES.get(name, name)
        if name not in required and form.given is not None and name not in form.given:
            continue
        missing.discard(name)
        if name in required and _means_whole_batch(name, required, available):
            yield parameter, "data", data
        elif source in available:
            if name in required or name not in LABELS:
                yield parameter, source, data[source]
        elif source in ("num_graphs", "num_nodes"):
            yield parameter, source, getattr(data, source)
        elif name in required or form.given is not None:
            raise ModelError(_unfilled(model, name, available, form))
    if missing:
        raise ModelError(
            f"{type(model).__name__}.forward was given {min(missing)!r} when it was cached, and "
            f"has no such parameter now; it has {', '.join(p.name for p in parameters)}"
        )


def _unfilled(model: nn.Module, name: str, available: set[str], form: CallForm) -> str:
    """Describe a parameter that cannot be filled, and why it has to be."""
    forward = f"{type(model).__name__}.forward"
    has = f"the data has {', '.join(sorted(available))}"
    if name in form.no_pass or ALIASES.get(name) in form.no_pass:
        return f"{forward} needs {name!r}, which --no-pass leaves out; {has}"
    if name in ("adj", "adj_t"):
        has += "; ToSparseTensor(layout=torch.sparse_csr) of PyTorch Geometric makes adj_t"
    wants = f"{forward} needs {name!r}"
    if form.given is not None:
        wants = f"{forward} was given {name!r} when it was cached"
    return f"{wants}, which the data does not have; {has}"


def _means_whole_batch(name: str, required: Sequence[str], available: Collection[str]) -> bool:
    """Whether the required parameter ``name`` stands for the batch, not for one attribute of it."""
    if len(required) > 1:
        return name in WHOLE_BATCH and name not in available
    return name == "batch" or not (name in available or name in ALIASES)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside DataParallel and torch.compile wrappers."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(original := model._modules.get("_orig_mod"), nn.Module):
            model = original
        else:
            return model


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is parameter.empty


def _parameters_of(model: nn.Module) -> list[Parameter]:
    """Return the parameters of the module's ``forward`` that a batch may fill."""
    if isinstance(model, GraphSequential):
        return [Parameter(name, Parameter.KEYWORD_ONLY) for name in model.signature.param_dict]
    if isinstance(model, GAE):  # and VGAE: all its arguments go to its encoder
        return _parameters_of(model.encoder)
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    named = [
        parameter
        for parameter in parameters
        if parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        # An optional one cannot be skipped if it has no name, and the data may not have it.
        and (parameter.kind is not Parameter.POSITIONAL_ONLY or _is_required(parameter))
    ]
    if not named and Parameter.VAR_POSITIONAL in kinds:
        # forward(*args) names nothing; such a model usually unpacks a batch if it gets just one.
        return [Parameter("data", Parameter.POSITIONAL_ONLY)]
    return named


def _failed_call(model: nn.Module, error: Exception, values: list[Any], data: Batch) -> ModelError:
    """Describe in one line what failed and what the model was given."""
    name, reason, where = type(unwrap(model)).__name__, one_line(error), raised_at(error)
    x = data.x if "x" in data else None
    shapes = re.search(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", reason)
    if shapes and isinstance(x, Tensor) and x.dim() == 2 and x.size(1) == int(shapes[1]):
        return ModelError(
            f"{name}{f' ({where})' if where else ''}: found {shapes[1]} node features in the data, "
            f"expected {shapes[2]}, which the model reads"
        )
    message = f"{name}.forward failed{f' at {where}' if where else ''}: {reason}"
    given = [
        f"{key} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for key, value in data.to_dict().items()
        if isinstance(value, Tensor) and any(value is other for other in values)
    ]
    if given:
        message += f" (given {', '.join(given)})"
    about_types = re.search(r"dtype|Long|long int", reason) is not None
    if about_types and isinstance(x, Tensor) and not x.is_floating_point():
        message += "; x holds integers, this model seems to expect float features"
    return ModelError(message)


# --- what a model returns

#: Keys that name the prediction in a dictionary of outputs, best first.
PREDICTION_KEYS: Final = (
    *("logits", "logit", "out", "output", "outputs", "pred", "preds", "prediction"),
    *("predictions", "y_hat", "y_pred", "scores"),
)


def prediction(
    output: Any, *, rows: int | Collection[int], key: str | int | None = None
) -> Tensor | None:
    """Return the prediction among a model's outputs as ``[rows, targets]``, or None.

    ``rows`` is the number of rows that a prediction has; several are tried in order. Outputs may be
    nested tuples, dictionaries and dataclasses. Those called ``logits``, ``out``, ``pred``, ... go
    first, then the order of the outputs decides. ``key`` names the output to take instead.

    Raises:
        ModelError: if there is no output ``key``, or it is not a tensor with that many rows.
    """
    wanted = [rows] if isinstance(rows, int) else list(rows)
    tensors = dict(_tensors(output))
    if key is not None:
        return _named_prediction(tensors, wanted, str(key))
    preferred = sorted(tensors.items(), key=lambda item: _preference(item[0]))
    for count in wanted:
        fitting = [tensor for _, tensor in preferred if _fits(tensor, count)]
        if fitting:
            # A scalar fits a single row, but may as well be a loss: the last resort.
            best = max(fitting, key=lambda tensor: tensor.dim() > 0)
            return _as_rows(best)
    return None


def _named_prediction(tensors: Mapping[str, Tensor], wanted: list[int], key: str) -> Tensor:
    if key not in tensors:
        names = ", ".join(name or "a single tensor" for name in tensors) or "no tensors"
        raise ModelError(f"the model returns no output {key!r}; it returns {names}")
    if any(_fits(tensors[key], count) for count in wanted):
        return _as_rows(tensors[key])
    raise ModelError(
        f"output {key!r} of the model is {list(tensors[key].shape)} {tensors[key].dtype}; "
        f"expected floating point with {' or '.join(map(str, wanted))} rows"
    )


def _fits(tensor: Tensor, rows: int) -> bool:
    if not tensor.is_floating_point() or tensor.dim() > 2:
        return False
    return rows == 1 if tensor.dim() == 0 else tensor.shape[0] == rows


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, 1)  # [rows, targets]


def _preference(path: str) -> int:
    name = path.rpartition(".")[2].lower()
    return PREDICTION_KEYS.index(name) if name in PREDICTION_KEYS else len(PREDICTION_KEYS)


def _tensors(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Walk through nested outputs; yield every tensor with its dotted path."""
    if isinstance(output, Tensor):
        yield path, output
        return
    if isinstance(output, Data):
        return  # A graph that is returned holds its inputs and labels, not a prediction.
    if isinstance(output, Mapping):
        items = [(str(name), value) for name, value in output.items()]
    elif isinstance(output, tuple) and hasattr(output, "_asdict"):
        items = list(output._asdict().items())
    elif isinstance(output, (tuple, list)):
        items = [(str(index), value) for index, value in enumerate(output)]
    elif is_dataclass(output) and not isinstance(output, type):
        items = [(field.name, getattr(output, field.name)) for field in fields(output)]
    else:
        return
    for name, value in items:
        yield from _tensors(value, f"{path}.{name}" if path else name)


# --- whether a model returns probabilities or logits, by the function that computed them

#: Functions that return probabilities, by name. A log-softmax returns logits: a softmax turns them
#: into the same probabilities.
_SQUASHING = frozenset({"sigmoid", "sigmoid_", "softmax", "expit"})

#: Functions that return the same numbers in another shape or place.
_RESHAPING = frozenset(
    {
        *("__getitem__", "clone", "contiguous", "detach", "flatten", "float", "reshape"),
        *("squeeze", "to", "unsqueeze", "view"),
    }
)


class OutputForm(TorchFunctionMode):
    """Watches a forward pass for tensors of probabilities::

    with OutputForm() as form:
        output = model(...)
    form.is_probability(output)
    """

    def __init__(self) -> None:
        super().__init__()
        # The tensors are held, so that no other tensor can take over an id.
        self._probabilities: dict[int, Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        reshaped = name in _RESHAPING and args and id(args[0]) in self._probabilities
        if isinstance(result, Tensor) and (name in _SQUASHING or reshaped):
            self._probabilities[id(result)] = result
        return result

    def is_probability(self, tensor: Tensor) -> bool:
        """Whether this tensor was seen to come from a sigmoid or a softmax."""
        return id(tensor) in self._probabilities
