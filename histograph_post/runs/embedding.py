"""Embedding: what a head reads out of graphs or nodes, before it is classified."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ..data import GraphDataset
from ..errors import ConfigError, DataError, MissingExtraError
from ..heads.base import Readout
from ..training.head_batches import HeadInputs
from ..utils import Level
from ..utils.files import write_bytes
from ..utils.machine import NODE_BUDGET
from .predicting import OpenedOnData, open_on_data
from .predictions import row_names
from .predictor import at_level
from .run import Run
from .saved_head import HeadMember

#: How files of vectors end.
FORMATS = (".npz", ".parquet")


@dataclass(frozen=True)
class Embeddings:
    """A vector per graph, or per node, with the names that predictions have."""

    #: Name of each row: the id of the graph, with the number of the node within it.
    ids: Sequence[str]
    #: ``[rows, width]``, float32.
    vectors: np.ndarray
    #: Source row of each graph (a line of a csv file), or its place: ``[rows]``.
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
    """Refuse a file of vectors that cannot be written, before anything is computed."""
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
    on_progress: Callable[[int, int], None] | None = None,
) -> Embeddings:
    """Return what a run's best head reads out of new graphs, one vector per graph (or node).

    Of several seeds it is the best by validation: vectors of different heads have nothing in
    common that a mean would keep. At link level a vector belongs to a node.

    Args:
        run: A finished run, or its folder.
        data: A data specification, or graphs.
        out: A file to write, ``.npz`` or ``.parquet``.
        data_root: See :func:`.predicting.predict`, as for all that follow.
        data_args: Arguments of the data.
        model: The backbone.
        head: Another readout of the run, or your own.
        checkpoint: The backbone's weights.
        key_map: Old weight names to new ones.
        trust: Unpickle a checkpoint that can run code.
        node_budget: A batch takes whole graphs up to this many nodes.
        device: Where to run.
        overwrite: Replace an existing file.
        config: The options this came from, saved beside the file.
        on_progress: Called with the nodes done and the nodes in all.
    """
    if out is not None:
        require_format(Path(out))
    with open_on_data(
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
        which = f"vectors of `{saved.name}`, fold {saved.best.fold}, seed {saved.best.seed}"
        found = replace(found, notes=[*opened.notes, *found.notes, which])
        opened.write(lambda: found.to_bytes(Path(str(out)).suffix))
        return found


@torch.inference_mode()
def _embedded(opened: OpenedOnData, member: HeadMember, node_budget: int) -> Embeddings:
    predictor = opened.predictor
    level: Level = "graph" if predictor.task.level == "graph" else "node"
    dataset = at_level(opened.dataset, level)
    node_budget, notes = predictor.prepare(dataset, node_budget)
    found = [
        _vectors(member, predictor.inputs(batch)).float().cpu().numpy()
        for batch in predictor.batches(dataset, node_budget, opened.on_progress)
    ]
    vectors = np.concatenate(found)  # [rows, width]
    counts = np.diff(dataset.label_ptr)  # [num_graphs]
    ids = row_names(dataset.ids, dataset.label_ptr, level)
    broken = ~np.isfinite(vectors).all(axis=1)  # [rows]
    if broken.any():
        raise DataError(
            f"{dataset.spec}: {ids[int(broken.argmax())]}: found a vector that is not finite "
            f"({int(broken.sum())} of {len(ids)} rows), expected numbers"
        )
    numbers = np.repeat(np.arange(len(dataset)), counts)  # [rows]
    smiles = dataset.smiles
    return Embeddings(
        ids=ids,
        vectors=vectors,
        rows=numbers if dataset.rows is None else dataset.rows[numbers],
        smiles=None if smiles is None else [smiles[number] for number in numbers.tolist()],
        notes=notes,
    )


def _vectors(member: HeadMember, inputs: HeadInputs) -> Tensor:
    """Return what a head reads out before its classifier: ``[rows, width]``."""
    head = member.network.head
    assert isinstance(head, Readout)
    history = member.prepare(inputs.history)  # type: ignore[arg-type]  # layers as captured
    read = head.forward if head.level == "link" else head.classifier_inputs
    rows: Tensor = read(
        history, inputs.batch, num_graphs=inputs.num_graphs, edge_index=inputs.edge_index
    )
    return rows
