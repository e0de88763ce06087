"""What was trained, on what, with which hashes, and the command to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..heads.registry import HEADS
from ..run import CONFIG_NAME
from ..splits import PARTS
from .record import RunRecord
from .words import MISSING, metric_name, plural

#: Options of a command that are said first: what it reads and what it writes.
_POSITIONAL = ("cache", "source")

#: Options that are on unless they are turned off.
_SWITCHES = ("standardize", "normalize", "baseline")


def run_facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return what a run is, as names and values."""
    saved, task = record.saved, record.task
    plan = {**record.plan.get("frozen", {}), **record.plan}  # fine-tuning wraps the head stage's
    backbone = saved.backbone
    fold, seed = record.chosen
    return [
        ("task", _task(record)),
        ("targets", _some(saved.target_names)),
        ("metric", metric_name(task.metric)),
        ("data", _with_args(backbone.data, backbone.data_args)),
        ("data fingerprint", backbone.data_fingerprint),
        ("model", _with_args(backbone.model, backbone.model_args)),
        ("checkpoint", backbone.checkpoint or "handed over in memory"),
        *_weights(record),
        ("layers", f"{len(backbone.capture.points)}: {_some(_layer_names(record), 8)}"),
        ("splits", _splits(record)),
        ("head", f"{saved.name}: {HEADS[saved.name].description}"),
        ("head options", _pairs(saved.config, leave_out=("in_dims", "out_dim", "level"))),
        ("chosen fit", f"fold {fold}, seed {seed}, by validation"),
        ("training", _pairs(plan.get("training", {}))),
        ("seeds", _some([str(value) for value in plan.get("seeds", [])], 10)),
        ("standardised layers", "yes" if saved.standardize else "no"),
        ("warm start", "yes" if plan.get("warm_start") else "no"),
    ]


def _task(record: RunRecord) -> str:
    task = record.task
    kind = {"multiclass": "multi-class", "multilabel": "multi-label"}.get(task.kind, task.kind)
    said = f"{kind}, {task.level} level"
    if task.kind == "multiclass":
        said += f", {len(task.classes)} classes"
    return said if task.num_targets == 1 else f"{said}, {task.num_targets} targets"


def _weights(record: RunRecord) -> list[tuple[str, str]]:
    own = record.saved.backbone.weights_sha256
    every = record.plan.get("weights", [own])
    if len(every) == 1:
        return [("weights sha256", own)]
    shown = ", ".join(value[:12] for value in every)
    return [("weights sha256", f"{own} (chosen fold); per fold: {shown}")]


def _layer_names(record: RunRecord) -> list[str]:
    return [point.name for point in record.saved.backbone.capture.points]


def _splits(record: RunRecord) -> str:
    splits = record.splits
    sizes = ", ".join(
        f"{part} {_range([len(rows[at]) for rows in (f.parts for f in splits.folds)])}"
        for at, part in enumerate(PARTS)
    )
    seed = "" if splits.seed is None else f", seed {splits.seed}"
    return f"{splits.kind}{seed}, {plural(len(splits.folds), 'fold')}: {sizes} {splits.unit}s"


def _range(sizes: list[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _with_args(spec: str, args: Mapping[str, Any]) -> str:
    return f"{spec} ({_pairs(args)})" if args else spec


def _pairs(values: Mapping[str, Any], leave_out: tuple[str, ...] = ()) -> str:
    shown = [
        f"{name} {_value(value)}"
        for name, value in values.items()
        if name not in leave_out and value is not None
    ]
    return ", ".join(shown) or MISSING


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _some(items: list[str] | tuple[str, ...], shown: int = 6) -> str:
    more = f", ... ({len(items)} in all)" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more or MISSING


def repeat_command(record: RunRecord) -> str:
    """Return the command that gives this run again."""
    config = record.config
    if config is None:
        return _python_call(record)
    command = command_of(record)
    words = ["histograph", command, *(str(config[name]) for name in _POSITIONAL if name in config)]
    for name, value in config.items():
        if name not in _POSITIONAL:
            words += _option(name, value)
    return (
        f"{shlex.join(words)}\n\n# the same, from the saved options\n"
        f"histograph {command} --config {shlex.quote(str(record.folder / CONFIG_NAME))}"
    )


def command_of(record: RunRecord) -> str:
    """Return which command a run comes from."""
    stage = record.plan.get("stage")
    if stage is not None:
        return "finetune" if stage == "finetune" else "pretrain"
    return "train-head" if "head" in (record.config or {}) else "compare"


def _option(name: str, value: Any) -> list[str]:
    flag = "-o" if name == "out" else f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{name}"] if name in _SWITCHES else []
    if isinstance(value, list):
        return [word for item in value for word in (flag, str(item))]
    return [flag, str(value)]


def _python_call(record: RunRecord) -> str:
    plan = record.plan
    head = next((h for h in plan.get("heads", []) if h["name"] == record.head), None)
    options = "" if head is None else "".join(f", {k}={v!r}" for k, v in head["options"].items())
    cache = Path(record.saved.backbone.cache).name
    return (
        "import histograph_post as hg\n"
        "from histograph_post.training import TrainingOptions\n\n"
        f"hg.train_head({cache!r}, {record.name!r}, head={record.head!r}, "
        f"seeds={tuple(plan.get('seeds', (0,)))!r}, "
        f"training=TrainingOptions(**{dict(plan.get('training', {}))!r}){options})"
    )
