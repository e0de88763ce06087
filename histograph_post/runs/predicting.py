"""Using a run on new data: its predictions, or its embeddings."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ..data import DataSpec, GraphDataset, from_graphs
from ..data.spec import FEATURE_ARGS, LEVEL_ARGS, Reading
from ..data.streaming import remove_rows, rows_beside
from ..errors import (
    CaptureError,
    ConfigError,
    DataError,
    HistographError,
    MissingExtraError,
    ModelError,
)
from ..heads.base import Readout
from ..training.batches import HeadInputs
from ..utils import Level
from ..utils.files import write_bytes
from ..utils.machine import NODE_BUDGET
from ..utils.outputs import output_file
from ..utils.text import notebook_bar
from .predictions import Predictions, row_names
from .predictor import Predictor as Predictor
from .predictor import at_level, require_finite
from .predictor import load as load
from .run import Run, is_run
from .saved_head import HeadMember

OnProgress = Callable[[int, int], None]


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
    on_progress: OnProgress | None = None,
    on_reading: OnProgress | None = None,
) -> Predictions:
    """Predict new graphs with the mean of a run's heads, in one pass; labels are optional.

    Args:
        run: A finished run, or its folder.
        data: A data specification, or graphs.
        out: A csv file to write.
        data_root: Offline copies of benchmark data.
        data_args: Arguments of the data. Those on node features and links are by default the ones
            that the head was trained with, if this is data of the same kind.
        model: See :func:`load`, as for ``head``, ``checkpoint``, ``key_map``, ``trust`` and
            ``device``.
        node_budget: A batch takes whole graphs up to this many nodes.
        config: The options this came from, saved beside the file.
        workers: Processes that read rows, if there are many; by default one per core.
        on_progress: Called with the nodes done and the nodes in all.
        on_reading: Called with the rows read and the rows in all, if there are many.
    """
    # Many graphs, and their predictions so far, are kept beside the file until it is written.
    kept = None if out is None else rows_beside(out)
    with _open(
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
        if opened.write is not None:
            opened.write(part.encode() for part in found.csv_parts())
    return found


# --- embeddings

#: Suffixes of files of embeddings.
FORMATS = (".npz", ".parquet")


@dataclass(frozen=True)
class Embeddings:
    """A vector per graph, or per node, with the names that predictions have."""

    #: Name of each row: the id of the graph, with the number of the node within it.
    ids: Sequence[str]
    #: ``[rows, width]``, float32.
    vectors: np.ndarray
    #: Source row of each graph (a line of a csv file), or its number: ``[rows]``.
    rows: np.ndarray
    #: SMILES of each row's graph, of molecules.
    smiles: Sequence[str] | None = None
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Embeddings({len(self)} rows of width {self.vectors.shape[1]})"

    def save(self, path: str | Path) -> None:
        """Write ``ids``, ``vectors``, ``rows`` and, of molecules, ``smiles``.

        Args:
            path: An ``.npz`` file, which numpy reads without pickle; or ``.parquet`` with columns
                ``id``, ``row``, ``smiles`` and ``vector``, a list of fixed length (extra
                ``arrow``).
        """
        require_format(Path(path))
        write_bytes(Path(path), self.to_bytes(Path(path).suffix))

    def to_bytes(self, suffix: str) -> bytes:
        """Return the contents of a file that ends in ``.npz`` or ``.parquet``."""
        texts = {} if self.smiles is None else {"smiles": list(self.smiles)}
        file = io.BytesIO()
        if suffix == ".npz":
            arrays: dict[str, Any] = {"ids": np.array(self.ids), "vectors": self.vectors}
            arrays |= {"rows": self.rows} | {name: np.array(v) for name, v in texts.items()}
            np.savez(file, **arrays)
            return file.getvalue()
        import pyarrow
        from pyarrow import parquet

        width = self.vectors.shape[1]
        flat = pyarrow.array(self.vectors.reshape(-1))  # [rows * width]
        columns = {
            "id": list(self.ids),
            "row": self.rows,
            **texts,
            "vector": pyarrow.FixedSizeListArray.from_arrays(flat, width),
        }
        parquet.write_table(pyarrow.table(columns), file)
        return file.getvalue()


def require_format(path: Path) -> None:
    """Refuse a file of embeddings that cannot be written, before anything is computed."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: expected a file that ends in {' or '.join(FORMATS)}")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise MissingExtraError(f"{path}", extra="arrow")


