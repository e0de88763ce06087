"""The cache stage: run a frozen model once and write down what every layer hands on.

    plan_cache    (cache_plan.py) find the layers, check parity, lay out the shards
    write_shards  run the model over the graphs of this job's shards (the rest are other jobs')
    join_shards   when every shard is there, score the model's own outputs, write the manifest

A killed job goes on where it stopped, and ends with the same bytes as one that was never killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from torch import nn
from torch_geometric.data import Data

from . import __version__
from .cache_plan import CacheOptions, CachePlan, plan_cache
from .capture import Capture
from .data import GraphDataset, from_graphs
from .errors import ConfigError, OutputExistsError
from .files import PARTIAL_SUFFIX, sha256_file, write_text
from .splits import PARTS, Splits, resolve_splits
from .storage import (
    Cache,
    DataSource,
    Manifest,
    ModelSource,
    ShardGraphs,
    ShardInfo,
    ShardWriter,
    existing_shard,
    shard_name,
    write_manifest,
)
from .storage.format import MANIFEST_NAME, SPLITS_NAME
from .tasks import Task

#: Called with the number of nodes done and the number of nodes in all.
ProgressCallback = Callable[[int, int], None]

#: The resolved configuration of the command, beside the shards.
CONFIG_NAME = "config.toml"


def write_shards(
    plan: CachePlan,
    folder: Path,
    *,
    part: tuple[int, int] = (0, 1),
    on_progress: ProgressCallback | None = None,
) -> list[ShardInfo | None]:
    """Write the shards of job ``i`` of ``n`` that are not there yet.

    Returns an entry per shard of the whole cache; None for those that other jobs still owe.
    """
    number, count = part
    labels = plan.dataset.labels()
    found = [
        existing_shard(folder, index, plan.layout, plan.hash, start, stop)
        for index, (start, stop) in enumerate(plan.shards)
    ]
    mine = [index for index in range(len(plan.shards)) if index % count == number]
    num_nodes = plan.dataset.num_nodes
    total = sum(int(num_nodes[slice(*plan.shards[index])].sum()) for index in mine)
    done = 0

    def advance(nodes: int) -> None:
        nonlocal done
        done += nodes
        if on_progress is not None:
            on_progress(done, total)

    with torch.inference_mode(), Capture(plan.model, plan.capture) as recorder:
        for index in mine:
            start, stop = plan.shards[index]
            if found[index] is not None:
                advance(int(num_nodes[start:stop].sum()))
                continue
            for leftover in folder.glob(f"{shard_name(index)}.*{PARTIAL_SUFFIX}"):
                leftover.unlink(missing_ok=True)
            graphs = _shard_graphs(plan.dataset, start, stop, labels)
            with ShardWriter(folder, index, plan.layout, plan.hash, graphs) as writer:
                for members in plan.batches(start, stop):
                    batch = plan.load(members)
                    captured = recorder.run(batch)
                    outputs = plan.outputs(captured.output, batch)
                    writer.append(len(members), captured.history, outputs)
                    advance(int(batch.num_nodes))
            found[index] = writer.info
    # Another job may have finished a shard meanwhile.
    return [
        info or existing_shard(folder, index, plan.layout, plan.hash, *plan.shards[index])
        for index, info in enumerate(found)
    ]


def _shard_graphs(dataset: GraphDataset, start: int, stop: int, labels: np.ndarray) -> ShardGraphs:
    graphs = dataset.graphs[start:stop]
    first_row, last_row = dataset.label_ptr[[start, stop]]
    return ShardGraphs(
        start=start,
        ids=dataset.ids[start:stop],
        num_nodes=dataset.num_nodes[start:stop],
        labels=labels[first_row:last_row],
        edge_index=[graph.edge_index for graph in graphs],
        edge_label_index=(
            [graph.edge_label_index for graph in graphs] if dataset.level == "link" else None
        ),
    )


def join_shards(plan: CachePlan, folder: Path, shards: Sequence[ShardInfo]) -> Cache:
    """Score the model's own outputs over all shards and write the manifest, which ends the work."""
    for leftover in folder.glob(f"*{PARTIAL_SUFFIX}"):
        leftover.unlink(missing_ok=True)
    manifest = Manifest(
        tool_version=__version__,
        weights_sha256=plan.weights_sha256,
        checkpoint=plan.provenance.checkpoint,
        model=ModelSource(plan.provenance.model_spec, dict(plan.provenance.model_args)),
        data=DataSource(
            spec=plan.dataset.spec,
            args=dict(plan.provenance.data_args),
            fingerprint=plan.dataset.fingerprint(),
            num_graphs=len(plan.dataset),
            num_nodes=int(plan.dataset.num_nodes.sum()),
        ),
        capture=plan.capture.to_json(),
        layout=plan.layout,
        plan_hash=plan.hash,
        splits_sha256=sha256_file(folder / SPLITS_NAME),
        own_metrics=None,
        no_metrics_because=plan.own.problem or "not scored yet",
        shards=tuple(shards),
    )
    if plan.task is not None and plan.own.problem is None:
        unscored = Cache(folder, manifest)
        outputs = unscored.outputs()
        assert outputs is not None  # the plan scores only what is stored
        scores = own_scores(
            plan.task,
            outputs,
            unscored.labels(),
            plan.splits,
            probabilities=plan.own.probabilities,
        )
        manifest = replace(manifest, own_metrics=scores, no_metrics_because=None)
    write_manifest(folder, manifest)
    return Cache.open(folder)


