"""Options that several commands share, each declared once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from histograph_post.heads.registry import HEADS, head_names
from histograph_post.utils.specifications import BUILT_IN_MODELS, PUBLIC_MODELS

#: Headings of options in a command's help.
HEAD, EXPERIMENT, TRAINING = "Head", "Experiment", "Training"

#: Every metric of every task, the usual one of each first.
METRICS = (
    *("accuracy", "roc_auc", "rmse", "ap", "balanced_accuracy", "f1", "mae", "r2", "mrr"),
    *("hits@20", "hits@50"),
)

# --- what the shell offers for their values: nothing here loads torch

#: Sets of each kind of data that most people ask for.
_DATA = (
    *("tu:MUTAG", "tu:PROTEINS", "tu:NCI1", "tu:IMDB-BINARY", "planetoid:Cora"),
    *("planetoid:CiteSeer", "planetoid:PubMed", "actor:", "wiki:chameleon", "wiki:squirrel"),
    *("ogbg:molhiv", "ogbg:molbbbp", "moleculenet:BBBP", "moleculenet:ESOL", "smiles:", "demo:"),
)


def complete_heads(incomplete: str) -> list[str]:
    """Return readouts by name."""
    return _beginning(head_names(), incomplete)


def complete_several_heads(incomplete: str) -> list[str]:
    """Return readouts behind those that a list has already."""
    before, comma, last = incomplete.rpartition(",")
    names = [*([] if comma else ["all"]), *head_names(rivals=True)]
    return [f"{before}{comma}{name}" for name in _beginning(names, last)]


def complete_metrics(incomplete: str) -> list[str]:
    """Return the metrics of all tasks."""
    return _beginning(METRICS, incomplete)


def complete_models(incomplete: str) -> list[str]:
    """Return the built-in models, and the Python files of this folder."""
    names = (*BUILT_IN_MODELS, *PUBLIC_MODELS)
    files = [f"{path.name}:" for path in Path().glob("*.py")]
    return _beginning([*names, *sorted(files)], incomplete)


def complete_data(incomplete: str) -> list[str]:
    """Return data sets, and those below the folder that the environment names."""
    root = Path(os.environ.get("HISTOGRAPH_DATA_ROOT", ""))
    local = [f"tu:{path.parent.name}" for path in root.glob("tu/*/raw")] if root.name else []
    return _beginning(dict.fromkeys([*_DATA, *sorted(local)]), incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


# --- the options

_model = typer.Option(
    "--model",
    metavar="SPEC",
    autocompletion=complete_models,
    help="The model: gcn, gin, gat, sage or gps; the name of a public one, such as "
    "pretrain-gnns:gcn (see histograph recipes); or your own, as file.py:Name or "
    "package.module:Name.",
)
_data = typer.Option(
    "--data",
    metavar="SPEC",
    autocompletion=complete_data,
    help="The data: tu:NAME, planetoid:NAME, actor:, wiki:NAME, ogbg:NAME, moleculenet:NAME, "
    "smiles:FILE.csv, file.py:function, graphs.pt or demo:.",
)
ModelOption = Annotated[str, _model]
DataOption = Annotated[str, _data]
#: For commands that can learn the same from a folder.
OptionalModelOption = Annotated[str | None, _model]
OptionalDataOption = Annotated[str | None, _data]
OptionalCheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="FILE",
        help="The trained weights: .safetensors, .pt, .pth, .ckpt or .pth.tar, a HuggingFace "
        "folder, or a fold's folder from pretrain.",
    ),
]
#: For commands that know model and weights from a run.
MovedModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="SPEC",
        autocompletion=complete_models,
        help="The backbone, if it is your own code: file.py:Name or package.module:Name. Code "
        "that is only recorded in a run is never executed.",
    ),
]
#: For commands that use what a run has trained.
RunHeadOption = Annotated[
    str | None,
    typer.Option(
        "--head",
        metavar="NAME|SPEC",
        autocompletion=complete_heads,
        help="A readout of the run, by name, instead of the one it predicts with; or your own "
        "code, as file.py:Class or package.module:Class.",
    ),
]
MovedCheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", metavar="FILE", help="Where the backbone's weights are, if they were moved."
    ),
]
ModelArgsOption = Annotated[
    list[str],
    typer.Option(
        "--model-args",
        metavar="K=V",
        help="An argument of the model, such as hidden=64; repeatable.",
    ),
]
DataArgsOption = Annotated[
    list[str],
    typer.Option("--data-args", metavar="K=V", help="An argument of the data; repeatable."),
]
DataRootOption = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        metavar="DIR",
        envvar="HISTOGRAPH_DATA_ROOT",
        show_envvar=False,
        help="Folder with a local copy of the data, which is only read. By default the "
        "environment variable HISTOGRAPH_DATA_ROOT.",
    ),
]
StateOption = Annotated[
    str | None,
    typer.Option(
        "--state",
        metavar="KEY",
        help="Which state dict of the checkpoint, if it has several (ema, swa, ...), or the "
        "prefix that its names share.",
    ),
]
KeyMapOption = Annotated[
    Path | None,
    typer.Option(
        "--key-map",
        metavar="FILE",
        help="TOML or JSON file that renames weights: name in the checkpoint = name in the model.",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-checkpoint",
        help="Unpickle the checkpoint if it can only be read by running its code; only for files "
        "you trust. Remembered for this file, by its hash.",
    ),
]
LayersOption = Annotated[
    str,
    typer.Option(
        "--layers",
        help="Layers to capture: auto, steps, or names, globs and positions, separated by commas.",
    ),
]
NoPassOption = Annotated[
    list[str],
    typer.Option(
        "--no-pass",
        metavar="NAME",
        help="Do not pass this attribute of the data to the model, such as edge_weight; "
        "repeatable.",
    ),
]
OutputKeyOption = Annotated[
    str | None,
    typer.Option(
        "--output-key", help="Key of the prediction, if the model returns several outputs."
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
NodeBudgetOption = Annotated[
    int,
    typer.Option("--node-budget", min=1, help="Nodes per batch; a batch is made of whole graphs."),
]


#: How activations are stored.
Dtype = Literal["float32", "float16", "bfloat16"]

#: How the learning rate decays.
Schedule = Literal["cosine", "plateau", "none"]

#: What happens to the running statistics of batch norms while a backbone is trained.
Statistics = Literal["frozen", "train"]

#: What is predicted.
TaskKind = Literal["auto", "binary", "multiclass", "multilabel", "regression"]

CacheArgument = Annotated[
    Path, typer.Argument(metavar="CACHE", help="A cache, or a folder of per-fold caches.")
]
RunOption = Annotated[Path, typer.Option("-o", "--out", metavar="RUN", help="Folder to write.")]
HeadOption = Annotated[
    str,
    typer.Option(
        "--head",
        metavar="NAME|SPEC",
        autocompletion=complete_heads,
        help=f"The readout to train: {', '.join(HEADS)}; one of an installed package, by its "
        "name; or your own, as file.py:Class.",
    ),
]
HeadArgsOption = Annotated[
    list[str],
    typer.Option(
        "--head-args",
        metavar="K=V",
        help="Any other option of the head, such as dropout=0.1; repeatable.",
    ),
]
TaskOption = Annotated[
    TaskKind, typer.Option("--task", help="Kind of task, by default inferred from the labels.")
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        autocompletion=complete_metrics,
        help=f"Metric that selects the best epoch and ranks the results: {', '.join(METRICS)}. By "
        "default the usual one of the task.",
    ),
]
FoldsOption = Annotated[
    int | None, typer.Option("--folds", min=3, help="Cross-validate: split into N folds.")
]
SplitOption = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="FILE|SPEC",
        help="How to split: official, random, stratified, scaffold, kfold:K, a splits file or a "
        "folder.",
    ),
]
SplitSeedOption = Annotated[int, typer.Option("--split-seed", help="Seed of a random split.")]
SeedsOption = Annotated[
    str | None,
    typer.Option("--seeds", help="Seeds, such as 0-4 or 0,3,7: one fit per seed and fold."),
]
LrOption = Annotated[
    float | None,
    typer.Option(
        "--lr",
        help="Peak learning rate; by default one that suits the readout, or 1e-2 on a single "
        "graph.",
        rich_help_panel=TRAINING,
    ),
]
WarmStartOption = Annotated[
    bool,
    typer.Option(
        "--warm-start",
        help="Start from the checkpoint's own predictions (histograph only).",
        rich_help_panel=HEAD,
    ),
]
CheckpointLayersOption = Annotated[
    bool,
    typer.Option(
        "--checkpoint-layers",
        help="Gradient checkpointing: recompute layers in the backward pass to save memory.",
    ),
]
AmpOption = Annotated[
    bool, typer.Option("--amp", help="Mixed precision in the backbone (CUDA only).")
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=0,
        help="Processes that read the data if it has 50,000 rows or more; by default one per core.",
    ),
]
RowsOption = Annotated[
    Path | None,
    typer.Option(
        "--rows",
        metavar="DIR",
        help="Folder that keeps the graphs of 50,000 rows or more for later commands on the same "
        "data; by default OUT.rows, which is removed at the end.",
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="Where to compute: auto, cpu, cuda or mps.")
]


#: Where fits run.
Backend = Literal["loky", "dask", "ray"]

BackendOption = Annotated[
    Backend,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="Where fits run: loky, in processes of this machine; dask or ray, on a cluster whose "
        "machines see the same files.",
    ),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="ADDRESS",
        help="Address of the cluster, such as tcp://host:8786.",
    ),
]
FitsOption = Annotated[
    str | None,
    typer.Option(
        "--fits",
        metavar="I/N",
        help="Do only share I of N of the fits, counted from 0, as one job of an array; the job "
        "that finds all of them done writes the results.",
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        min=1,
        help="Number of fits to run in parallel; the results do not depend on it. By default as "
        "many as cores and memory allow.",
    ),
]
