"""From a model specification to a working ``nn.Module``.

gin                    a built-in model; its sizes come from the checkpoint or the arguments
pretrain-gnns:gcn      the network of a public checkpoint (see ``public_models.py``)
file.py:Name           a class, a function of that file returning a module, or a module
package.module:Name    the same in an importable package
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import HistographError, ModelError, one_line
from ..utils.machine import require_memory
from ..utils.specifications import (
    PUBLIC_MODELS,
    home_of,
    imported_place,
    is_defined_in,
    without_partial,
)
from .builtin_models import CHOICES, GNN, GNNSettings, settings_of

#: The names of the built-in models.
BUILT_IN: Final = CHOICES["kind"]

#: What the names of public checkpoints begin with.
_FAMILIES: Final = frozenset(name.partition(":")[0] for name in PUBLIC_MODELS)

#: Usual names of the number of input features and of outputs in constructors.
INPUT_NAMES: Final = frozenset(
    {
        *("c_in", "feat_dim", "in_channels", "in_dim", "in_feats", "in_features", "in_size"),
        *("input_dim", "input_size", "n_features", "nfeat", "node_dim", "num_features"),
        "num_node_features",
    }
)
OUTPUT_NAMES: Final = frozenset(
    {
        *("c_out", "n_classes", "nclass", "num_class", "num_classes", "num_outputs", "num_tasks"),
        *("out_channels", "out_dim", "out_feats", "out_features", "out_size", "output_dim"),
        "output_size",
    }
)


def build_model(
    spec: str,
    args: Mapping[str, Any],
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    in_dim: int | Sequence[int] | None = None,
    out_dim: int | None = None,
    filled: dict[str, Any] | None = None,
) -> nn.Module:
    """Return the model that ``spec`` names, built with ``args``.

    Args:
        spec: a built-in name, ``file.py:Name`` or ``package.module:Name``.
        args: arguments of the constructor; they take precedence over everything else.
        state_dict: the weights to be loaded later; their sizes take precedence over the data's.
        in_dim: the number of node features of the data (or, for a built-in model, the number of
            categories of each column), for a required argument of the constructor.
        out_dim: the number of classes or targets of the data, used in the same way.
        filled: arguments that were filled in when the model was built before, used in the same way
            and first; those that are filled in now are added.

    Raises:
        ModelError: if there is no such model, or it cannot be built from these arguments.
        NotFoundError: if the file does not exist.
    """
    given = Given(args, state_dict or {}, in_dim, out_dim, {} if filled is None else filled)
    if spec in BUILT_IN:
        return _build_builtin(spec, given)
    if spec in PUBLIC_MODELS:
        from .public_models import build_public

        return build_public(spec, given)
    place, colon, name = spec.rpartition(":")
    if not colon and spec.endswith(".py"):
        place, name = spec, ""
    elif not (place and name) or place in _FAMILIES:
        close = difflib.get_close_matches(spec, (*BUILT_IN, *PUBLIC_MODELS), n=1)
        hint = f", did you mean {close[0]}?" if close else ";"
        public = [known for known in PUBLIC_MODELS if known.startswith(f"{place}:")]
        known = f"{'public' if public else 'built-in'} ones are {', '.join(public or BUILT_IN)}"
        raise ModelError(
            f"no model called {spec!r}{hint} {known}; your own is named file.py:Name or "
            "package.module:Name"
        )
    with imported_place(place, ModelError) as module:
        target = _find(module, name, place)
        _check_target(target, module, spec)
        # Built while the folder of the file is importable: constructors import things, too.
        return _construct(target, spec, given)


_Shape = tuple[int, ...]
_Construct = Callable[[Mapping[str, Any]], nn.Module]


@dataclass(frozen=True)
class Given:
    """What a model is built from, besides its name (see :func:`build_model`)."""

    args: Mapping[str, Any]
    #: Empty where there are no weights.
    state_dict: Mapping[str, Tensor]
    in_dim: int | Sequence[int] | None
    out_dim: int | None
    filled: dict[str, Any]

    @property
    def num_columns(self) -> int | None:
        """Columns of the node features; None where they are not known."""
        return None if self.in_dim is None else _num_columns(self.in_dim)


def _build_builtin(kind: str, given: Given) -> GNN:
    args, found = given.args, settings_of(given.state_dict)
    if given.state_dict and not found and not args:
        raise ModelError(
            f"the checkpoint was not made by the built-in {kind} (its first weight is "
            f"{next(iter(given.state_dict))!r}); name the model it belongs to: --model file.py:Name"
        )
    if found.get("kind", kind) != kind:
        raise ModelError(f"the checkpoint holds a built-in {found['kind']}, not a {kind}")
    data = {"in_dim": given.in_dim, "out_dim": given.out_dim, **given.filled}
    known = {name: value for name, value in data.items() if value is not None}
    settings = {**known, **found, **args, "kind": kind}
    given.filled.update({name: known[name] for name in known if name not in {*found, *args}})
    for name, other in (("in_dim", "the features of the nodes"), ("out_dim", "the labels")):
        if name not in settings:
            raise ModelError(f"{kind} needs {name}, which {other} do not show: give {name}=NUMBER")
    checked = GNNSettings.from_args(settings)
    tables = (size if isinstance(size, list | tuple) else [size] for size in settings.values())
    sizes = [checked.hidden * checked.num_layers, *(size for table in tables for size in table)]
    require_memory(kind, sizes, lambda: GNN(checked), bytes_per_weight=4)
    model = GNN(checked)
    columns = _num_columns(model.settings.in_dim)
    if given.num_columns not in (None, columns):
        raise ModelError(
            f"this {kind} reads {columns} node features, the data has {given.num_columns}"
        )
    return model


def _num_columns(in_dim: int | Sequence[int]) -> int:
    return in_dim if isinstance(in_dim, int) else len(in_dim)


def _find(module: ModuleType, name: str, place: str) -> Any:
    """Return the object called ``name`` in a user's module."""
    target = getattr(module, name, None) if name else None
    if target is not None:
        return target
    own = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, nn.Module)
        and value.__module__ == module.__name__
    ]
    found = f"its models are {', '.join(own)}" if own else "it defines no nn.Module"
    problem = f"has no {name!r}" if name else f"needs a name, as in {place}:{(own or ['Name'])[-1]}"
    raise ModelError(f"{place} {problem}; {found}")


