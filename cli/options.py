"""Options that several commands share, each declared once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

_model = typer.Option(
    "--model",
    metavar="SPEC",
    help="gcn, gin, gat, sage, gps, file.py:Name or package.module:Name.",
)
_data = typer.Option(
    "--data",
    metavar="SPEC",
    help="tu:NAME, planetoid:NAME, actor:, wiki:NAME, ogbg:NAME, smiles:FILE.csv, "
    "file.py:function, graphs.pt or demo:.",
)
ModelOption = Annotated[str, _model]
DataOption = Annotated[str, _data]
#: For commands to which a folder can say the same.
OptionalModelOption = Annotated[str | None, _model]
OptionalDataOption = Annotated[str | None, _data]
OptionalCheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="FILE",
        help="Weights: .safetensors, .pt, .pth, .ckpt, .pth.tar, or a pretrained fold's folder.",
    ),
]
#: For commands that know model and weights from a run.
MovedModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="SPEC",
        help="The backbone, if it is code: file.py:Name or package.module:Name. No file decides "
        "what runs.",
    ),
]
MovedCheckpointOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", metavar="FILE", help="The backbone's weights, if they were moved."
    ),
]
ModelArgsOption = Annotated[
    list[str],
    typer.Option("--model-args", metavar="K=V", help="An argument of the model; repeatable."),
]
DataArgsOption = Annotated[
    list[str],
    typer.Option("--data-args", metavar="K=V", help="An argument of the data; repeatable."),
]
DataRootOption = Annotated[
    Path | None,
    typer.Option("--data-root", metavar="DIR", help="An offline copy of the data; only read."),
]
KeyMapOption = Annotated[
    Path | None,
    typer.Option("--key-map", metavar="FILE", help="TOML or JSON: old weight names to new ones."),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-checkpoint", help="Unpickle a checkpoint that can run code. Only if you trust it."
    ),
]
LayersOption = Annotated[
    str,
    typer.Option("--layers", help="auto, or names, globs and indices, separated by commas."),
]
OutputKeyOption = Annotated[
    str | None,
    typer.Option("--output-key", help="Which of the model's outputs is its prediction."),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]


class Dtype(StrEnum):
    """How activations are stored."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Schedule(StrEnum):
    """How the learning rate goes down."""

    COSINE = "cosine"
    PLATEAU = "plateau"
    NONE = "none"


class Statistics(StrEnum):
    """What running statistics do while a backbone is trained."""

    FROZEN = "frozen"
    TRAIN = "train"


class TaskKind(StrEnum):
    """What is predicted."""

    AUTO = "auto"
    BINARY = "binary"
    MULTICLASS = "multiclass"
    MULTILABEL = "multilabel"
    REGRESSION = "regression"


SplitOption = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="FILE|SPEC",
        help="official, random, stratified, scaffold, kfold:K, a splits file or a folder.",
    ),
]
SplitSeedOption = Annotated[int, typer.Option("--split-seed", help="Seed of a split that is made.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
