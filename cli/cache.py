"""`histograph cache` and `verify`: every layer's activations on disk, checked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from histograph_post.utils.machine import NODE_BUDGET
from histograph_post.utils.text import duration, file_size, plural, score

from . import options as opt
from .flags import parse_share
from .guidance import train_command
from .results import show_cache, summary
from .terminal import Terminal

if TYPE_CHECKING:
    from histograph_post.caches import Cache
    from histograph_post.caches.planning import CachePlan


def cache(
    terminal: Terminal,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="CACHE", help="Folder to write.")],
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Output folder of pretrain or finetune, or one of its folds; replaces "
            "--checkpoint, --data and --model, but your own code has to be named again. "
            "Several folds are written as one fold-K.cache each, in the folder CACHE.",
            show_default=False,
        ),
    ] = None,
    model: opt.OptionalModelOption = None,
    checkpoint: opt.OptionalCheckpointOption = None,
    data: opt.OptionalDataOption = None,
    model_args: opt.ModelArgsOption = [],  # noqa: B006  # typer copies it
    data_root: opt.DataRootOption = None,
    data_args: opt.DataArgsOption = [],  # noqa: B006
    split: opt.SplitOption = None,
    split_seed: opt.SplitSeedOption = 0,
    layers: opt.LayersOption = "auto",
    key_map: opt.KeyMapOption = None,
    state: opt.StateOption = None,
    output_key: opt.OutputKeyOption = None,
    no_pass: opt.NoPassOption = [],  # noqa: B006
    dtype: Annotated[opt.Dtype, typer.Option(help="Precision of the stored activations.")] = (
        "float32"
    ),
    compress: Annotated[
        bool,
        typer.Option("--compress", help="Compress activations with gzip: smaller, but slower."),
    ] = False,
    node_budget: opt.NodeBudgetOption = NODE_BUDGET,
    shard_mb: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Size of a shard in MB; a killed run resumes at the last one. By default 64, or "
            "more if there would be over 500 shards.",
        ),
    ] = None,
    workers: opt.WorkersOption = None,
    rows: opt.RowsOption = None,
    device: opt.DeviceOption = "auto",
    jobs: Annotated[
        int,
        typer.Option(
            min=1, help="Processes that write shards in parallel, each with a share of the cores."
        ),
    ] = 1,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Write only part I of N, counted from 0, so that N jobs share the work; the last "
            "one to finish joins the parts.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Only show what would be written, and about how long that would take."
        ),
    ] = False,
    trust_checkpoint: opt.TrustOption = False,
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Run a pretrained model once and write every layer's node activations to a cache.

    If it is killed, run the same command again: it resumes.
    """
    from histograph_post.caches import Cache
    from histograph_post.caches.caching import write_cache
    from histograph_post.caches.probing import CacheOptions
    from histograph_post.data import DataSpec
    from histograph_post.data.spec import Reading
    from histograph_post.data.streaming import remove_rows, rows_beside
    from histograph_post.experiments.checkpoints import (
        FoldCheckpoint,
        fold_checkpoints,
        plan_caches,
    )
    from histograph_post.models import ModelSpec, parse_args
    from histograph_post.models.spec import weights_in

    if folder is not None and checkpoint is not None:
        raise typer.BadParameter("give a folder or --checkpoint, not both")
    if folder is not None and folder.is_file():
        raise typer.BadParameter(
            f"{folder} is a file; a checkpoint is named with its model and data: "
            f"--checkpoint {folder} --model SPEC --data SPEC"
        )
    place = folder or checkpoint
    several = False
    if place is None or (folder is None and (not place.is_dir() or weights_in(place) is not None)):
        if model is None or place is None or data is None:
            given = {"model": model, "checkpoint": place, "data": data}
            name = next(name for name, value in given.items() if value is None)
            raise typer.BadParameter(
                f"--{name} is missing; only a folder that histograph pretrain wrote needs none"
            )
        named = ModelSpec(
            model, parse_args(model_args), place, key_map, trust_checkpoint, state=state
        )
        folds = [FoldCheckpoint(place, named, DataSpec(data, parse_args(data_args), data_root))]
    else:
        folds = fold_checkpoints(
            place,
            model=model,
            data=data,
            model_args=parse_args(model_args),
            data_args=parse_args(data_args),
            data_root=data_root,
            key_map=key_map,
            trust=trust_checkpoint,
        )
        several = folds[0].folder != place
        if several and split is not None:
            raise typer.BadParameter(f"--split: every fold of {place} brings its own")
    options = CacheOptions(
        layers=layers,
        dtype=dtype,
        node_budget=node_budget,
        shard_bytes=None if shard_mb is None else shard_mb * 2**20,
        compression="gzip" if compress else None,
        output_key=output_key,
        no_pass=no_pass,
    )
    results: list[dict[str, Any]] = []
    caches: list[Cache] = []
    places = [out / f"{fold.folder.name}.cache" if several else out for fold in folds]
    of_torchrun = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    part = parse_share("--shard", shard) or of_torchrun
    if jobs > 1 and part[1] > 1:
        raise typer.BadParameter("--jobs: this is one of several jobs already")
    in_processes = jobs > 1 and not dry_run
    if in_processes:
        _write_in_processes(terminal, jobs, overwrite=overwrite)
        caches = [Cache.open(place) for place in places]
        results = [_written(*each) for each in zip(places, caches, strict=True)]
    kept = rows or (None if dry_run else rows_beside(out))
    planned = plan_caches(
        [] if in_processes else folds,
        options=options,
        split=split,
        split_seed=split_seed,
        reading=Reading(kept, workers, sampled=True),
        device=device,
        progress=terminal.progress,
    )
    for place, (_, plan, notes) in zip(places, planned, strict=not in_processes):
        for note in notes:
            terminal.note(note)
        if dry_run:
            results.append(_estimate(terminal, plan))
            continue
        sampled = plan.dataset.is_sample
        terminal.info(
            f"{place}: {plural(len(plan.num_nodes), 'row' if sampled else 'graph')}, "
            f"{plural(plan.layout.num_layers, 'layer')}, {'about ' if sampled else ''}"
            f"{file_size(plan.num_bytes)} in "
            f"{plural(len(plan.shards), 'shard')}"
        )
        with terminal.steps("reading rows", "caching nodes") as (on_rows, update):
            written = write_cache(
                plan,
                place,
                part=part,
                overwrite=overwrite,
                config=terminal.options,
                on_progress=update,
                on_rows=on_rows,
                on_note=terminal.note,
            )
        results.append(_written(place, written))
        caches += [] if written is None else [written]
    if rows is None and kept is not None and len(caches) == len(folds):
        remove_rows(kept)
    if len(folds) > 1:
        _show_folds(terminal, caches)
    elif caches:
        show_cache(terminal, caches[0].manifest)
    if dry_run:
        next_command = "the same command without --dry-run"
    elif len(caches) < len(folds):
        next_command = "nothing here; the job that finishes last completes the cache"
    else:
        next_command = train_command(out)
    terminal.result(
        results[0] if len(folds) == 1 else {"caches": results}, next_command=next_command
    )


