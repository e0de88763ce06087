"""The cache stage: run a frozen model once and store the activations of every layer.

    plan_cache    (planning.py) find the layers, check parity, lay out the shards
    write_shards  run the model over the graphs of this job's shards, while a thread (blocks.py)
                  writes
    join_shards   once every shard is there, score the model's own outputs, write the manifest

A killed job resumes where it stopped, and ends with the same bytes as one that was never killed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from .. import __version__
from ..capture.passes import repeatable
from ..data import DataSpec, GraphDataset, from_graphs
from ..data.row_blocks import StreamedGraphs
from ..data.spec import OnProgress, Reading
from ..data.streaming import remove_rows, rows_beside
from ..errors import CaptureError, ConfigError, OutputExistsError
from ..models import ModelSpec
from ..models.checkpoints import weights_sha256
from ..splits import PARTS, Splits
from ..tasks import Task
from ..utils.files import (
    config_text,
    sha256_file,
    to_json,
    write_bytes,
    write_text,
)
from ..utils.outputs import OutputFolder
from ..utils.text import notebook_bar
from .blocks import ShardGraphs, ShardThread
from .folder import find_shard, open_folder
from .layout import ShardInfo
from .manifest import (
    CANARY_NAME,
    CONFIG_NAME,
    MOLECULES_NAME,
    SPLITS_NAME,
    Manifest,
    Provenance,
    is_of_a_cache,
    write_manifest,
)
from .planning import CachePlan, choose_splits, plan_cache
from .probing import CacheOptions
from .reader import Cache
from .writer import ShardWriter


def write_shards(
    plan: CachePlan,
    folder: Path,
    found: Sequence[ShardInfo | None],
    *,
    mine: range,
    on_progress: OnProgress = None,
) -> list[ShardInfo | None]:
    """Write the missing shards of a job, whose graphs are those of the plan.

    ``found`` has an entry per shard of the whole cache, None for those that are missing; so does
    the result, where None is a shard that another job has not written yet.
    """
    there = {index: info.num_nodes for index in mine if (info := found[index]) is not None}
    missing = {index: plan.bounds(index) for index in mine if index not in there}
    num_nodes = plan.dataset.num_nodes
    total = sum(int(num_nodes[slice(*each)].sum()) for each in missing.values())
    total += sum(there.values())
    done = 0

    def advance(nodes: int) -> None:
        nonlocal done
        done += nodes
        if on_progress is not None:
            on_progress(done, total)

    # Shards that are there already count as done before the clock starts.
    advance(sum(there.values()))
    with (
        ShardThread(plan) as thread,
        torch.inference_mode(),
        repeatable(plan.device),
        plan.recording() as recorder,
    ):
        for index, (start, stop) in missing.items():
            graphs = _shard_graphs(plan, index)
            writer = ShardWriter(folder, index, plan.layout, plan.hash, graphs)
            if start == stop:  # no row of a table has a graph
                width = plan.layout.output_width
                outputs = None if width is None else torch.empty(0, width)
                thread.write(writer, writer.block(range(0), thread.memory), outputs)
            for members in plan.batches(start, stop):
                batch = plan.load(members)
                graphs_of_shard = range(members.start - start, members.stop - start)
                block = writer.block(graphs_of_shard, thread.memory)
                captured = recorder.run(batch, block.put)
                thread.write(writer, block, plan.outputs(captured.output, batch))
                advance(int(batch.num_nodes))
    if weights_sha256(plan.model.state_dict()) != plan.weights_sha256:
        raise CaptureError(
            "frozen: the model changed its own parameters or buffers while it ran in eval() mode, "
            "so its activations depend on the order of the graphs; expected them to stay as loaded"
        )
    # Another job may have finished a shard meanwhile.
    return [
        info or thread.infos.get(index) or find_shard(plan, folder, index)
        for index, info in enumerate(found)
    ]


def _shard_graphs(plan: CachePlan, index: int) -> ShardGraphs:
    dataset = plan.dataset
    start, stop = plan.bounds(index)
    first_row, stop_row = dataset.label_ptr[[start, stop]]

    def pairs(name: str) -> Iterator[Tensor]:
        for members in plan.batches(start, stop):  # few at a time: they may stay on disk
            if isinstance(dataset.graphs, StreamedGraphs):
                yield from dataset.graphs.columns(members, name)[name]
            else:
                yield from (graph[name] for graph in dataset.graphs[members.start : members.stop])

    return ShardGraphs(
        start=plan.shards[index][0],
        ids=dataset.ids[start:stop],
        num_nodes=dataset.num_nodes[start:stop],
        labels=plan.labels[first_row:stop_row],
        edge_index=pairs("edge_index"),
        edge_label_index=pairs("edge_label_index") if dataset.level == "link" else (),
    )


def join_shards(plan: CachePlan, folder: Path, shards: Sequence[ShardInfo]) -> None:
    """Score the model's own outputs over all shards, and complete the cache with its manifest."""
    assert isinstance(plan.splits, Splits)  # all graphs are known
    named = plan.model_spec
    stops = np.cumsum([shard.stop - shard.start for shard in shards]).tolist()
    placed = [
        replace(shard, start=stop - (shard.stop - shard.start), stop=stop)
        for shard, stop in zip(shards, stops, strict=True)
    ]
    manifest = Manifest(
        tool_version=__version__,
        weights_sha256=plan.weights_sha256,
        checkpoint=None if named.checkpoint is None else named.checkpoint.name,
        model=ModelSpec(named.spec, dict(named.args), filled=dict(named.filled)),
        data=DataSpec.of(plan.dataset, plan.data_args),
        capture=plan.capture.to_json(),
        layout=plan.layout,
        plan_hash=plan.hash,
        splits_sha256=sha256_file(folder / SPLITS_NAME),
        own_metrics=None,
        no_metrics_because=plan.problem or "not scored yet",
        provenance=_recorded_provenance(plan, folder),
        shards=tuple(placed),
    )
    if plan.task is not None and plan.problem is None:
        outputs = Cache(folder, manifest).outputs()
        assert outputs is not None  # the plan scores only what is stored
        scores = own_scores(
            plan.task, outputs, plan.labels, plan.splits, probabilities=plan.own.probabilities
        )
        manifest = replace(manifest, own_metrics=scores, no_metrics_because=None)
    write_manifest(folder, manifest)


