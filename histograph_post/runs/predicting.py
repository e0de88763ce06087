"""Prediction: load what a run trained as one module, and use it on new graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from ..capture import Capture, check_parity
from ..data import DataSpec, GraphDataset, from_graphs
from ..data.batching import budget_batches, make_batch, to_device
from ..data.dataset import probe_graphs
from ..data.spec import FEATURE_ARGS, LEVEL_ARGS
from ..errors import ConfigError, DataError
from ..heads.base import Readout
from ..models.model_call import given_to
from ..tasks import has_labels
from ..training.head_batches import HeadInputs
from ..utils import Level
from ..utils.files import config_beside, require_free, write_config, write_text
from ..utils.machine import NODE_BUDGET, resolve_device
from ..utils.notebooks import notebook_bar
from .predictions import Predictions, member_spread, row_names
from .run import Run
from .saved_head import SavedHead

#: Data arguments that decide what a model sees of a graph and is asked about it. New data of the
#: kind that the head was trained on takes them from there: other features give plausible nonsense.
_TAKEN_ARGS = (*FEATURE_ARGS, *LEVEL_ARGS, "mol_features", "node_attr", "normalize_features")


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
    and so is code that gives other activations on the run's canary graph; a file that changed while
    its activations did not is among the ``notes`` of what is returned.

    Args:
        run: A finished run, or its folder.
        model: The backbone itself, for one that was handed over in memory (it is put into
            ``eval()`` and onto the device; a run that trained it puts its weights into a copy),
            or its specification, such as ``my_model.py:Net``; not needed for a built-in model.
        head: Another readout of the run than the one it predicts with, by name; or your own, as
            ``my_head.py:MyHead`` or the class.
        checkpoint: The backbone's weights; by default where the cache had them from.
        key_map: TOML or JSON: old weight names to new ones; by default the cache's.
        trust: Unpickle a checkpoint that can run code.
        in_dim: Node features, for a model whose constructor insists on them.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
    """
    opened, where = Run.of(run).with_head(head), resolve_device(device)
    saved = opened.saved_head  # before a checkpoint is looked for
    backbone, notes = opened.backbone.build(
        model=model,
        checkpoint=None if checkpoint is None else Path(checkpoint),
        key_map=None if key_map is None else Path(key_map),
        trust=trust,
        in_dim=in_dim,
    )
    return Predictor(backbone, saved, notes).to(where).eval()


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
    on_progress: Callable[[int, int], None] | None = None,
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
        on_progress: Called with the nodes done and the nodes in all.
    """
    target = None if out is None else Path(out)
    if target is not None:
        require_free(target, overwrite=overwrite)
        if config is not None:
            require_free(config_beside(target), overwrite=overwrite)
    opened = Run.of(run).with_head(head)
    if not isinstance(model, nn.Module):
        model = opened.backbone.model.to_follow(model).spec  # refuses before data are loaded
    notes: list[str] = []
    if isinstance(data, (str, Path)):
        taken = _taken_args(opened.backbone.data, str(data), data_args or {})
        if taken:
            shown = ", ".join(f"{name}={value}" for name, value in taken.items())
            notes = [f"data arguments of the run: {shown}"]
        root = None if data_root is None else Path(data_root)
        named = DataSpec(str(data), {**taken, **(data_args or {})}, root)
        data = named.for_prediction(opened.backbone.data, opened.stored_head["target_names"]).load()
    elif not isinstance(data, GraphDataset):
        data = from_graphs(data)
    predictor = load(
        opened,
        model=model,
        checkpoint=checkpoint,
        key_map=key_map,
        trust=trust,
        in_dim=int(data.graphs[0].num_node_features),
        device=device,
    )
    with notebook_bar("predicting", watched=on_progress is not None) as update:
        on_progress = on_progress or update
        found = predictor.predict(data, node_budget=node_budget, on_progress=on_progress)
    found = replace(found, notes=[*notes, *found.notes])
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if config is not None:
            write_config(config_beside(target), config)
        write_text(target, found.to_csv())
    return found


def _taken_args(trained_on: DataSpec, spec: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data arguments that new data of the same kind takes over from the run."""
    if _kind(spec) != _kind(trained_on.spec) or any(name in given for name in _TAKEN_ARGS):
        return {}
    return {name: trained_on.args[name] for name in _TAKEN_ARGS if name in trained_on.args}


def _kind(spec: str) -> str:
    prefix, colon, _ = spec.partition(":")
    return prefix if colon else Path(spec).suffix