def _check_target(target: Any, module: ModuleType, label: str) -> None:
    """Refuse to call what is neither an ``nn.Module`` nor defined in the user's module."""
    if isinstance(target, nn.Module):
        return
    called = without_partial(target)
    if isinstance(called, type) and issubclass(called, nn.Module):
        return
    if not callable(called):
        kind = type(target).__name__
        raise ModelError(f"{label} is a {kind}; expected a class, a function or a module")
    if not is_defined_in(called, module):
        raise ModelError(
            f"{label} comes from {home_of(called)}; expected an nn.Module, or a function that is "
            "defined there"
        )


def _construct(target: Any, label: str, given: Given) -> nn.Module:
    """Call a class or factory; a module is copied."""
    args = given.args
    if isinstance(target, nn.Module):
        if args:
            raise ModelError(f"{label} is a module already and takes no arguments: {list(args)}")
        return copy.deepcopy(target)

    def construct(sizes: Mapping[str, Any]) -> nn.Module:
        return _call(target, label, {**args, **sizes})

    model, sizes = _build_sized(construct, _sizes(target, given), given.state_dict)
    given.filled.update(sizes)
    _check_defaults(model, target, label, given, construct)
    return model


def _check_defaults(
    model: nn.Module, target: Any, label: str, given: Given, construct: _Construct
) -> None:
    """Refuse sizes that the constructor has by default where the weights show others."""
    signature, weights, built = _signature(target), given.state_dict, given.filled
    if signature is None or not _misfits(model, weights):
        return
    others: dict[str, int] = {}
    for name, parameter in signature.parameters.items():
        if type(parameter.default) is int and name not in {*given.args, *built}:
            size = _size(construct, built, name, weights)
            if size not in (None, parameter.default):
                others[name] = size
    if others and not _misfits(construct({**built, **others}), weights):
        found = ", ".join(f"{name}={signature.parameters[name].default}" for name in others)
        raise ModelError(
            f"{label} has {found} by default, which does not fit the checkpoint; expected "
            f"--model-args {' --model-args '.join(f'{name}={others[name]}' for name in others)}"
        )