def _recorded_provenance(plan: CachePlan, folder: Path) -> Provenance:
    """Return what is recorded about the code, with the canary that is in the folder.

    Another job may have written it, on a machine that rounds differently.
    """
    provenance, _ = plan.provenance
    if provenance.canary_sha256 is None:
        return provenance
    return replace(provenance, canary_sha256=sha256_file(folder / CANARY_NAME))


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
    on_progress: OnProgress = None,
    on_rows: OnProgress = None,
    on_note: Callable[[str], None] | None = None,
) -> Cache | None:
    """Write what is missing of a planned cache; None while shards of other jobs are missing.

    Args:
        plan: From :func:`plan_cache`.
        out: Folder of the cache. One that a killed run left behind is completed.
        part: ``(i, n)``: this is job ``i`` of ``n``; whichever finishes last writes the manifest.
        overwrite: Replace another cache in that folder, once this one is complete.
        config: The options this came from, saved beside the shards.
        on_progress: Called with the nodes done and the nodes of this job.
        on_rows: Called with the rows of a long table that are read, and those of this job.
        on_note: Called with what the user should know about the rows and the files that were there.
    """
    number, count = part
    if not 0 <= number < count:
        raise ConfigError(f"shard: found {number}/{count}, expected i/n with 0 <= i < n")
    if os.path.islink(out):
        if not os.path.isdir(out):
            raise OutputExistsError(
                f"{out}: found a link that leads to no folder, expected a folder"
            )
        out = os.path.realpath(out)  # such as one to scratch
    on_note = on_note or (lambda note: None)
    shared = count > 1
    if not shared:
        plan = _read(plan, None, on_rows, on_note)
    written = _small_files(plan)
    if config is not None:
        written[CONFIG_NAME] = config_text(config)
    # One after the other: where the rows of two jobs meet, both read a block.
    first, stop = (-(-job * len(plan.shards) // count) for job in (number, number + 1))
    mine = range(first, stop)
    with OutputFolder(out, is_of_a_cache, shared=shared) as output:
        found = open_folder(
            plan, output, written, overwrite=overwrite, shared=shared, on_note=on_note
        )
        folder = output.folder
        if not isinstance(found, Cache):
            _write_texts(folder, written)
            _, canary = plan.provenance
            if canary is not None and not (folder / CANARY_NAME).exists():
                write_bytes(folder / CANARY_NAME, canary)
            missing = [index for index in mine if found[index] is None]
            job = _read(plan, missing, on_rows, on_note) if shared and missing else plan
            shards = write_shards(job, folder, found, mine=mine, on_progress=on_progress)
            present = [shard for shard in shards if shard is not None]
            if len(present) < len(shards):
                return None
            output.alone()
            if folder.is_dir():  # else another job was first, and has replaced the old cache
                plan = _read(plan, None, on_rows, on_note)
                _write_texts(folder, _small_files(plan))
                join_shards(plan, folder, present)
        output.finish()
    return Cache.open(out)


def _read(
    plan: CachePlan,
    shards: Sequence[int] | None,
    on_rows: OnProgress,
    on_note: Callable[[str], None],
) -> CachePlan:
    """Read the rows of some shards, or all, and say what is new about them."""
    read = plan.reading(shards, on_rows)
    for note in read.dataset.notes[len(plan.dataset.notes) :]:
        on_note(note)
    return read


def _small_files(plan: CachePlan) -> dict[str, str | None]:
    """Return the files on all graphs, and their text; None while not all graphs are known."""
    dataset, splits = plan.dataset, plan.splits
    known = isinstance(splits, Splits)
    files = {SPLITS_NAME: to_json(splits.to_json()) if isinstance(splits, Splits) else None}
    if dataset.smiles is not None:
        files[MOLECULES_NAME] = _molecules(dataset.smiles, dataset.names) if known else None
    return files


def _write_texts(folder: Path, written: Mapping[str, str | None]) -> None:
    for name, text in written.items():
        if text is not None:
            write_text(folder / name, text)


def _molecules(smiles: Sequence[str], names: Sequence[str] | None) -> str:
    """Return the text of ``molecules.smi``."""
    pairs = zip(smiles, names or [""] * len(smiles), strict=True)
    return "".join(f"{text.strip()}\t{' '.join(name.split())}\n" for text, name in pairs)


def cache(
    model: nn.Module,
    dataset: GraphDataset | Iterable[Data],
    out: str | Path,
    *,
    split: Splits | str | None = None,
    device: str = "auto",
    part: tuple[int, int] = (0, 1),
    overwrite: bool = False,
    workers: int | None = None,
    on_progress: OnProgress = None,
    splits: Splits | str | None = None,
    **options: Any,
) -> Cache | None:
    """Run ``model`` once over ``dataset`` and cache every layer's activations.

    Args:
        model: Any trained module; it is put into ``eval()`` and not changed otherwise.
        dataset: A :class:`~histograph_post.data.GraphDataset`, a PyG data set or a list of graphs.
        out: Folder of the cache; a run that was killed resumes where it stopped.
        split: Splits, or a specification such as ``"kfold:10"`` or a file; default: as the data
            comes, else stratified.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        part: ``(i, n)`` for job ``i`` of ``n``.
        overwrite: Replace another cache in that folder.
        workers: Processes that read graphs, where there are many; by default one per core.
        on_progress: Called with the nodes done and the nodes in all.
        splits: The earlier name of ``split``.
        options: Fields of :class:`CacheOptions`.

    Returns:
        The opened cache; None while shards of other jobs are missing.
    """
    kept = rows_beside(out)
    if not isinstance(dataset, GraphDataset):
        dataset = from_graphs(dataset, reading=Reading(kept, workers, sampled=True))
    if split is None:
        split = splits
    chosen = choose_splits(dataset, split)
    plan = plan_cache(model, dataset, chosen, options=CacheOptions(**options), device=device)
    with notebook_bar("caching", watched=on_progress is not None) as update:
        on_progress = on_progress or update
        found = write_cache(plan, out, part=part, overwrite=overwrite, on_progress=on_progress)
    if found is not None:
        remove_rows(kept)
    return found