class Predictor(nn.Module):
    """A frozen backbone with the trained heads of a run in place of its own readout.

    Called with a batch of graphs it returns ``[rows, out_dim]``: a row per graph, per node, or per
    pair of ``edge_label_index``, whatever the heads were trained for. Outputs are the mean over the
    run's heads: logits, calibrated if the run has a temperature, or values in the units of the
    labels. The backbone runs once for all heads. Gradients flow through unless they are turned off.

    Args:
        backbone: The model whose activations the heads were trained on.
        saved: The heads.
        notes: What there is to know about the backbone.
    """

    def __init__(self, backbone: nn.Module, saved: SavedHead, notes: Sequence[str] = ()) -> None:
        super().__init__()
        self.notes = tuple(notes)
        self.backbone = backbone
        self.capture = Capture(backbone, saved.backbone.capture)
        self.heads = saved.build()
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
        if not isinstance(batch, Batch):
            batch = Batch.from_data_list([batch])
        pairs = batch.edge_label_index if self.task.level == "link" else None
        dtype = next(self.heads.parameters()).dtype
        history = self.capture.run(batch).history  # L of [num_nodes, D_l]
        return self.heads.each(
            HeadInputs(
                history=[layer.to(dtype) for layer in history],
                batch=batch.batch,
                num_graphs=int(batch.num_graphs),
                edge_index=batch.edge_index,
                pairs=pairs,
            )
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
    ) -> Predictions:
        """Predict every graph of a data set in one pass, and score where there are labels.

        Args:
            data: A data set, a PyG data set or a list of graphs; labels are optional.
            node_budget: A batch takes whole graphs up to this many nodes.
            on_progress: Called with the nodes done and the nodes in all.
        """
        if node_budget < 1:
            raise ConfigError(f"node_budget: found {node_budget}, expected 1 or more")
        given = data if isinstance(data, GraphDataset) else from_graphs(data)
        dataset = _at_level(given, self.task.level)
        self.eval()
        notes = [*self.notes, *given.notes, *self._not_passed(dataset)]
        if node_budget > 1 and not self._keeps_graphs_apart(dataset):
            # The cache was made that way too: it refuses such a model in any other.
            node_budget = 1
            notes.append("the backbone mixes the graphs of a batch: predicting one at a time")
        # [rows, out_dim] and [rows, columns]
        outputs, spread = self._outputs(dataset, node_budget, on_progress)
        pairs = None
        if self.task.level == "link":
            pairs = torch.cat([graph.edge_label_index for graph in dataset.graphs], 1)  # [2, rows]
        ids = row_names(dataset.ids, dataset.label_ptr, self.task.level, pairs)
        broken = ~np.isfinite(outputs).all(axis=1)  # [rows]
        if broken.any():
            raise DataError(
                f"{dataset.spec}: {ids[int(broken.argmax())]}: found a prediction that is not "
                f"finite ({int(broken.sum())} of {len(ids)} rows), expected numbers"
            )
        rows = np.arange(len(dataset)) if dataset.rows is None else dataset.rows
        predictions = Predictions(
            task=self.task,
            target_names=self.target_names,
            ids=ids,
            rows=np.repeat(rows, np.diff(dataset.label_ptr)),
            outputs=outputs,
            spread=spread,
            notes=notes,
            smiles=None if dataset.smiles is None else _repeated(dataset.smiles, dataset.label_ptr),
            table=dataset.table if self.task.level == "graph" else None,
        )
        return self._scored(predictions, given)

    @torch.inference_mode()
    def _outputs(
        self,
        dataset: GraphDataset,
        node_budget: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the outputs, and how much the heads differ; None of a single one."""
        found: list[np.ndarray] = []
        spreads: list[np.ndarray] = []
        done, total = 0, int(dataset.num_nodes.sum())
        with self.capture:
            for members in budget_batches(dataset.num_nodes, node_budget):
                graphs = dataset.graphs[members.start : members.stop]
                batch = to_device(make_batch(graphs), self.device)
                each = self.each(batch)  # [heads, rows, out_dim]
                found.append(each.mean(dim=0).cpu().numpy())
                spread = member_spread(self.task, each.cpu().numpy())  # [rows, columns]
                if spread is not None:
                    spreads.append(spread)
                done += int(batch.num_nodes)
                if on_progress is not None:
                    on_progress(done, total)
        return np.concatenate(found), np.concatenate(spreads) if spreads else None

    def _not_passed(self, dataset: GraphDataset) -> list[str]:
        """Say what of the data the backbone could take, and was cached without."""
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
            reason = f"found {_described(*found)}, expected {_described(*expected)}"
            return replace(predictions, notes=[*notes, f"labels not scored: {reason}"])
        try:
            scores = self.task.scores(predictions.outputs, labels)
        except DataError as error:  # a class that the head does not know
            return replace(predictions, notes=[*notes, f"labels not scored: {error}"])
        if dataset.fingerprint() == self._trained_on:
            notes.append("these are the data of the run: the scores include its training rows")
        return replace(predictions, labels=labels, scores=scores, notes=notes)


def _repeated(names: Sequence[str], label_ptr: np.ndarray) -> list[str]:
    """Return the name of each label row's graph."""
    return [name for name, rows in zip(names, np.diff(label_ptr), strict=True) for _ in range(rows)]


def _described(level: str, names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{level} labels {shown}"


def _at_level(dataset: GraphDataset, level: Level) -> GraphDataset:
    """Return the data with the rows that the head predicts; labels say nothing about that."""
    if level == "link" and not all("edge_label_index" in graph for graph in dataset.graphs):
        raise DataError(f"{dataset.spec}: found no edge_label_index, expected the pairs to score")
    return dataset if dataset.level == level else replace(dataset, level=level)