def own_scores(
    task: Task, outputs: np.ndarray, labels: np.ndarray, splits: Splits, *, probabilities: bool
) -> dict[str, Any]:
    """Score a model's own outputs: on all labelled rows, and on each part of each fold."""
    logits = task.logits(outputs) if probabilities else outputs  # [rows, output_width]
    return {
        "task": task.to_json(),
        "probabilities": probabilities,
        "all": task.scores(logits, labels),
        "folds": [
            {
                part: task.scores(logits[rows], labels[rows])
                for part, rows in zip(PARTS, fold.parts, strict=True)
            }
            for fold in splits.folds
        ],
    }


def write_cache(
    plan: CachePlan,
    out: str | Path,
    *,
    part: tuple[int, int] = (0, 1),
    overwrite: bool = False,
    config: Mapping[str, Any] | None = None,
    on_progress: ProgressCallback | None = None,
) -> Cache | None:
    """Write what is missing of a planned cache; None while other jobs still owe shards.

    Args:
        plan: From :func:`plan_cache`.
        out: Folder of the cache. One that a killed run left behind is completed.
        part: ``(i, n)``: this is job ``i`` of ``n``; whichever finishes last writes the manifest.
        overwrite: Replace another cache in that folder.
        config: The options this came from, saved beside the shards.
        on_progress: Called with the nodes done and the nodes of this job.
    """
    number, count = part
    if not 0 <= number < count:
        raise ConfigError(f"shard: found {number}/{count}, expected i/n with 0 <= i < n")
    folder = Path(out)
    complete = _open_folder(plan, folder, overwrite=overwrite)
    if complete is not None:
        return complete
    plan.splits.save(folder / SPLITS_NAME)
    if config is not None:
        write_text(folder / CONFIG_NAME, tomli_w.dumps(dict(config)))
    shards = write_shards(plan, folder, part=part, on_progress=on_progress)
    present = [shard for shard in shards if shard is not None]
    return join_shards(plan, folder, present) if len(present) == len(shards) else None


def _open_folder(plan: CachePlan, folder: Path, *, overwrite: bool) -> Cache | None:
    """Make the folder ready for writing; return the cache if it is complete already."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OutputExistsError(f"{folder}: found something that is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    ours = [path for path in folder.iterdir() if _is_ours(path.name)]
    if len(ours) < len(list(folder.iterdir())):
        raise OutputExistsError(f"{folder}: found files that are not a cache's; choose another -o")
    if overwrite:
        # The manifest first: without it the rest is no cache.
        for path in sorted(ours, key=lambda path: path.name != MANIFEST_NAME):
            path.unlink()
    elif (folder / MANIFEST_NAME).exists():
        found = Cache.open(folder)
        if found.manifest.plan_hash == plan.hash and found.splits == plan.splits:
            return found
        raise OutputExistsError(
            f"{folder}: found a cache of {found.manifest.data.spec} by weights "
            f"{found.manifest.weights_sha256[:12]} that this command would not give; "
            "choose another -o, or --overwrite"
        )
    return None


def _is_ours(name: str) -> bool:
    names = (MANIFEST_NAME, SPLITS_NAME, CONFIG_NAME)
    return name in names or name.endswith(PARTIAL_SUFFIX) or fnmatch(name, "shard-?????*.h5")


def cache(
    model: nn.Module,
    dataset: GraphDataset | Iterable[Data],
    out: str | Path,
    *,
    splits: Splits | str | None = None,
    device: str = "auto",
    part: tuple[int, int] = (0, 1),
    overwrite: bool = False,
    on_progress: ProgressCallback | None = None,
    **options: Any,
) -> Cache | None:
    """Run ``model`` once over ``dataset`` and cache every layer's activations.

    Args:
        model: Any trained module; it is put into ``eval()`` and not changed otherwise.
        dataset: A :class:`~histograph_post.data.GraphDataset`, a PyG data set or a list of graphs.
        out: Folder of the cache; a run that was killed goes on where it stopped.
        splits: Splits, or a specification such as ``"kfold:10"`` or a file; default: as the data
            comes, else stratified.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        part: ``(i, n)`` for job ``i`` of ``n``.
        overwrite: Replace another cache in that folder.
        on_progress: Called with the nodes done and the nodes in all.
        options: Fields of :class:`CacheOptions`.

    Returns:
        The opened cache; None while other jobs still owe shards.
    """
    if not isinstance(dataset, GraphDataset):
        dataset = from_graphs(dataset)
    if not isinstance(splits, Splits):
        splits = resolve_splits(dataset, splits)
    plan = plan_cache(model, dataset, splits, options=CacheOptions(**options), device=device)
    return write_cache(plan, out, part=part, overwrite=overwrite, on_progress=on_progress)
