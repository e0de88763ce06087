"""A user's own data: what a function returns, or graphs in a file of ``torch.save``.

``file.py:function`` and ``package.module:function`` are imported and called; ``graphs.pt`` is read
without running anything that is in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, Dataset, HeteroData
from torch_geometric.data.separate import separate

from ..errors import (
    CacheError,
    CheckpointError,
    DataError,
    HistographError,
    NotFoundError,
    UnsafeCheckpointError,
)
from ..utils.inert import StandIn, read_plain
from ..utils.specifications import home_of, imported_place, is_defined_in
from ..utils.text import first_line
from .checks import refuse_hetero
from .dataset import GraphDataset, from_graphs
from .spec import (
    FEATURE_ARGS,
    LEVEL_ARGS,
    STREAM_ARGS,
    Reading,
    as_bool,
    check_names,
    feature_options,
    level_options,
)

#: Arguments that this package uses itself, unless the function has a parameter of that name.
_OURS = (*LEVEL_ARGS, *FEATURE_ARGS, *STREAM_ARGS)


def load_function(
    target: str, root: Path | None, args: Mapping[str, Any], reading: Reading | None = None
) -> GraphDataset:
    """Call the function that ``target`` names and collect the graphs it returns.

    It is called with those of ``root`` (a :class:`~pathlib.Path`) and the data arguments that its
    parameters name. It returns graphs (a list, a PyG data set), a :class:`GraphDataset`, or one
    ``Data``, which is then a node-level set. A PyG data set class works as well. A function that
    the file or package only imported from elsewhere is not called. ``stream=true`` and
    ``stream=false`` decide whether graphs stay on disk (see :mod:`.streaming`).
    """
    place, _, name = target.rpartition(":")
    try:
        with imported_place(place, DataError) as module:
            function = _find(module, place, name)
            given, ours = _arguments(function, root, args, target)
            result = function(**given)
            if not isinstance(result, GraphDataset):
                stream = as_bool(ours, "stream", default=None, spec=target)
                options = _graph_options(result, ours, target)
                reading = replace(reading or Reading(), place=place)
                # Inside the block, because an iterator may import when it is read.
                return from_graphs(result, spec=target, stream=stream, reading=reading, **options)
    except HistographError:
        raise
    except Exception as error:
        # The user's code: it may raise anything, --debug shows where.
        raise DataError(
            f"{target}: failed with {type(error).__name__}: {first_line(error)}"
        ) from error
    if ours:
        raise DataError(
            f"{target}: returned a GraphDataset, expected no {', '.join(sorted(ours))} with it"
        )
    return replace(result, spec=target)


def _graph_options(found: Any, args: Mapping[str, Any], spec: str) -> dict[str, Any]:
    """Return the options of :func:`from_graphs`; a single graph has node labels, unless pairs."""
    options = level_options(args, spec=spec) | feature_options(args, spec=spec)
    single = isinstance(found, Data) and not isinstance(found, Batch)
    if options["level"] is None and single and not hasattr(found, "edge_label_index"):
        options["level"] = "node"
    return options


def _find(module: ModuleType, place: str, name: str) -> Callable[..., Any]:
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


def _arguments(
    function: Callable[..., Any], root: Path | None, args: Mapping[str, Any], target: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the function, and those for this package."""
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
    missing = [
        n for n, p in parameters.items() if n in named - given.keys() and p.default is p.empty
    ]
    if missing:
        hint = "--data-root" if missing[0] == "root" else f"--data-args {missing[0]}=..."
        raise DataError(f"{target}: needs {missing[0]!r}, give it with {hint}")
    return given, ours


# --- graphs saved with ``torch.save``

#: PyG's classes of a homogeneous graph, which only hold values.
_DATA = "torch_geometric.data.data.Data"
_ALLOWED = (
    *(_DATA, "torch_geometric.data.data.DataEdgeAttr", "torch_geometric.data.data.DataTensorAttr"),
    "torch_geometric.data.storage.GlobalStorage",
)

_CHECKPOINT_KEYS = ("state_dict", "model_state_dict", "optimizer_state_dict", "hyper_parameters")


def load_graph_file(path: Path, args: Mapping[str, Any], *, spec: str) -> GraphDataset:
    """Load graphs from a ``.pt`` file."""
    check_names(args, (*LEVEL_ARGS, *FEATURE_ARGS), spec=spec)
    content = _read(path)
    try:
        content = _rebuilt(content)
        graphs = _graphs(content, path)
    except DataError:
        raise
    except Exception as error:
        # The file's author chose what is in these objects: they may fail in any way.
        raise DataError(
            f"{path}: not readable as graphs ({type(error).__name__}: {first_line(error)})"
        ) from error
    return from_graphs(graphs, spec=spec, **_graph_options(content, args, spec))