def _write_in_processes(terminal: Terminal, jobs: int, *, overwrite: bool) -> None:
    """Do the jobs of ``--shard`` in that many processes, and wait for them.

    The first one shows its progress. If one fails, or this process is interrupted, all of them are
    ended, with the loss of a shard each at most.
    """
    from histograph_post.experiments.parallel import threads_per_fit
    from histograph_post.experiments.workers import process_ended
    from histograph_post.utils.files import config_text

    threads = str(threads_per_fit(jobs))
    processes: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as waiting:
        config = Path(folder, "config.toml")
        config.write_text(config_text(terminal.options), encoding="utf-8")
        command = [sys.executable, "-m", "histograph_cli", "cache", "--config", str(config)]
        command += ["--overwrite"] * overwrite
        said = ["--verbose"] * terminal.verbose
        logs = [Path(folder, f"{job}.log") for job in range(jobs)]
        try:
            for job, log in enumerate(logs):
                with log.open("wb") as file:
                    shown = job == 0 and not terminal.quiet
                    each = subprocess.Popen(  # noqa: S603  # this program, started again
                        [*command, "--shard", f"{job}/{jobs}", *(said if shown else ["--quiet"])],
                        env={**os.environ, "OMP_NUM_THREADS": threads},
                        stdout=subprocess.DEVNULL,
                        stderr=None if shown else file,
                        start_new_session=True,  # Ctrl-C is for this process
                    )
                processes.append(each)
            ends = {waiting.submit(each.wait): job for job, each in enumerate(processes)}
            for end in as_completed(ends):
                job, code = ends[end], end.result()
                if code < 0:
                    raise process_ended(f"job {job} of {jobs}", code, "its shards")
                if code > 0:
                    print(logs[job].read_text(), end="", file=sys.stderr)
                    raise typer.Exit(code)
        finally:
            for each in processes:
                each.kill()


