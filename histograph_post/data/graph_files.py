"""Graphs saved with ``torch.save``, read without running anything that is in the file.

Understood are a list of ``Data``, a list of dictionaries of tensors, one ``Data``, and the tuple
``(data, slices, ...)`` that PyG's ``InMemoryDataset`` keeps in ``processed/``.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.separate import separate
from torch_geometric.data.storage import GlobalStorage

from ..errors import DataError, NotFoundError
from .arguments import FEATURE_ARGS, LEVEL_ARGS, check_names, feature_options, level_options
from .dataset import GraphDataset, from_graphs

#: PyG's classes of one homogeneous graph. None of them does more than hold values.
_ALLOWED = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]

_CHECKPOINT_KEYS = ("state_dict", "model_state_dict", "optimizer_state_dict", "hyper_parameters")


def load_graph_file(path: Path, args: Mapping[str, Any], *, spec: str) -> GraphDataset:
    """Load graphs from a ``.pt`` file."""
    check_names(args, (*LEVEL_ARGS, *FEATURE_ARGS), spec=spec)
    content = _read(path)
    try:
        graphs = _graphs(content, path)
    except DataError:
        raise
    except Exception as error:
        # Whoever wrote the file chose what is in these objects: they may fail in any way.
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"{path}: not readable as graphs ({type(error).__name__}: {reason})"
        ) from error
    options = level_options(args, spec=spec) | feature_options(args, spec=spec)
    lone = isinstance(content, Data) and "edge_label_index" not in content
    if options["level"] is None and lone:
        options["level"] = "node"
    return from_graphs(graphs, spec=spec, **options)


def _read(path: Path) -> object:
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file, expected graphs saved with torch.save")
    try:
        with torch.serialization.safe_globals(_not_yet_allowed()), warnings.catch_warnings():
            # torch remarks on old pickle protocols and on TorchScript before it refuses them.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        asks = f"asks for {found[1]}" if found else "is more than plain data"
        raise DataError(
            f"{path}: refused, it {asks}; expected graphs as torch_geometric Data or tensors; "
            "nothing in it has been executed (a model's checkpoint goes with --checkpoint)"
        ) from error
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"{path}: not a file of torch.save, or damaged ({type(error).__name__}: {reason})"
        ) from error


def _not_yet_allowed() -> list[Any]:
    """Return the classes to allow; torch would also take back what PyG has allowed for good."""
    return [kind for kind in _ALLOWED if kind not in torch.serialization.get_safe_globals()]


def _graphs(content: object, path: Path) -> list[Data]:
    if isinstance(content, Batch):
        return list(content.to_data_list())
    if isinstance(content, Data):
        return [content]
    if isinstance(content, Mapping) and "edge_index" in content:
        return [Data.from_dict(dict(content))]
    if isinstance(content, Mapping) and _is_checkpoint(content):
        raise DataError(f"{path}: this looks like a checkpoint, give it with --checkpoint")
    if isinstance(content, tuple) and _is_collated(content):
        return _separate(content)
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
    """Tell weights by their names (``layer.0.weight``), at the top or one folder down."""
    return any(
        key in _CHECKPOINT_KEYS
        or (isinstance(value, Tensor) and ("." in str(key) or key in ("weight", "bias")))
        or (isinstance(value, Mapping) and _is_checkpoint(value))
        for key, value in content.items()
    )


def _is_collated(content: tuple[Any, ...]) -> bool:
    """Tell ``(data, slices, ...)`` from a tuple of graphs: slices are one-dimensional."""
    if len(content) < 2 or not isinstance(content[0], Data | Mapping):
        return False
    slices = content[1]
    if slices is None:
        return True
    edges = slices.get("edge_index") if isinstance(slices, Mapping) else None
    return isinstance(edges, Tensor) and edges.dim() == 1


def _separate(content: tuple[Any, ...]) -> list[Data]:
    data, slices = content[:2]
    if isinstance(data, Mapping):
        data = Data.from_dict(dict(data))
    if slices is None:
        return [data]
    count = len(slices["edge_index"]) - 1
    return [
        separate(cls=Data, batch=data, idx=index, slice_dict=slices, decrement=False)
        for index in range(count)
    ]


def _describe(content: object) -> str:
    if isinstance(content, Mapping):
        return f"a dictionary with {', '.join(sorted(map(str, content))[:4]) or 'nothing'}"
    if isinstance(content, list | tuple):
        return f"an empty {type(content).__name__}" if not content else type(content).__name__
    return type(content).__name__
