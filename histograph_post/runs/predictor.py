"""The backbone and heads of a run, loaded as one module that predicts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from .. import __version__
from ..capture import Capture, check_parity
from ..capture.edge_blocks import MOST_EDGES, edges_at_once, edges_in_blocks
from ..data import GraphDataset, from_graphs
from ..data.batching import batch_of, budget_batches, make_batch, probe_graphs, to_device
from ..data.row_blocks import StreamedGraphs
from ..errors import ConfigError, DataError
from ..heads.base import Readout
from ..heads.option_checks import own_code
from ..models.checkpoints import weights_sha256
from ..models.model_call import given_to
from ..tasks import has_labels
from ..training.batches import HeadInputs
from ..utils import Level
from ..utils.files import errors_naming
from ..utils.machine import NODE_BUDGET, resolve_device
from ..utils.text import listed
from .predictions import Predictions, member_spread, row_names, spread_columns
from .run import Run
from .saved_head import SavedHead


def load(
    run: str | Path | Run,
    *,
    model: nn.Module | str | None = None,
    head: str | type[Readout] | None = None,
    checkpoint: str | Path | None = None,
    key_map: str | Path | None = None,
    trust: bool = False,
    in_dim: int | None = None,
    device: str = "auto",
) -> Predictor:
    """Load a run's backbone and heads as one module that maps a batch of graphs to outputs.

    The backbone is rebuilt as the cache's command built it. If it is code of yours, name it: a run
    does not decide what code runs. Other weights than those the head was trained on are refused,
    and so are classes that were edited, or give other activations on the run's canary graph.

    Args:
        run: A finished run, or its folder.
        model: The backbone itself, for one that was handed over in memory (it is put into
            ``eval()`` and onto the device; a run that trained it puts its weights into a copy),
            or its specification, such as ``my_model.py:Net``; not needed for a built-in model.
        head: Another readout of the run than the one it predicts with, by name; or your own, as
            ``my_head.py:MyHead`` or the class.
        checkpoint: The backbone's weights; by default those that the cache was made with.
        key_map: TOML or JSON: old weight names to new ones; by default the cache's.
        trust: Unpickle a checkpoint that can run code.
        in_dim: Node features, for a model whose constructor insists on them.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
    """
    opened, where = Run.of(run).with_head(head), resolve_device(device)
    saved = opened.saved_head  # before a checkpoint is looked for
    backbone = opened.backbone.build(
        model=model,
        checkpoint=None if checkpoint is None else Path(checkpoint),
        key_map=None if key_map is None else Path(key_map),
        trust=trust,
        in_dim=in_dim,
    )
    return Predictor(backbone, saved).to(where).eval()


class Predictor(nn.Module):
    """A frozen backbone with the trained heads of a run in place of its own readout.

    Called with a batch of graphs it returns ``[rows, out_dim]``: a row per graph, per node, or per
    pair of ``edge_label_index``, whatever the heads were trained for. Outputs are the mean over the
    run's heads: logits, calibrated if the run has a temperature, or values in the units of the
    labels. The backbone runs once for all heads. Gradients flow through unless they are turned off.

    Args:
        backbone: The model whose activations the heads were trained on.
    """

    def __init__(self, backbone: nn.Module, saved: SavedHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.capture = Capture(backbone, saved.backbone.capture)
        self.heads = saved.build()
        self._readout = saved.info.load()
        self.task = saved.task
        self.target_names = saved.target_names
        self._trained_on = saved.backbone.data.fingerprint

    @property
    def device(self) -> torch.device:
        """Where the heads are."""
        return next(self.heads.parameters()).device

    def forward(self, batch: Batch | Data) -> Tensor:
        """Return the outputs for the graphs of a batch: ``[rows, out_dim]``."""
        return self.each(batch).mean(dim=0)

    def each(self, batch: Batch | Data) -> Tensor:
        """Return the outputs of every head, whose mean counts: ``[heads, rows, out_dim]``."""
        return self.heads.each(self.inputs(batch))

    def inputs(self, batch: Batch | Data) -> HeadInputs:
        """Run the backbone; return what the heads read of a batch, layers as captured."""
        if not isinstance(batch, Batch):
            batch = Batch.from_data_list([batch])
        pairs = batch.get("edge_label_index") if self.task.level == "link" else None
        dtype = next(self.heads.parameters()).dtype
        history = self.capture.run(batch).history  # L of [num_nodes, D_l]
        return HeadInputs(
            history=[layer.to(dtype) for layer in history],
            batch=batch.batch,
            num_graphs=int(batch.num_graphs),
            edge_index=batch.edge_index,
            pairs=pairs,
        )

    def probabilities(self, batch: Batch | Data) -> Tensor:
        """Return probabilities, or the values of a regression: ``[rows, out_dim]``."""
        return self.task.probabilities(self(batch))

    def predict(
        self,
        data: GraphDataset | Iterable[Data],
        *,
        node_budget: int = NODE_BUDGET,
        on_progress: Callable[[int, int], None] | None = None,
        kept: Path | None = None,
    ) -> Predictions:
        """Predict every graph of a data set in one pass, and score where there are labels.

        Args:
            data: A data set, a PyG data set or a list of graphs; labels are optional.
            node_budget: A batch takes whole graphs up to this many nodes.
            on_progress: Called with the nodes done and the nodes in all.
            kept: Folder for the predictions so far, if there are many, to resume after a kill.
        """
        given = data if isinstance(data, GraphDataset) else from_graphs(data)
        dataset = at_level(given, self.task.level)
        node_budget, notes = self.prepare(dataset, node_budget)
        earlier = None
        if kept is not None and isinstance(dataset.graphs, StreamedGraphs):
            earlier = self._kept(dataset, node_budget, kept)
        # [rows, out_dim] and [rows, columns]
        outputs, spread = self._outputs(dataset, node_budget, on_progress, earlier)
        pairs = None
        if self.task.level == "link":
            pairs = torch.cat([graph.edge_label_index for graph in dataset.graphs], 1)  # [2, rows]
        whole_graphs = self.task.level == "graph"  # one row each: nothing is copied
        ids, smiles = dataset.ids, dataset.smiles
        if not whole_graphs:
            ids = row_names(ids, dataset.label_ptr, self.task.level, pairs)
            if smiles is not None:
                smiles = np.repeat(np.array(smiles, object), np.diff(dataset.label_ptr)).tolist()
        require_finite("prediction", outputs, ids, dataset)
        rows = np.arange(len(dataset)) if dataset.rows is None else dataset.rows
        predictions = Predictions(
            task=self.task,
            target_names=self.target_names,
            ids=ids,
            rows=np.repeat(rows, np.diff(dataset.label_ptr)),
            outputs=outputs,
            spread=spread,
            notes=notes,
            smiles=smiles,
            table=dataset.table if whole_graphs else None,
        )
        return self._scored(predictions, given)

    def prepare(self, dataset: GraphDataset, node_budget: int) -> tuple[int, list[str]]:
        """Return the node budget of a batch, and notes on the data and the pass."""
        if node_budget < 1:
            raise ConfigError(f"node_budget: found {node_budget}, expected 1 or more")
        self.eval()
        notes = [*dataset.notes, *self._not_passed(dataset)]
        if node_budget > 1 and not self._keeps_graphs_apart(dataset):
            # As in the cache, which refuses such a model with a larger budget.
            notes.append("the backbone mixes the graphs of a batch: predicting one at a time")
            return 1, notes
        return node_budget, notes

    def batches(
        self,
        dataset: GraphDataset,
        node_budget: int,
        on_progress: Callable[[int, int], None] | None,
        first: int = 0,
    ) -> Iterator[Batch]:
        """Yield the graphs in batches, on the device, while layers are recorded.

        Batches before the graph ``first``, the first one of a batch, are skipped.
        """
        done, total = int(dataset.num_nodes[:first].sum()), int(dataset.num_nodes.sum())
        with edges_in_blocks(self.backbone, self._edges_at_once(dataset)), self.capture:
            for members in budget_batches(dataset.num_nodes, node_budget):
                if members.start < first:
                    continue
                batch = to_device(batch_of(dataset.graphs, members), self.device)
                yield batch
                done += int(batch.num_nodes)
                if on_progress is not None:
                    on_progress(done, total)

    @torch.inference_mode()
    def _outputs(
        self,
        dataset: GraphDataset,
        node_budget: int,
        on_progress: Callable[[int, int], None] | None,
        kept: KeptOutputs | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the outputs, and their spread over heads; None for a single head."""
        first = 0
        if kept is not None:
            stops = [members.stop for members in budget_batches(dataset.num_nodes, node_budget)]
            first = max((stop for stop in stops if stop <= len(kept)), default=0)
            kept.cut(first)  # to whole batches
        found: list[np.ndarray] = []
        spreads: list[np.ndarray] = []
        for batch in self.batches(dataset, node_budget, on_progress, first):
            with own_code(self._readout):
                each = self.each(batch).cpu()  # [heads, rows, out_dim]
            outputs, spread = each.mean(dim=0).numpy(), member_spread(self.task, each.numpy())
            if kept is not None:
                kept.append(outputs, spread)
                continue
            found.append(outputs)
            spreads += [] if spread is None else [spread]
        if kept is not None:
            return kept.read()
        return np.concatenate(found), np.concatenate(spreads) if spreads else None

    def _kept(self, dataset: GraphDataset, node_budget: int, folder: Path) -> KeptOutputs:
        """Return what an earlier pass of the same heads over the same data has predicted."""
        spread_dim = len(spread_columns(self.task, self.target_names))
        return KeptOutputs(
            folder,
            f"{__version__} {dataset.fingerprint()} {weights_sha256(self.state_dict())} "
            f"{self.heads.temperature} {node_budget} {self.device.type}",
            out_dim=self.task.out_dim,
            spread_dim=spread_dim if len(self.heads.members) > 1 else 0,
        )

    def _edges_at_once(self, dataset: GraphDataset) -> int | None:
        """Return how many edges the backbone processes at a time; None for all of them."""
        edges = int(dataset.num_edges.max())
        if edges <= MOST_EDGES:
            return None
        probe = to_device(make_batch(probe_graphs(dataset, whole=False)), self.device)
        sizes = {"num_nodes": int(dataset.num_nodes.max()), "num_edges": edges}
        return edges_at_once(self.backbone, self.capture.plan, probe, **sizes)

    def _not_passed(self, dataset: GraphDataset) -> list[str]:
        """Return a note on inputs that the backbone could take, but was cached without."""
        call = self.capture.plan.call
        could = given_to(self.backbone, make_batch(dataset.graphs[:1]), call.no_pass)
        more = [] if call.given is None else [name for name in could if name not in call.given]
        if not more:
            return []
        return [f"{', '.join(more)} of the data not passed: the backbone was cached without"]

    def _keeps_graphs_apart(self, dataset: GraphDataset) -> bool:
        """Whether a few graphs, spread over the data, have the same history alone and together."""
        if len(dataset) == 1:
            return True
        probed = check_parity(self.backbone, self.capture.plan, probe_graphs(dataset))
        return probed.batch_independent

    def _scored(self, predictions: Predictions, dataset: GraphDataset) -> Predictions:
        """Add labels and scores where the data has labels of what the head predicts."""
        labels = dataset.labels()  # [rows, targets]
        if not has_labels(labels):
            return predictions
        notes = list(predictions.notes)
        found = (dataset.level, tuple(dataset.target_names))
        expected = (self.task.level, tuple(self.target_names))
        if found != expected:
            reason = f"found {_labels(*found)}, expected {_labels(*expected)}"
            return replace(predictions, notes=[*notes, f"labels not scored: {reason}"])
        try:
            scores = self.task.scores(predictions.outputs, labels)
        except DataError as error:  # a class that the head was not trained on
            return replace(predictions, notes=[*notes, f"labels not scored: {error}"])
        if dataset.fingerprint() == self._trained_on:
            notes.append("these are the data of the run: the scores include its training rows")
        return replace(predictions, labels=labels, scores=scores, notes=notes)


