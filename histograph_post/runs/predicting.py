"""Prediction: a run is opened on new data, loaded as those it was trained on were, and used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch_geometric.data import Data

from ..data import DataSpec, GraphDataset, from_graphs
from ..data.spec import FEATURE_ARGS, LEVEL_ARGS, Reading
from ..data.streaming import remove_rows, rows_beside
from ..heads.base import Readout
from ..utils.machine import NODE_BUDGET
from ..utils.outputs import output_file
from ..utils.text import notebook_bar
from .predictions import Predictions
from .predictor import Predictor as Predictor
from .predictor import load as load
from .run import Run


def predict(
    run: str | Path | Run,
    data: str | Path | GraphDataset | Iterable[Data],
    out: str | Path | None = None,
    *,
    data_root: str | Path | None = None,
    data_args: Mapping[str, Any] | None = None,
    model: nn.Module | str | None = None,
    head: str | type[Readout] | None = None,
    checkpoint: str | Path | None = None,
    key_map: str | Path | None = None,
    trust: bool = False,
    node_budget: int = NODE_BUDGET,
    device: str = "auto",
    overwrite: bool = False,
    config: Mapping[str, Any] | None = None,
    workers: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_reading: Callable[[int, int], None] | None = None,
) -> Predictions:
    """Predict new graphs with the mean of a run's heads, in one pass; labels are optional.

    Args:
        run: A finished run, or its folder.
        data: A data specification, or graphs.
        out: A csv file to write.
        data_root: Offline copies of benchmark data.
        data_args: Arguments of the data. Those on node features and links are by default the ones
            of the data the head was trained on, if this is data of the same kind.
        model: See :func:`load`, as for ``head``, ``checkpoint``, ``key_map`` and ``trust``.
        head: Another readout of the run, or your own.
        checkpoint: The backbone's weights.
        key_map: Old weight names to new ones.
        trust: Unpickle a checkpoint that can run code.
        node_budget: A batch takes whole graphs up to this many nodes.
        device: Where to run.
        overwrite: Replace an existing file.
        config: The options this came from, saved beside the file.
        workers: Processes that read rows, where there are many; by default one per core.
        on_progress: Called with the nodes done and the nodes in all.
        on_reading: Called with the rows that are read and the rows in all, where there are many.
    """
    # Many graphs, and what was predicted of them, stay beside the file until it is written.
    kept = None if out is None else rows_beside(out)
    with open_on_data(
        run,
        data,
        out,
        data_root=data_root,
        data_args=data_args,
        reading=Reading(kept, workers, on_progress=on_reading),
        head=head,
        model=model,
        overwrite=overwrite,
        config=config,
        watched=("predicting", on_progress),
        loading={"checkpoint": checkpoint, "key_map": key_map, "trust": trust, "device": device},
    ) as opened:
        found = opened.predictor.predict(
            opened.dataset, node_budget=node_budget, on_progress=opened.on_progress, kept=kept
        )
        found = replace(found, notes=[*opened.notes, *found.notes])
        opened.write(lambda: (part.encode() for part in found.csv_parts()))
    if kept is not None:
        remove_rows(kept)
    return found


# --- a run on new data

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class OpenedOnData:
    """What a run predicts or embeds with, the data it is used on, and where the result goes."""

    run: Run
    predictor: Predictor
    dataset: GraphDataset
    #: What was taken over from the data that the run was trained on.
    notes: list[str]
    #: Told of the nodes that are done and the nodes in all, if anybody listens.
    on_progress: OnProgress | None
    _write: Callable[[bytes | Iterable[bytes]], None] | None = field(repr=False)

    def write(self, contents: Callable[[], bytes | Iterable[bytes]]) -> None:
        """Write the file, if one is asked for."""
        if self._write is not None:
            self._write(contents())


@contextmanager
def open_on_data(
    run: str | Path | Run,
    data: str | Path | GraphDataset | Iterable[Data],
    out: str | Path | None,
    *,
    data_root: str | Path | None,
    data_args: Mapping[str, Any] | None,
    reading: Reading | None = None,
    head: str | type[Readout] | None,
    model: nn.Module | str | None,
    overwrite: bool,
    config: Mapping[str, Any] | None,
    watched: tuple[str, OnProgress | None],
    loading: Mapping[str, Any],
) -> Iterator[OpenedOnData]:
    """Open a run on new data; what cannot be used is refused before anything slow is done.

    The arguments are those of :func:`predict`, and:

    Args:
        reading: How many rows are read.
        watched: What a bar in a notebook says, and who else is told of the nodes that are done.
        loading: The other arguments of :func:`~histograph_post.runs.predictor.load`.
    """
    what, on_progress = watched
    with ExitStack() as stack:
        write = None
        if out is not None:
            writing = output_file(Path(out), overwrite=overwrite, config=config)
            write = stack.enter_context(writing)
        opened = Run.of(run).with_head(head)
        if not isinstance(model, nn.Module):
            model = opened.backbone.model.to_follow(model).spec  # refuses before data are loaded
        dataset, notes = data_for(opened, data, data_root, data_args, reading)
        in_dim = int(dataset.graphs[0].num_node_features)
        predictor = load(opened, model=model, in_dim=in_dim, **loading)
        update = stack.enter_context(notebook_bar(what, watched=on_progress is not None))
        yield OpenedOnData(opened, predictor, dataset, notes, on_progress or update, write)


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
