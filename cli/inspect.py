"""`histograph inspect`: what is in a checkpoint or a cache, and what would be captured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt
from .cache import show_cache, show_plan, summary
from .terminal import Terminal, size


def inspect(
    terminal: Terminal,
    path: Annotated[Path, typer.Argument(metavar="CHECKPOINT|CACHE", help="What to look into.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="SPEC", help="Show what it would capture.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="SPEC", help="Data for the probe pass.")
    ] = None,
    model_args: opt.ModelArgsOption = [],  # noqa: B006  # typer copies it
    data_root: opt.DataRootOption = None,
    data_args: opt.DataArgsOption = [],  # noqa: B006
    layers: opt.LayersOption = "auto",
    key_map: opt.KeyMapOption = None,
    trust_checkpoint: opt.TrustOption = False,
) -> None:
    """Show what a checkpoint or a cache holds; nothing is written.

    A checkpoint with --model and --data shows which layers would be captured, and where.
    """
    if path.is_dir():
        _inspect_cache(terminal, path)
        return
    if (model is None) != (data is None):
        raise typer.BadParameter("give --model and --data together, or neither")
    if model is None or data is None:
        _inspect_checkpoint(terminal, path, trust=trust_checkpoint)
        return
    from histograph_post.backbone import parse_args
    from histograph_post.cache_plan import CacheOptions, plan_cache
    from histograph_post.pretrained import PretrainedSpec, load_pretrained
    from histograph_post.splits import resolve_splits

    source = load_pretrained(
        PretrainedSpec(
            model=model,
            checkpoint=path,
            data=data,
            model_args=parse_args(model_args),
            data_args=parse_args(data_args),
            data_root=data_root,
            key_map=key_map,
            trust_checkpoint=trust_checkpoint,
        )
    )
    plan = plan_cache(
        source.model,
        source.dataset,
        resolve_splits(source.dataset, None),
        options=CacheOptions(layers=layers),
        device="cpu",
    )
    for note in (*source.dataset.notes, *plan.capture.notes):
        terminal.say(f"note: {note}")
    show_plan(terminal, plan)
    given = [f"--data-root {data_root}"] if data_root else []
    given += [f"--data-args {pair}" for pair in data_args]
    given += [f"--model-args {pair}" for pair in model_args]
    given += [f"--layers {layers}"] if layers != "auto" else []
    terminal.result(
        plan.to_json(),
        next_command=" ".join(
            [f"histograph cache --model {model} --checkpoint {path} --data {data}", *given]
        )
        + " -o CACHE",
    )


def _inspect_checkpoint(terminal: Terminal, path: Path, *, trust: bool) -> None:
    from histograph_post.checkpoint import read_checkpoint

    checkpoint = read_checkpoint(path, trust=trust)
    weights = checkpoint.state_dict
    terminal.table(
        f"{path.name}: {len(weights)} tensors, "
        f"{sum(w.numel() for w in weights.values()):,} numbers, found at {checkpoint.found_at!r}",
        ["name", "shape", "type"],
        [
            [name, list(value.shape), str(value.dtype).removeprefix("torch.")]
            for name, value in weights.items()
        ],
    )
    terminal.result(
        {
            "checkpoint": str(path),
            "sha256": checkpoint.sha256,
            "found_at": checkpoint.found_at,
            "stripped": list(checkpoint.stripped),
            "tensors": {name: list(value.shape) for name, value in weights.items()},
        },
        next_command=f"histograph inspect {path} --model SPEC --data SPEC",
    )


def _inspect_cache(terminal: Terminal, path: Path) -> None:
    from histograph_post.capture import CapturePlan
    from histograph_post.storage import Cache

    cache = Cache.open(path)
    manifest, layout = cache.manifest, cache.manifest.layout
    capture = CapturePlan.from_json(manifest.capture)
    terminal.table(
        f"{path}",
        ["", ""],
        [
            ["model", f"{manifest.model.spec} {dict(manifest.model.args) or ''}"],
            ["checkpoint", manifest.checkpoint or "handed over in memory"],
            ["weights", manifest.weights_sha256],
            ["data", f"{manifest.data.spec} {dict(manifest.data.args) or ''}"],
            ["graphs, nodes", f"{manifest.data.num_graphs:,}, {manifest.data.num_nodes:,}"],
            ["labels", f"{layout.level}: {_targets(layout.target_names)}"],
            ["splits", f"{cache.splits.kind}, {_folds(len(cache.splits.folds))}"],
            ["stored as", " ".join(filter(None, [layout.dtype, layout.compression]))],
            ["size", f"{size(sum(s.num_bytes for s in manifest.shards))}"],
            ["shards", len(manifest.shards)],
        ],
    )
    terminal.table("What is captured", capture.COLUMNS, capture.table())
    show_cache(terminal, cache)
    terminal.result(
        {"cache": str(path), **summary(cache)}, next_command=f"histograph verify {path}"
    )


def _targets(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:4])
    return shown + (f", ... ({len(names)} in all)" if len(names) > 4 else "") or "none"


def _folds(count: int) -> str:
    return "1 fold" if count == 1 else f"{count} folds"