def embed(
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
    on_progress: OnProgress | None = None,
) -> Embeddings:
    """Return the inputs of the classifier of a run's best head, one vector per graph (or node).

    Of several seeds it is the best by validation: the dimensions of different heads do not match,
    so that a mean would be meaningless. At link level a vector belongs to a node.

    Args:
        run: A finished run, or its folder.
        data: A data specification, or graphs.
        out: A file to write, ``.npz`` or ``.parquet``.

    All others are those of :func:`predict`.
    """
    if out is not None:
        require_format(Path(out))
    with _open(
        run,
        data,
        out,
        data_root=data_root,
        data_args=data_args,
        head=head,
        model=model,
        overwrite=overwrite,
        config=config,
        watched=("embedding", on_progress),
        loading={"checkpoint": checkpoint, "key_map": key_map, "trust": trust, "device": device},
    ) as opened:
        saved = opened.run.saved_head
        best = opened.predictor.heads.members[saved.members.index(saved.best)]
        assert isinstance(best, HeadMember)
        found = _embedded(opened, best, node_budget)
        name = opened.run.head if is_run(opened.run.folder) else saved.name
        which = f"vectors of `{name}`, fold {saved.best.fold}, seed {saved.best.seed}"
        found = replace(found, notes=[*opened.notes, *found.notes, which])
        if opened.write is not None:
            opened.write(found.to_bytes(Path(str(out)).suffix))
        return found


@torch.inference_mode()
def _embedded(opened: _Opened, member: HeadMember, node_budget: int) -> Embeddings:
    predictor = opened.predictor
    level: Level = "graph" if predictor.task.level == "graph" else "node"
    dataset = at_level(opened.dataset, level)
    node_budget, notes = predictor.prepare(dataset, node_budget)
    found = [
        _vectors(member, predictor.inputs(batch)).float().cpu().numpy()
        for batch in predictor.batches(dataset, node_budget, opened.on_progress)
    ]
    vectors = np.concatenate(found)  # [rows, width]
    ids = row_names(dataset.ids, dataset.label_ptr, level)
    require_finite("vector", vectors, ids, dataset)
    numbers = np.repeat(np.arange(len(dataset)), np.diff(dataset.label_ptr))  # [rows]
    smiles = dataset.smiles
    return Embeddings(
        ids=ids,
        vectors=vectors,
        rows=numbers if dataset.rows is None else dataset.rows[numbers],
        smiles=None if smiles is None else [smiles[number] for number in numbers.tolist()],
        notes=notes,
    )


def _vectors(member: HeadMember, inputs: HeadInputs) -> Tensor:
    """Return the inputs of a head's classifier: ``[rows, width]``."""
    head = member.network.head
    assert isinstance(head, Readout)
    history = member.prepare(inputs.history)  # type: ignore[arg-type]  # layers as captured
    read = head.forward if head.level == "link" else head.classifier_inputs
    rows: Tensor = read(
        history, inputs.batch, num_graphs=inputs.num_graphs, edge_index=inputs.edge_index
    )
    return rows


# --- a run on new data


@dataclass(frozen=True)
class _Opened:
    """A run loaded for prediction, the new data, and where the result is written."""

    run: Run
    predictor: Predictor
    dataset: GraphDataset
    #: Data arguments that were taken from the run, and what else to know.
    notes: list[str]
    #: Called with the nodes done and the nodes in all, if given.
    on_progress: OnProgress | None
    #: Writes the output file, if there is one.
    write: Callable[[bytes | Iterable[bytes]], None] | None


