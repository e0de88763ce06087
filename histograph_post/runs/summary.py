"""A finished run as tables and text, and the commands that reproduce it; without torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, HistographError
from ..heads.registry import HEADS
from ..splits import PARTS
from ..utils.decoding import read_toml_file
from ..utils.specifications import Specification
from ..utils.text import MISSING, folded_command, metric_name, plural
from .run import CONFIG_NAME, Run, is_run
from .verdict import OWN, by_validation, reported, validation_of, verdict_of

# --- the table of readouts, in the terminal and in the report


def ranked_names(results: Mapping[str, Any]) -> list[str]:
    """Return the readouts of a run, the best by validation first.

    A checkpoint's own readout without a score there comes before them.
    """
    scored: dict[str, tuple[float | None, int]] = {}
    for name, row in results["readouts"].items():
        valid = validation_of(row)
        scored[name] = None if valid is None else valid["mean"], row.get("num_parameters") or 0
    names = by_validation(scored, higher=results["higher_is_better"])
    return sorted(names, key=lambda name: name != OWN or scored[name][0] is not None)


def bold_row(results: Mapping[str, Any]) -> tuple[str, str]:
    """Return the best readout, and a sentence that says how it was chosen."""
    verdict = verdict_of(results)
    if verdict.decision == "keep":
        return OWN, "Bold: the readout that the verdict keeps."
    names = [name for name in ranked_names(results) if name != OWN]
    saved = [name for name in names if not results["readouts"][name].get("compared_only")]
    if validation_of(results["readouts"][saved[0]]) is None:
        return str(results["head"]), "Bold: the readout that the run predicts with."
    if verdict.decision == "use" and verdict.readout != saved[0]:
        return verdict.readout, "Bold: the readout that the verdict names."
    best = [validation_of(results["readouts"][name]) for name in saved[:2]]
    tied = len(best) > 1 and best[1] and best[0] and best[0]["mean"] == best[1]["mean"]
    equals = ", of equals the one with fewest parameters" if tied else ""
    return saved[0], f"Bold: the best by validation{equals}."


def about_intervals(results: Mapping[str, Any]) -> str:
    """Return how the intervals of the differences are computed, for the caption of a table."""
    rows = [reported(row) for row in results["readouts"].values()]
    found = [
        row[name]
        for row in rows
        for name in ("versus_own", "versus_baseline")
        if row.get(name) and row[name]["low"] is not None
    ]
    if not found:
        return "without intervals"
    over = found[0].get("over", "folds")
    text = {
        "rows": "95 % intervals come from a paired bootstrap over the test rows, and say nothing "
        "about other splits",
        "seeds": "95 % intervals are Student's, paired by seed",
        "folds": "95 % intervals are Student's, paired by fold, and somewhat too narrow, since "
        "folds share training data",
    }[over]
    if found[0].get("rows"):
        text += "; nothing is decided unless a paired bootstrap over their test rows agrees"
    return text


# --- what was trained


def counted(run: Run) -> str:
    """Return the number of folds and seeds of a run."""
    folds = {fit["fold"] for fit in run.results["fits"]}
    seeds = {fit["seed"] for fit in run.results["fits"]}
    return f"{plural(len(folds), 'fold')} and {plural(len(seeds), 'seed')}"


def readout_rows(run: Run) -> list[dict[str, Any]]:
    """Return a row per readout: its scores, and its difference to the own readout."""
    found = []
    for name in ranked_names(run.results):
        row = run.results["readouts"][name]
        counts, valid = reported(row), validation_of(row)
        test, versus = counts["test"] or {}, counts.get("versus_own") or {}
        found.append(
            {
                "readout": name,
                "valid": None if valid is None else valid["mean"],
                "test": test.get("mean"),
                "single_fits": (row["test"] or {}).get("mean"),
                "deviation": (row["test"] or {}).get("deviation"),
                **{f"versus_own_{part}": versus.get(part) for part in ("mean", "low", "high")},
                "over": versus.get("over"),
                "parameters": row["num_parameters"],
            }
        )
    return found


def fit_rows(run: Run) -> list[dict[str, Any]]:
    """Return a row per fit: readout, fold, seed, and every score as ``part_metric``."""
    return [
        {
            **{"readout": fit["head"], "fold": fit["fold"], "seed": fit["seed"]},
            "best_epoch": fit["best_epoch"],
            **{
                f"{part}_{metric}": score
                for part, scores in fit["scores"].items()
                for metric, score in scores.items()
            },
        }
        for fit in run.results["fits"]
    ]


def predicts_with(run: Run) -> str:
    """Return which heads a run, or an export of it, predicts with."""
    stored = run.stored_head
    name = run.head if is_run(run.folder) else stored["head"]
    members = stored.get("members", [stored])
    if len(members) == 1:
        return f"{name} of fold {stored['fold']}, seed {stored['seed']}"
    counts = {part: len({member[part] for member in members}) for part in ("fold", "seed")}
    several = [plural(count, part) for part, count in counts.items() if count > 1]
    return f"{len(members)} `{name}` heads averaged ({', '.join(several)})"


def facts(run: Run) -> list[tuple[str, str]]:
    """Return what was trained, on what data, with hashes, as names and values."""
    stored, backbone = run.stored_head, run.backbone
    plan = {**run.plan.get("frozen", {}), **run.plan}  # other stages contain the head stage's
    layers = backbone.capture.names
    checkpoint = backbone.model.checkpoint
    name = str(stored["head"])
    own = ", ".join(["custom readout", *([run.own_heads[name]] if name in run.own_heads else [])])
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
        ("head", f"{name}: {HEADS[name].description if name in HEADS else own}"),
        ("head options", _pairs(stored["config"], leave_out=("in_dims", "out_dim", "level"))),
        ("best fit", f"fold {stored['fold']}, seed {stored['seed']}, by validation"),
        ("predicts with", predicts_with(run)),
        *_temperature(run),
        ("training", _training(run.results.get("tuning", plan))),
        ("seeds", _some([str(value) for value in plan.get("seeds", [])], 10)),
        ("standardised layers", _value(bool(stored["standardize"]))),
        ("warm start", _value(bool(plan.get("warm_start")))),
    ]


def _temperature(run: Run) -> list[tuple[str, str]]:
    if run.results.get("calibration") is None:
        return []
    return [("temperature", f"{run.stored_head['temperature']:.4g}, from the validation part")]


def _task(task: Mapping[str, Any]) -> str:
    kind = {"multiclass": "multi-class", "multilabel": "multi-label"}
    text = f"{kind.get(task['kind'], task['kind'])}, {task['level']} level"
    if task["kind"] == "multiclass":
        text += f", {len(task['classes'])} classes"
    return text if task["num_targets"] == 1 else f"{text}, {task['num_targets']} targets"


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
    """Return the trials of a search that have a score, the best first."""
    scored = [trial for trial in results["tuning"]["trials"] if trial["score"] is not None]
    return sorted(scored, key=lambda trial: trial["score"], reverse=results["higher_is_better"])


def _range(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _with_args(named: Specification) -> str:
    return f"{named.spec} ({_pairs(named.args)})" if named.args else named.spec


def _training(plan: Mapping[str, Any]) -> str:
    """Return the training options, and the learning rates of readouts that have their own."""
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


# --- how to repeat a run: every command from the checkpoint on

#: Arguments of a command that have no flag.
_POSITIONAL = ("cache", "source", "folder")

#: Options that are on by default.
_SWITCHES = ("standardize", "normalize", "baseline", "calibrate")


def repeat_commands(run: Run) -> str:
    """Return the commands, or Python calls, that reproduce a run: ``cache`` first."""
    steps = [
        folded_command(step) if step.startswith("histograph") else step
        for step in (*_steps_before(run), run_command(run))
    ]
    if run.config is not None:
        saved = shlex.quote(str(run.folder / CONFIG_NAME))
        last = folded_command(f"histograph {run.kind} --config {saved}")
        steps.append(f"# the last one, from its saved options\n{last}")
    return "\n\n".join(steps)


def _steps_before(run: Run) -> list[str]:
    """Return the commands of what the run started from: a cache, or the run it continues."""
    if run.kind == "pretrain":
        return []
    before = _run_before(run)
    if before is not None:
        return [*_steps_before(before), run_command(before)]
    folder = run.backbone.cache
    source = Path(str((run.config or {}).get("source", folder)))
    missing = [f"# then the run {source}, which was not found"]
    then = [] if source.name in folder.parts else missing
    try:
        options = read_toml_file(folder / CONFIG_NAME)
    except (ConfigError, OSError):
        weights = run.backbone.model.weights_sha256[:12]
        if run.config is not None:
            return [f"# first, a cache of the weights {weights}... as {folder.name}", *then]
        data = run.backbone.data.spec
        call = f"hg.cache(model, hg.load_data({data!r}), {folder.name!r})"
        return [f"import histograph_post as hg\n\n{call}  # a model with weights {weights}..."]
    return [_typed("cache", options), *then]


def _run_before(run: Run) -> Run | None:
    """Return the run that this one continues, if it is still there."""
    source = (run.config or {}).get("source")
    try:
        return None if source is None else Run.open(Path(str(source))).require_readouts()
    except HistographError:
        return None


def run_command(run: Run) -> str:
    """Return the command, or Python call, that reproduces a run from what it started from."""
    return _python_call(run) if run.config is None else _typed(run.kind, run.config)


def _typed(name: str, options: Mapping[str, Any]) -> str:
    """Return a command with its resolved options."""
    words = ["histograph", name, *(str(options[each]) for each in _POSITIONAL if each in options)]
    for option, value in options.items():
        if option not in _POSITIONAL:
            words += _flags(option, value)
    return shlex.join(words)


def _python_call(run: Run) -> str:
    head = next((h for h in run.plan.get("heads", []) if h.get("name") == run.head), None)
    options = {} if head is None else head.get("options", {})
    compared = [each.get("name", "") for each in run.plan.get("heads", [])]
    arguments = [
        repr(run.backbone.cache.name),
        repr(run.name),
        f"heads={compared!r}" if run.kind == "compare" else f"head={run.head!r}",
        f"seeds={tuple(run.plan.get('seeds', (0,)))!r}",
        f"training=hg.TrainingOptions(**{dict(run.plan.get('training', {}))!r})",
        *(f"{name}={value!r}" for name, value in options.items()),
    ]
    function = "compare" if run.kind == "compare" else "train_head"
    return f"hg.{function}({', '.join(arguments)})"


def _flags(name: str, value: Any) -> list[str]:
    flag = "-o" if name == "out" else f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{name}"] if name in _SWITCHES else []
    if isinstance(value, list):
        return [word for item in value for word in (flag, str(item))]
    return [flag, str(value)]
