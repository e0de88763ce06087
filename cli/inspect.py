"""`histograph inspect` and `recipes`: what a file or a folder holds, and public checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from histograph_post.errors import NotFoundError
from histograph_post.utils.text import file_size, plural

from . import options as opt
from .guidance import cache_command, command, predict_command, report_command, train_command
from .results import show_cache, show_folds, show_results, summary
from .terminal import Terminal

if TYPE_CHECKING:
    from histograph_post.runs.run import Run

#: Values beside the weights of a checkpoint that are printed.
_VALUES_SHOWN = 12
#: A run has the own readout, the one to beat and its head; with more it is a comparison.
_FEW_READOUTS = 3


def inspect(
    terminal: Terminal,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT|CACHE|RUN",
            help="A checkpoint (a file, or a HuggingFace folder), or the folder of a cache, a run "
            "or an export.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="SPEC",
            autocompletion=opt.complete_models,
            help="Show what would be captured from this model.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="SPEC",
            autocompletion=opt.complete_data,
            help="Data to run the model on, to find its layers.",
        ),
    ] = None,
    model_args: opt.ModelArgsOption = [],  # noqa: B006  # typer copies it
    data_root: opt.DataRootOption = None,
    data_args: opt.DataArgsOption = [],  # noqa: B006
    layers: opt.LayersOption = "auto",
    key_map: opt.KeyMapOption = None,
    state: opt.StateOption = None,
    no_pass: opt.NoPassOption = [],  # noqa: B006
    trust_checkpoint: opt.TrustOption = False,
) -> None:
    """Show what is in a checkpoint, a cache or a run; nothing is written.

    For a checkpoint, --model and --data show which layers would be captured, and where.
    """
    from histograph_post.models.spec import weights_in

    if path.is_dir() and weights_in(path) is None:
        _inspect_folder(terminal, path)
        return
    if (model is None) != (data is None):
        raise typer.BadParameter("give --model and --data together, or neither")
    if not path.exists():
        raise NotFoundError(f"{path}: found nothing, expected a checkpoint, a cache or a run")
    if model is None or data is None:
        _inspect_checkpoint(terminal, path, state=state, trust=trust_checkpoint)
        return
    from histograph_post.caches.planning import inspect as inspect_model
    from histograph_post.data import DataSpec
    from histograph_post.data.spec import Reading
    from histograph_post.models import ModelSpec, parse_args
    from histograph_post.models.spec import load_pretrained

    source = load_pretrained(
        ModelSpec(model, parse_args(model_args), path, key_map, trust_checkpoint, state=state),
        DataSpec(data, parse_args(data_args), data_root, reading=Reading(sampled=True)),
        allow_missing=True,
    )
    found = inspect_model(
        source.model, source.dataset, missing=source.missing, layers=layers, no_pass=no_pass
    )
    for note in (*source.notes, *found.notes):
        terminal.note(note)
    for table in found.tables():
        terminal.table(*table)
    if source.missing:
        terminal.note(f"the model's own outputs would not be kept: {found.plan.problem}")
    given = {"model": model, "checkpoint": path, "data": data, **_flags(terminal)}
    terminal.result(found.to_json(), next_command=command("cache", **given) + " -o CACHE")


def _inspect_checkpoint(terminal: Terminal, path: Path, *, state: str | None, trust: bool) -> None:
    from histograph_post.models import read_checkpoint
    from histograph_post.models.public_models import family_of

    checkpoint = read_checkpoint(path, trust=trust, state=state)
    for note in checkpoint.notes:
        terminal.note(note)
    if checkpoint.others:
        terminal.table(
            "State dicts in the file",
            ["name", "tensors", ""],
            [
                [checkpoint.found_at, len(checkpoint.state_dict), "shown below"],
                *([name, n, f"--state {name}"] for name, n in checkpoint.others.items()),
            ],
        )
    beside = [[name, str(value)] for name, value in checkpoint.metadata.items()]
    if beside:
        terminal.table("Beside the weights", ["name", "value"], beside[:_VALUES_SHOWN])
    weights, public = checkpoint.state_dict, family_of(checkpoint.state_dict)
    if public is not None:
        terminal.note(f"these are the weights of {public}: --model {public} reads them")
    terminal.table(
        f"{path.name}: {len(weights)} tensors, "
        f"{sum(w.numel() for w in weights.values()):,} numbers, {_place(checkpoint.found_at)}",
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
            "state_dicts": {checkpoint.found_at: len(weights), **checkpoint.others},
            "read_past": list(checkpoint.past),
            "model": public,
            "beside": checkpoint.metadata,
            "tensors": {name: list(value.shape) for name, value in weights.items()},
        },
        next_command=command(
            "inspect", path, **_flags(terminal), model=public or "SPEC", data="SPEC"
        ),
    )


def _place(found_at: str) -> str:
    return "a plain state dict" if found_at == "bare" else f"found at {found_at!r}"


def _flags(terminal: Terminal) -> dict[str, Any]:
    """Return the flags that the next command takes over."""
    own = ("path", "model", "data")
    return {name: value for name, value in terminal.options.items() if name not in own}


def _inspect_folder(terminal: Terminal, path: Path) -> None:
    """Show what a command has left in a folder; none of that needs torch."""
    from histograph_post.caches.manifest import MANIFEST_NAME
    from histograph_post.runs.run import HEAD_CONFIG_NAME, Run, is_run

    members = sorted(path.glob("*.cache"))
    if is_run(path):
        _inspect_run(terminal, Run.open(path))
    elif (path / HEAD_CONFIG_NAME).is_file():
        _inspect_export(terminal, Run.of(path))
    elif members and not (path / MANIFEST_NAME).exists():
        _inspect_caches(terminal, path, members)
    else:
        _inspect_cache(terminal, path)


def _inspect_run(terminal: Terminal, run: Run) -> None:
    from histograph_post.runs import summary as texts

    results = run.results
    if "folds" in results:
        show_folds(terminal, results)
        terminal.result(
            {"folder": str(run.folder), **results},
            next_command=cache_command(
                run.folder, model=results["model"], data=results["data"], named=False
            ),
        )
        return
    from histograph_post.runs.summary import run_command

    facts = texts.facts(run.require_readouts())
    terminal.table(f"{run.folder}", ["", ""], facts)
    compared = len(results["readouts"]) > _FEW_READOUTS
    show_results(terminal, results, {}, ranked=compared)
    terminal.result(
        {
            "run": str(run.folder),
            "facts": dict(facts),
            "command": run_command(run),
            **results,
        },
        next_command=report_command(run),
    )


def _inspect_export(terminal: Terminal, run: Run) -> None:
    """Show a backbone and head that were exported together."""
    from histograph_post.runs import summary as texts

    stored, backbone = run.stored_head, run.backbone
    layers = backbone.capture.names
    facts = [
        ("task", f"{stored['task']['kind']}, {stored['task']['level']} level"),
        ("targets", ", ".join(stored["target_names"])),
        ("head", texts.predicts_with(run)),
        ("model", backbone.model.spec),
        ("layers", f"{len(layers)}: {', '.join(layers)}"),
        ("weights sha256", backbone.model.weights_sha256),
        ("trained on", backbone.data.spec),
    ]
    terminal.table(f"{run.folder}: backbone and head", ["", ""], facts)
    terminal.result(
        {"export": str(run.folder), **stored},
        next_command=predict_command(run.folder, named=False),
    )


def _inspect_caches(terminal: Terminal, path: Path, members: list[Path]) -> None:
    """Show the caches of a folder, which commonly are those of the folds of one data set."""
    from histograph_post.caches.manifest import read_manifest

    manifests = {member.name: read_manifest(member)[1] for member in members}
    terminal.table(
        f"{path}: {len(members)} caches",
        ["cache", "data", "graphs", "nodes", "layers", "size", "weights"],
        [
            [
                name,
                manifest.data.spec,
                f"{manifest.data.num_graphs:,}",
                f"{manifest.data.num_nodes:,}",
                manifest.layout.num_layers,
                file_size(sum(shard.num_bytes for shard in manifest.shards)),
                manifest.weights_sha256[:12],
            ]
            for name, manifest in manifests.items()
        ],
    )
    terminal.result(
        {
            "folder": str(path),
            "caches": {name: summary(manifest) for name, manifest in manifests.items()},
        },
        next_command=train_command(path),
    )


def _inspect_cache(terminal: Terminal, path: Path) -> None:
    from histograph_post.caches.manifest import read_manifest, read_splits
    from histograph_post.capture.points import CapturePlan

    folder, manifest = read_manifest(path)
    layout, splits = manifest.layout, read_splits(folder, manifest)
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
            ["splits", f"{splits.kind}, {plural(len(splits.folds), 'fold')}"],
            ["stored as", " ".join(filter(None, [layout.dtype, layout.compression]))],
            ["size", f"{file_size(sum(s.num_bytes for s in manifest.shards))}"],
            ["shards", len(manifest.shards)],
        ],
    )
    terminal.table("What is captured", capture.COLUMNS, capture.table())
    show_cache(terminal, manifest)
    terminal.result({"cache": str(path), **summary(manifest)}, next_command=train_command(path))


def _targets(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:4])
    return shown + (f", ... ({len(names)} in all)" if len(names) > 4 else "") or "none"


def recipes(
    terminal: Terminal,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A checkpoint, such as pretrain-gnns:gcn, or the beginning of several names.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the public checkpoints that --model knows by name, and where to get their files.

    Each comes with one command that goes from such a file and a csv file of molecules to a report.
    The name also decides how molecules are encoded (mol_features).
    """
    from histograph_post.models.spec import SAME_NETWORK, one_command, recipes_called

    found = recipes_called(name)
    terminal.table(
        "Public checkpoints by name",
        ["--model", "file", "from", "licence"],
        [[recipe.name, recipe.files, recipe.source, recipe.licence] for recipe in found],
    )
    for paper in dict.fromkeys(recipe.paper for recipe in found):
        terminal.info(f"  {paper}")
    if any(recipe.name.startswith("pretrain-gnns:") for recipe in found):
        for other, source, licence in SAME_NETWORK:
            terminal.note(f"{other} ({source}, {licence}) has the network of pretrain-gnns:gin")
    terminal.result(
        {"recipes": [{**asdict(each), "command": one_command(each)} for each in found]},
        next_command=one_command(found[0] if len(found) == 1 else None),
    )