def _written(place: Path, written: Cache | None) -> dict[str, Any]:
    """Return what a script wants to know of a cache; None while jobs have shards to write."""
    about = {} if written is None else summary(written.manifest)
    return {"cache": str(place), "complete": written is not None, **about}


def _estimate(terminal: Terminal, plan: CachePlan) -> dict[str, Any]:
    """Print what a cache would hold and cost."""
    from histograph_post.caches.planning import Inspection, estimate_seconds

    seconds = estimate_seconds(plan)
    graphs, nodes = len(plan.num_nodes), int(plan.num_nodes.sum())
    for table in Inspection(plan).tables():
        terminal.table(*table)
    terminal.table(
        "Cost",
        ["rows" if plan.dataset.is_sample else "graphs", "nodes", "bytes", "shards", "time, about"],
        [[graphs, nodes, file_size(plan.num_bytes), len(plan.shards), duration(seconds)]],
    )
    return {**plan.to_json(), "seconds": seconds}


def _show_folds(terminal: Terminal, caches: Sequence[Cache]) -> None:
    """Print the test score of the own readout of each fold's model."""
    scored = [
        (cache.path.name, cache.manifest.own_metrics["folds"][0].get("test", {}))
        for cache in caches
        if cache.manifest.own_metrics is not None
    ]
    names = list(dict.fromkeys(name for _, scores in scored for name in scores))
    if names:
        terminal.table(
            "The checkpoints' own readouts, test part",
            ["cache", *names],
            [[cache, *(score(scores.get(name)) for name in names)] for cache, scores in scored],
        )


def verify(
    terminal: Terminal,
    cache: opt.CacheArgument,
) -> None:
    """Check the checksums, the structure, the values and the splits of a cache."""
    from histograph_post.caches import verify_cache
    from histograph_post.caches.manifest import is_begun, read_manifest
    from histograph_post.errors import CacheError
    from histograph_post.experiments.folds import cache_folders

    folders = cache_folders(cache)
    reports = []
    for folder in folders:
        if not is_begun(folder):
            read_manifest(folder)  # says what it is instead
        with terminal.progress("verifying bytes") as update:
            report = verify_cache(folder, progress=update)
        reports.append(report)
        terminal.table(
            f"{folder}",
            ["file", "checked", "found"],
            [[row.file, row.checked, row.problem or "ok"] for row in report.rows],
        )
    problems = [problem for report in reports for problem in report.problems]
    files = sum(len(report.rows) for report in reports)
    if problems:
        if terminal.json:
            terminal.result({"ok": False, "problems": problems})
        raise CacheError(f"{cache}: {len(problems)} of {files} files are damaged")
    terminal.result({"ok": True, "files": files}, next_command=train_command(cache))