def require_finite(
    what: str, values: np.ndarray, ids: Sequence[str], dataset: GraphDataset
) -> None:
    """Refuse rows ``[rows, columns]`` that are not finite, naming the first of them."""
    broken = ~np.isfinite(values).all(axis=1)  # [rows]
    if broken.any():
        raise DataError(
            f"{dataset.spec}: {ids[int(broken.argmax())]}: found a {what} that is not finite "
            f"({int(broken.sum())} of {len(ids)} rows), expected numbers"
        )


def _labels(level: str, names: tuple[str, ...]) -> str:
    return f"{level} labels {listed(names)}"


def at_level(dataset: GraphDataset, level: Level) -> GraphDataset:
    """Return the data with the rows that the head predicts, whatever their labels are."""
    if level == "link" and not all("edge_label_index" in graph for graph in dataset.graphs):
        raise DataError(f"{dataset.spec}: found no edge_label_index, expected the pairs to score")
    return dataset if dataset.level == level else replace(dataset, level=level)


class KeptOutputs:
    """The predictions so far, in a file, so that a killed prediction can be resumed.

    The file has float64 rows in the order of the graphs, and is named by the hash of all that they
    depend on. It is removed once the output is written.

    Args:
        about: All that the outputs depend on.
        out_dim: Columns of the outputs.
        spread_dim: Columns of the spread over heads; 0 for a single head.
    """

    def __init__(self, folder: Path, about: str, out_dim: int, spread_dim: int) -> None:
        key = hashlib.sha256(f"{about} {out_dim} {spread_dim}".encode()).hexdigest()
        self.path = folder / f"rows-{key[:16]}.outputs"
        self._widths = (out_dim, spread_dim)
        self._row_bytes = 8 * (out_dim + spread_dim)
        folder.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def __len__(self) -> int:
        return self.path.stat().st_size // self._row_bytes

    def cut(self, rows: int) -> None:
        """Keep so many rows, dropping the rest, such as part of a batch."""
        with self.path.open("r+b") as file:
            file.truncate(rows * self._row_bytes)

    def append(self, outputs: np.ndarray, spread: np.ndarray | None) -> None:
        """Add the rows of a batch: ``[rows, out_dim]`` and ``[rows, spread_dim]``."""
        parts = [outputs] if spread is None else [outputs, spread]
        with errors_naming(self.path), self.path.open("ab") as file:
            file.write(np.concatenate(parts, axis=1, dtype="<f8").tobytes())

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the outputs, as float32 as they were computed, and their spread."""
        found = np.fromfile(self.path, "<f8").reshape(-1, sum(self._widths))
        outputs, spread = np.split(found, [self._widths[0]], axis=1)
        return outputs.astype(np.float32), spread if self._widths[1] else None
