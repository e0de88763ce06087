"""Data from a user's own function: ``file.py:function`` or ``package.module:function``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_geometric.data import Batch, Data, Dataset

from ..errors import DataError, HistographError, NotFoundError
from ..utils.specifications import home_of, is_defined_in, refuse_standard_library
from .arguments import FEATURE_ARGS, LEVEL_ARGS, feature_options, level_options
from .dataset import GraphDataset, from_graphs

#: Arguments that this package uses itself, unless the function has a parameter of that name.
_OURS = (*LEVEL_ARGS, *FEATURE_ARGS)


def load_function(target: str, root: Path | None, args: Mapping[str, Any]) -> GraphDataset:
    """Call the function that ``target`` names and collect the graphs it returns.

    It is called with those of ``root`` (a :class:`~pathlib.Path`) and the data arguments that its
    parameters name. It returns graphs (a list, a PyG data set), a :class:`GraphDataset`, or one
    ``Data``, which is then a node-level set. A PyG data set class works as well. A function that
    the file or package only imported from elsewhere is not called.
    """
    place, _, name = target.rpartition(":")
    folder = Path(place).resolve().parent if place.endswith(".py") else Path.cwd()
    try:
        with _importable(folder):
            function = _find(place, name)
            given, ours = _arguments(function, root, args, target)
            result = function(**given)
            if not isinstance(result, GraphDataset | Data):
                result = list(result)
    except HistographError:
        raise
    except Exception as error:
        # The user's code: it may raise anything, --debug shows where.
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"{target}: failed with {type(error).__name__}: {reason}") from error
    if isinstance(result, GraphDataset):
        if ours:
            raise DataError(
                f"{target}: returned a GraphDataset, expected no {', '.join(sorted(ours))} with it"
            )
        return replace(result, spec=target)
    options = level_options(ours, spec=target) | feature_options(ours, spec=target)
    lone = isinstance(result, Data) and not isinstance(result, Batch)
    if options["level"] is None and lone and "edge_label_index" not in result:
        options["level"] = "node"
    return from_graphs(result, spec=target, **options)


def _find(place: str, name: str) -> Callable[..., Any]:
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        public = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        )
        raise DataError(
            f"{place}: no function {name!r}, found {', '.join(public) or 'no functions'}"
        )
    if not (_is_dataset_class(function) or is_defined_in(function, module)):
        raise DataError(
            f"{place}: {name!r} comes from {home_of(function)}; expected a "
            "function that is defined there, or a PyG data set class"
        )
    return function


def _is_dataset_class(target: Any) -> bool:
    return inspect.isclass(target) and issubclass(target, Dataset)


def _module(name: str) -> Any:
    refuse_standard_library(name, DataError)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that this module wants
        raise DataError(f"{name}: no such module, expected package.module:function") from error


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file, expected file.py:function")
    # A name of its own: two files called data.py must not become each other.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{digest}", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles in the file look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _arguments(
    function: Callable[..., Any], root: Path | None, args: Mapping[str, Any], target: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the function is called with, and the arguments that are for this package."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    given: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    for key, value in args.items():
        if key in named or (takes_any and key not in _OURS):
            given[key] = value
        elif key in _OURS:
            ours[key] = value
        else:
            valid = ", ".join(sorted((named - {"root"}) | set(_OURS)))
            raise DataError(f"{target}: unknown data argument {key!r}, expected one of {valid}")
    if "root" in named and root is not None:
        # PyG's classes expect text.
        given["root"] = str(root) if _is_dataset_class(function) else root
    missing = [n for n in parameters if n in named - given.keys() and _required(parameters[n])]
    if missing:
        hint = "--data-root" if missing[0] == "root" else f"--data-args {missing[0]}=..."
        raise DataError(f"{target}: needs {missing[0]!r}, give it with {hint}")
    return given, ours


def _required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let the user's file import its neighbours, as it can when it is run as a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
