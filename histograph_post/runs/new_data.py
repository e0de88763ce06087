"""New data for a run: loaded as those it was trained on were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_geometric.data import Data

from ..data import DataSpec, GraphDataset, from_graphs
from ..data.reading import Reading
from ..data.spec import FEATURE_ARGS, LEVEL_ARGS
from ..errors import DataError
from ..utils import Level
from .run import Run

#: Data arguments that decide what a model sees of a graph and is asked about it. New data of the
#: kind that the head was trained on takes them from there: other features give plausible nonsense.
_TAKEN_ARGS = (*FEATURE_ARGS, *LEVEL_ARGS, "mol_features", "node_attr", "normalize_features")


def data_for(
    run: Run,
    data: str | Path | GraphDataset | Iterable[Data],
    data_root: str | Path | None,
    data_args: Mapping[str, Any] | None,
    reading: Reading | None = None,
) -> tuple[GraphDataset, list[str]]:
    """Return data that a run is used on, and what was taken over from those it was trained on.

    Args:
        run: The run.
        data: A specification, or graphs.
        data_root: Offline copies of benchmark data.
        data_args: Arguments of the data.
        reading: How many rows are read.
    """
    if isinstance(data, GraphDataset):
        return data, []
    if not isinstance(data, (str, Path)):
        return from_graphs(data, reading=reading), []
    trained_on, given = run.backbone.data, data_args or {}
    taken = _taken_args(trained_on, str(data), given)
    root = None if data_root is None else Path(data_root)
    named = DataSpec(str(data), {**taken, **given}, root, reading=reading)
    dataset = named.for_prediction(trained_on, run.stored_head["target_names"]).load()
    shown = ", ".join(f"{name}={value}" for name, value in taken.items())
    return dataset, [f"data arguments of the run: {shown}"] if taken else []


def _taken_args(trained_on: DataSpec, spec: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data arguments that new data of the same kind takes over from the run."""
    if _kind(spec) != _kind(trained_on.spec) or any(name in given for name in _TAKEN_ARGS):
        return {}
    return {name: trained_on.args[name] for name in _TAKEN_ARGS if name in trained_on.args}


def _kind(spec: str) -> str:
    prefix, colon, _ = spec.partition(":")
    return prefix if colon else Path(spec).suffix


def at_level(dataset: GraphDataset, level: Level) -> GraphDataset:
    """Return the data with the rows that the head predicts; labels say nothing about that."""
    if level == "link" and not all("edge_label_index" in graph for graph in dataset.graphs):
        raise DataError(f"{dataset.spec}: found no edge_label_index, expected the pairs to score")
    return dataset if dataset.level == level else replace(dataset, level=level)
