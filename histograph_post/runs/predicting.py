"""Prediction: load what a run trained, and use it on new graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch_geometric.data import Data

from ..data import GraphDataset, from_graphs, load_data
from ..data.arguments import FEATURE_ARGS, LEVEL_ARGS
from ..models import load_into, read_checkpoint, read_key_map
from ..utils.devices import resolve_device
from ..utils.files import config_beside, require_free, write_config, write_text
from ..utils.memory import NODE_BUDGET
from .predictions import Predictions
from .predictor import Predictor
from .run import Run
from .saved_backbone import check_backbone
from .saved_head import SavedHead

#: Data arguments that decide what a model sees of a graph and is asked about it. New data of the
#: kind that the head was trained on takes them from there: other features give plausible nonsense.
_TAKEN_ARGS = (*FEATURE_ARGS, *LEVEL_ARGS, "mol_features", "node_attr", "normalize_features")


def load(
    run: str | Path | Run,
    *,
    model: nn.Module | str | None = None,
    checkpoint: str | Path | None = None,
    key_map: str | Path | None = None,
    trust: bool = False,
    in_dim: int | None = None,
    device: str = "auto",
) -> Predictor:
    """Load a run's backbone and head as one module that maps a batch of graphs to outputs.

    The backbone is rebuilt as the cache's command built it. If it is code of yours, name it: a run
    does not decide what code runs. Other weights than those the head was trained on are refused.

    Args:
        run: A finished run, or its folder.
        model: The backbone itself, for one that was handed over in memory (it is put into
            ``eval()`` and onto the device; a run that trained it puts its weights into a copy),
            or its specification, such as ``my_model.py:Net``; not needed for a built-in model.
        checkpoint: The backbone's weights; by default where the cache had them from.
        key_map: TOML or JSON: old weight names to new ones; by default the cache's.
        trust: Unpickle a checkpoint that can run code.
        in_dim: Node features, for a model whose constructor insists on them.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
    """
    saved = SavedHead.read(run)
    where = resolve_device(device)
    file = None if checkpoint is None else Path(checkpoint)
    renamed = None if key_map is None else Path(key_map)
    if isinstance(model, nn.Module):
        backbone = model
        if file is None and saved.backbone.in_run:
            backbone, file = copy.deepcopy(model), saved.backbone.find_checkpoint()
        if file is not None:
            names = None if renamed is None else read_key_map(renamed)
            load_into(backbone, read_checkpoint(file, trust=trust), key_map=names)
        check_backbone(saved.backbone, backbone, where=str(file or type(backbone).__name__))
    else:
        backbone = saved.backbone.build(
            model=model, checkpoint=file, key_map=renamed, trust=trust, in_dim=in_dim
        )
    return Predictor(backbone, saved).to(where).eval()


def predict(
    run: str | Path | Run,
    data: str | Path | GraphDataset | Iterable[Data],
    out: str | Path | None = None,
    *,
    data_root: str | Path | None = None,
    data_args: Mapping[str, Any] | None = None,
    model: nn.Module | str | None = None,
    checkpoint: str | Path | None = None,
    key_map: str | Path | None = None,
    trust: bool = False,
    node_budget: int = NODE_BUDGET,
    device: str = "auto",
    overwrite: bool = False,
    config: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Predictions:
    """Predict new graphs with a run's head, in one pass; labels are optional.

    Args:
        run: A finished run, or its folder.
        data: A data specification, or graphs.
        out: A csv file to write.
        data_root: Offline copies of benchmark data.
        data_args: Arguments of the data. Those on node features and links are by default the ones
            of the data the head was trained on, if this is data of the same kind.
        model: See :func:`load`, as for ``checkpoint``, ``key_map``, ``trust`` and ``device``.
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
    saved = SavedHead.read(run)
    if not isinstance(model, nn.Module):
        model = saved.backbone.model_spec(model)
    notes: list[str] = []
    if isinstance(data, (str, Path)):
        taken = _taken_args(saved, str(data), data_args or {})
        if taken:
            shown = ", ".join(f"{name}={value}" for name, value in taken.items())
            notes = [f"data arguments of the run: {shown}"]
        root = None if data_root is None else Path(data_root)
        data = load_data(str(data), root=root, args={**taken, **(data_args or {})})
    elif not isinstance(data, GraphDataset):
        data = from_graphs(data)
    predictor = load(
        run,
        model=model,
        checkpoint=checkpoint,
        key_map=key_map,
        trust=trust,
        in_dim=int(data.graphs[0].num_node_features),
        device=device,
    )
    found = predictor.predict(data, node_budget=node_budget, on_progress=on_progress)
    found = replace(found, notes=[*notes, *found.notes])
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if config is not None:
            write_config(config_beside(target), config)
        write_text(target, found.to_csv())
    return found


def _taken_args(saved: SavedHead, spec: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data arguments that new data of the same kind takes over from the run."""
    if _kind(spec) != _kind(saved.backbone.data) or any(name in given for name in _TAKEN_ARGS):
        return {}
    recorded = saved.backbone.data_args
    return {name: recorded[name] for name in _TAKEN_ARGS if name in recorded}


def _kind(spec: str) -> str:
    prefix, colon, _ = spec.partition(":")
    return prefix if colon else Path(spec).suffix