@contextmanager
def _open(
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
) -> Iterator[_Opened]:
    """Open a run on new data, refusing what cannot be used before anything slow is done.

    The arguments are those of :func:`predict`, and:

    Args:
        reading: How rows are read if there are many.
        watched: The label of a bar in a notebook, and ``on_progress``.
        loading: The other arguments of :func:`load`.
    """
    what, on_progress = watched
    with ExitStack() as stack:
        write = None
        if out is not None:
            clean = partial(remove_rows, rows_beside(out))
            writing = output_file(Path(out), overwrite=overwrite, config=config, clean=clean)
            write = stack.enter_context(writing)
        opened = Run.of(run).with_head(head)
        if not isinstance(model, nn.Module):
            model = opened.backbone.model.to_follow(model).spec  # refuses before data are loaded
        dataset, notes = _data_for(opened, data, data_root, data_args, reading)
        notes += _other_choice(opened)
        in_dim = int(dataset.graphs[0].num_node_features)
        predictor = load(opened, model=model, in_dim=in_dim, **loading)
        update = stack.enter_context(notebook_bar(what, watched=on_progress is not None))
        try:
            yield _Opened(opened, predictor, dataset, notes, on_progress or update, write)
        except (CaptureError, ModelError) as error:
            raise _other_width(opened, dataset, in_dim) or error from None


def _other_width(run: Run, dataset: GraphDataset, width: int) -> DataError | None:
    """Return why a pass failed, if the run was trained on another number of node features."""
    from ..caches.provenance import read_canary

    recorded = run.backbone.provenance
    if recorded is None or recorded.canary_sha256 is None:
        return None
    expected = read_canary(run.folder, recorded.canary_sha256).graph.num_node_features
    if width == expected:
        return None
    return DataError(
        f"{dataset.spec}: found {width} node features, expected {expected}, which the backbone of "
        f"{run.folder} reads"
    )


def _other_choice(run: Run) -> list[str]:
    """Return the verdict on a run as a note, if that is to use another of its readouts.

    Such as the frozen head of a run that was fine-tuned. Whoever has named a head is not told, nor
    whoever has an export, or results that cannot be read.
    """
    if run.readout is not None or not run.is_finished:
        return []
    try:
        chosen, verdict = run.head, run.verdict
    except HistographError:
        return []
    if verdict.decision != "use" or verdict.readout == chosen:
        return []
    return [f"{chosen} predicts, but the verdict on this run is: {verdict}"]


#: Data arguments that decide the features and labels of a graph. New data of the same kind as the
#: training data uses those of the run: other features would give plausible nonsense.
_TAKEN_ARGS = (*FEATURE_ARGS, *LEVEL_ARGS, "mol_features", "node_attr", "normalize_features")


def _data_for(
    run: Run,
    data: str | Path | GraphDataset | Iterable[Data],
    data_root: str | Path | None,
    data_args: Mapping[str, Any] | None,
    reading: Reading | None,
) -> tuple[GraphDataset, list[str]]:
    """Load the new data; return it, and a note on arguments taken from the training data."""
    if isinstance(data, GraphDataset):
        return data, []
    if not isinstance(data, (str, Path)):
        return from_graphs(data, reading=reading), []
    trained_on, given = run.backbone.data, data_args or {}
    taken = {}
    if _kind(str(data)) == _kind(trained_on.spec) and not any(n in given for n in _TAKEN_ARGS):
        taken = {name: trained_on.args[name] for name in _TAKEN_ARGS if name in trained_on.args}
    root = None if data_root is None else Path(data_root)
    named = DataSpec(str(data), {**taken, **given}, root, reading=reading)
    dataset = named.for_prediction(trained_on, run.stored_head["target_names"]).load()
    shown = ", ".join(f"{name}={value}" for name, value in taken.items())
    return dataset, [f"data arguments of the run: {shown}"] if taken else []


def _kind(spec: str) -> str:
    prefix, colon, _ = spec.partition(":")
    return prefix if colon else Path(spec).suffix