def _call(target: Any, label: str, arguments: Mapping[str, Any]) -> nn.Module:
    _check_arguments(target, label, arguments)
    try:
        model = target(**arguments)
    except HistographError:
        raise
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ModelError(f"{label}({given}) failed: {one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{label} gave a {type(model).__name__}; expected an nn.Module")
    return model


def _sizes(target: Any, given: Given) -> dict[str, Any]:
    """Return the sizes that a constructor requires, under its names for them."""
    signature = _signature(target)
    in_dim = given.in_dim if isinstance(given.in_dim, int) else None
    # Without labels any number will do: the weights have the right one.
    out_dim = 1 if given.out_dim is None and given.state_dict else given.out_dim
    sizes: dict[str, Any] = {}
    for name, parameter in signature.parameters.items() if signature else ():
        if name in given.args or parameter.default is not parameter.empty:
            continue
        for names, size in ((INPUT_NAMES, in_dim), (OUTPUT_NAMES, out_dim)):
            if name in names and size is not None:
                sizes[name] = size
        if name in given.filled:
            sizes[name] = given.filled[name]
    return sizes


def _signature(target: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):  # some callables written in C have none
        return None


def _check_arguments(target: Any, label: str, arguments: Mapping[str, Any]) -> None:
    """Check arguments against the signature before anything is called."""
    signature = _signature(target)
    if signature is None:
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        plain = [
            parameter.replace(annotation=parameter.empty)
            for parameter in signature.parameters.values()
        ]
        shown = inspect.Signature(plain)
        raise ModelError(f"{label}{shown} {error}; give arguments as name=value") from error


# --- sizes that a constructor requires, read from the weights that will be loaded

#: Two values that no constructor treats specially, as some do 1 and 2.
_LOW, _HIGH = 5, 7


def _build_sized(
    construct: _Construct, guessed: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[nn.Module, dict[str, Any]]:
    """Build a model with the guessed sizes, or with those of its weights if the guess does not fit.

    For two classes the guess is one output, but a checkpoint may have two logits. To find out which
    tensors a size determines, the model is built with two other values of it.

    Returns:
        The model, and the sizes that it was built with.
    """
    model = construct(guessed)
    if not guessed or not _misfits(model, weights):
        return model, dict(guessed)
    numbers = [name for name, size in guessed.items() if isinstance(size, int)]
    found = {name: _size(construct, guessed, name, weights) for name in numbers}
    sizes = {**guessed, **{name: size for name, size in found.items() if size is not None}}
    if sizes == dict(guessed):
        return model, sizes
    try:
        sized = construct(sizes)
    except ModelError:
        return model, dict(guessed)
    better = _misfits(sized, weights) < _misfits(model, weights)
    return (sized, sizes) if better else (model, dict(guessed))


def _size(
    construct: _Construct, sizes: Mapping[str, Any], name: str, weights: Mapping[str, Tensor]
) -> int | None:
    """Return the value of a size that all tensors agree on; None if there is none."""
    try:
        low, high = (_shapes(construct({**sizes, name: value})) for value in (_LOW, _HIGH))
    except ModelError:
        return None
    values: set[float] = set()
    for tensor in low.keys() & high.keys():
        shape = _shape_in(weights, tensor)
        if shape is None or not len(shape) == len(low[tensor]) == len(high[tensor]):
            continue
        for saved, at_low, at_high in zip(shape, low[tensor], high[tensor], strict=True):
            if at_low != at_high:
                per_unit = (at_high - at_low) / (_HIGH - _LOW)
                values.add(_LOW + (saved - at_low) / per_unit)
    (value,) = values if len(values) == 1 else (0.0,)
    return int(value) if value >= 1 and value == int(value) else None


def _misfits(model: nn.Module, weights: Mapping[str, Tensor]) -> int:
    """Return how many tensors of a model have another shape in the file."""
    return sum(
        _shape_in(weights, name) not in (None, shape) and shape != ()
        for name, shape in _shapes(model).items()
    )


def _shapes(model: nn.Module) -> dict[str, _Shape]:
    return {
        name: tuple(value.shape)
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not is_lazy(value)
    }


def _shape_in(weights: Mapping[str, Tensor], name: str) -> _Shape | None:
    """Return the shape of a tensor in a file, where its name may have a prefix."""
    if name in weights:
        return tuple(weights[name].shape)
    behind = {tuple(value.shape) for key, value in weights.items() if key.endswith(f".{name}")}
    return behind.pop() if len(behind) == 1 else None