def _read(path: Path) -> object:
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file, expected graphs saved with torch.save")
    try:
        return read_plain(path, allowed=_ALLOWED)
    except UnsafeCheckpointError as error:
        if "torch_geometric.data.hetero_data" in str(error):
            refuse_hetero(HeteroData(), str(path))
        raise DataError(
            f"{error}; expected graphs as torch_geometric Data or tensors (a model's checkpoint "
            "goes with --checkpoint)"
        ) from error
    except (CheckpointError, CacheError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise DataError(f"{path}: not a file of torch.save, or damaged ({reason})") from error


def _rebuilt(content: object) -> object:
    """Return what a file holds with graphs of the values that stand-ins for graphs have."""
    if isinstance(content, list | tuple):
        return type(content)(map(_rebuilt, content))
    if not isinstance(content, StandIn) or content.name != _DATA:
        return content
    store = content.parts["_store"].parts
    graph = Data.from_dict(store["_mapping"])
    if "_num_nodes" in store:  # of every graph, in one that holds many
        graph._store._num_nodes = store["_num_nodes"]
    return graph


def _graphs(content: object, path: Path) -> list[Data]:
    if isinstance(content, Data):
        return [content]
    if isinstance(content, Mapping) and "edge_index" in content:
        return [Data.from_dict(dict(content))]
    if isinstance(content, Mapping) and _is_checkpoint(content):
        raise DataError(f"{path}: this looks like a checkpoint, give it with --checkpoint")
    if isinstance(content, tuple) and _is_collated(content):
        return _separate(content, path)
    if isinstance(content, list | tuple) and content:
        return [_graph(item, position, path) for position, item in enumerate(content)]
    raise DataError(
        f"{path}: found {_describe(content)}, expected a list of Data, a list of dictionaries of "
        "tensors, or (data, slices)"
    )


def _graph(item: object, position: int, path: Path) -> Data:
    if isinstance(item, Data):
        return item
    if isinstance(item, Mapping) and "edge_index" in item:
        return Data.from_dict(dict(item))
    raise DataError(
        f"{path}: graph {position}: found {_describe(item)}, "
        "expected Data or a dictionary with edge_index"
    )


def _is_checkpoint(content: Mapping[Any, object]) -> bool:
    """Recognize weights by their names (``layer.0.weight``), at any depth."""
    return any(
        key in _CHECKPOINT_KEYS
        or (isinstance(value, Tensor) and ("." in str(key) or key in ("weight", "bias")))
        or (isinstance(value, Mapping) and _is_checkpoint(value))
        for key, value in content.items()
    )


def _is_collated(content: tuple[Any, ...]) -> bool:
    """Distinguish ``(data, slices, ...)`` from a tuple of graphs: slices are one-dimensional."""
    if len(content) < 2 or not isinstance(content[0], Data | Mapping):
        return False
    slices = content[1]
    if slices is None:
        return True
    edges = slices.get("edge_index") if isinstance(slices, Mapping) else None
    return isinstance(edges, Tensor) and edges.dim() == 1


def _separate(content: tuple[Any, ...], path: Path) -> list[Data]:
    data, slices = content[:2]
    if isinstance(data, Mapping):
        data = Data.from_dict(dict(data))
    if slices is None:
        return [data]
    count = len(slices["edge_index"]) - 1
    # Every graph has a node, so it takes some of the file; slices can claim any number of graphs.
    if count > min(path.stat().st_size, sum(map(_stored, data.to_dict().values()))):
        raise DataError(f"{path}: found {count} slices, expected no more than there are nodes")
    return [
        separate(cls=Data, batch=data, idx=index, slice_dict=slices, decrement=False)
        for index in range(count)
    ]


def _stored(value: object) -> int:
    """Return the bytes that a tensor really takes, which it may repeat; the length of others."""
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested:
        return value.untyped_storage().nbytes()
    return len(value) if isinstance(value, Sized) else 0


def _describe(content: object) -> str:
    if isinstance(content, Mapping):
        return f"a dictionary with {', '.join(sorted(map(str, content))[:4]) or 'nothing'}"
    if isinstance(content, list | tuple):
        return f"an empty {type(content).__name__}" if not content else type(content).__name__
    return type(content).__name__
