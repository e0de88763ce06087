"""What a finished run is, as text: from its small files, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ..heads.registry import HEADS
from ..splits.types import PARTS
from ..utils.specifications import Specification
from ..utils.text import MISSING, difference, metric_name, plural
from .run import Run


def counted(run: Run) -> str:
    """Return over how many folds and seeds a run went."""
    folds = {fit["fold"] for fit in run.results["fits"]}
    seeds = {fit["seed"] for fit in run.results["fits"]}
    return f"{plural(len(folds), 'fold')} and {plural(len(seeds), 'seed')}"


def predicts_with(stored: Mapping[str, Any]) -> str:
    """Return which heads a run predicts with, as ``head.json`` has them."""
    members = stored.get("members", [stored])
    if len(members) == 1:
        return f"{stored['head']} of fold {stored['fold']}, seed {stored['seed']}"
    counts = {part: len({member[part] for member in members}) for part in ("fold", "seed")}
    several = [plural(count, part) for part, count in counts.items() if count > 1]
    return f"the mean of {len(members)} {stored['head']} heads ({', '.join(several)})"


# --- is the head worth it

#: Of a difference: what its 95 % interval is over.
_UNITS = {"folds": "folds", "seeds": "seeds", "rows": "test rows"}

Verdict = Literal["better", "undecided", "worse"]


def reported(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what counts of a readout's results: the seeds averaged, where there are several."""
    averaged: Mapping[str, Any] | None = row.get("averaged")
    return row if averaged is None else averaged


def own_verdict(results: Mapping[str, Any]) -> Verdict | None:
    """Return whether the backbone's own readout is better or worse than the head of a run.

    It is undecided where the interval of their difference holds zero; None without an interval.
    """
    found = _versus_own(results)
    if found is None or found["low"] is None:
        return None
    sign = 1 if results["higher_is_better"] else -1
    low, high = sorted((sign * found["low"], sign * found["high"]))
    return "worse" if low > 0 else "better" if high < 0 else "undecided"


def own_verdict_text(
    results: Mapping[str, Any], shown: Callable[[Mapping[str, Any]], str] = difference
) -> str | None:
    """Return the verdict on the backbone's own readout as a line; None where there is none.

    Args:
        results: ``results.json`` of a run.
        shown: Writes a difference with its interval.
    """
    verdict, head = own_verdict(results), results["head"]
    if verdict is None:
        return None
    said = {
        "better": f"keep your own readout rather than {head}",
        "undecided": f"undecided whether {head} is better than your own readout",
        "worse": f"{head} is better than your own readout",
    }[verdict]
    found = _versus_own(results)
    assert found is not None  # there is a verdict
    lower = "" if results["higher_is_better"] else "; lower is better"
    return f"{said}: {shown(found)}{interval_text(found)}{lower}"


def interval_text(found: Mapping[str, Any]) -> str:
    """Return what the interval of a difference is over."""
    unit = _UNITS.get(found.get("over", ""))
    return "" if found["low"] is None or unit is None else f" over {found['count']} {unit}"


def _versus_own(results: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = reported(results["readouts"][results["head"]])["versus_own"]
    return found


def facts(run: Run) -> list[tuple[str, str]]:
    """Return what was trained, on what, with which hashes, as names and values."""
    stored, backbone = run.stored_head, run.backbone
    plan = {**run.plan.get("frozen", {}), **run.plan}  # other stages wrap the head stage's
    layers = backbone.capture.names
    checkpoint = backbone.model.checkpoint
    description = HEADS[stored["head"]].description if stored["head"] in HEADS else MISSING
    return [
        ("task", _task(run.results["task"])),
        ("targets", _some(stored["target_names"])),
        ("metric", metric_name(run.results["metric"])),
        ("data", _with_args(backbone.data)),
        ("data fingerprint", backbone.data.fingerprint),
        ("model", _with_args(backbone.model)),
        ("checkpoint", "handed over in memory" if checkpoint is None else checkpoint.name),
        ("weights sha256", _weights(run)),
        ("layers", f"{len(layers)}: {_some(layers, 8)}"),
        ("splits", _splits(run)),
        ("head", f"{stored['head']}: {description}"),
        ("head options", _pairs(stored["config"], leave_out=("in_dims", "out_dim", "level"))),
        ("best fit", f"fold {stored['fold']}, seed {stored['seed']}, by validation"),
        ("predicts with", predicts_with(stored)),
        ("temperature", f"{stored.get('temperature', 1.0):.4g}, from the validation part"),
        ("training", _training(run.results.get("tuning", plan))),
        ("seeds", _some([str(value) for value in plan.get("seeds", [])], 10)),
        ("standardised layers", _value(bool(stored["standardize"]))),
        ("warm start", _value(bool(plan.get("warm_start")))),
    ]


def _task(task: Mapping[str, Any]) -> str:
    kind = {"multiclass": "multi-class", "multilabel": "multi-label"}
    said = f"{kind.get(task['kind'], task['kind'])}, {task['level']} level"
    if task["kind"] == "multiclass":
        said += f", {len(task['classes'])} classes"
    return said if task["num_targets"] == 1 else f"{said}, {task['num_targets']} targets"


def _weights(run: Run) -> str:
    own = run.backbone.model.weights_sha256
    every = run.plan.get("weights", [own])
    if len(every) == 1:
        return own
    return f"{own} (chosen fold); per fold: {', '.join(value[:12] for value in every)}"


def _splits(run: Run) -> str:
    splits = run.splits
    parts = {part: [len(getattr(fold, part)) for fold in splits.folds] for part in PARTS}
    sizes = ", ".join(f"{part} {_range(counts)}" for part, counts in parts.items())
    seed = "" if splits.seed is None else f", seed {splits.seed}"
    folds = plural(len(splits.folds), "fold")
    return f"{splits.kind}{seed}, {folds}: {sizes} {splits.unit}s"


def ranked_trials(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the trials of a search that have a score, as ``results.json`` has them, best first."""
    scored = [trial for trial in results["tuning"]["trials"] if trial["score"] is not None]
    return sorted(scored, key=lambda trial: trial["score"], reverse=results["higher_is_better"])


def _range(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _with_args(named: Specification) -> str:
    return f"{named.spec} ({_pairs(named.args)})" if named.args else named.spec


def _training(plan: Mapping[str, Any]) -> str:
    """Return how all were trained, and which readouts had a learning rate of their own."""
    rates = {f"lr of {name}": lr for name, lr in plan.get("lrs", {}).items()}
    return _pairs({**plan.get("training", {}), **rates})


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


def _some(items: Sequence[str], shown: int = 6) -> str:
    more = f", ... ({len(items)} in all)" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more or MISSING
