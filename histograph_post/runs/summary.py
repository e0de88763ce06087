"""What a finished run is, in words: read from its small files, without torch."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from ..errors import ConfigError, NotFoundError
from ..heads.registry import HEADS
from ..utils.text import MISSING, metric_name, plural
from .run import CONFIG_NAME, HEAD_CONFIG_NAME, RESULTS_NAME, RUN_NAME, SPLITS_NAME, read_json

#: Entries of the results that every run has.
_RESULTS = ("task", "metric", "higher_is_better", "head", "readouts", "fits")

#: Arguments of a command that have no flag.
_POSITIONAL = ("cache", "source")

#: Options that are on unless they are turned off.
_SWITCHES = ("standardize", "normalize", "baseline")


@dataclass(frozen=True)
class RunSummary:
    """The small files of a run folder, or of a folder of compared readouts, which is the same."""

    folder: Path
    results: Mapping[str, Any]
    #: All that the result depends on; empty for a run that does not say.
    plan: Mapping[str, Any]
    #: The options of the command; None for a run that was started from Python.
    config: Mapping[str, Any] | None

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a run folder; one that is not finished is refused."""
        if not folder.is_dir():
            raise NotFoundError(f"{folder}: found no folder, expected a finished run")
        results = read_json(folder, RESULTS_NAME)
        missing = next((name for name in _RESULTS if name not in results), None)
        if missing is not None:
            raise ConfigError(
                f"{folder / RESULTS_NAME}: found no {missing!r}, expected the results of a run"
            )
        plan = read_json(folder, RUN_NAME) if (folder / RUN_NAME).is_file() else {}
        return cls(folder, results, plan, _read_config(folder / CONFIG_NAME))

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def head(self) -> str:
        """What the fits that the run is about are called."""
        return str(self.results["head"])

    @cached_property
    def stored_head(self) -> Mapping[str, Any]:
        """``head.json``: the head that was chosen, and its backbone."""
        return read_json(self.folder, HEAD_CONFIG_NAME)

    def counted(self) -> str:
        """Return over how many folds and seeds the run went."""
        folds = {fit["fold"] for fit in self.results["fits"]}
        seeds = {fit["seed"] for fit in self.results["fits"]}
        return f"{plural(len(folds), 'fold')} and {plural(len(seeds), 'seed')}"

    def facts(self) -> list[tuple[str, str]]:
        """Return what was trained, on what, with which hashes, as names and values."""
        stored, backbone = self.stored_head, self.stored_head["backbone"]
        plan = {**self.plan.get("frozen", {}), **self.plan}  # other stages wrap the head stage's
        layers = [point["name"] for point in backbone["capture"]["points"]]
        description = HEADS[stored["head"]].description if stored["head"] in HEADS else MISSING
        return [
            ("task", self._task()),
            ("targets", _some(stored["target_names"])),
            ("metric", metric_name(self.results["metric"])),
            ("data", _with_args(backbone["data"])),
            ("data fingerprint", backbone["data"]["fingerprint"]),
            ("model", _with_args(backbone["model"])),
            ("checkpoint", backbone["checkpoint"] or "handed over in memory"),
            ("weights sha256", self._weights()),
            ("layers", f"{len(layers)}: {_some(layers, 8)}"),
            ("splits", self._splits()),
            ("head", f"{stored['head']}: {description}"),
            ("head options", _pairs(stored["config"], leave_out=("in_dims", "out_dim", "level"))),
            ("chosen fit", f"fold {stored['fold']}, seed {stored['seed']}, by validation"),
            ("training", _pairs(self.results.get("tuning", plan).get("training", {}))),
            ("seeds", _some([str(value) for value in plan.get("seeds", [])], 10)),
            ("standardised layers", _value(bool(stored["standardize"]))),
            ("warm start", _value(bool(plan.get("warm_start")))),
        ]

    def _task(self) -> str:
        task = self.results["task"]
        kind = {"multiclass": "multi-class", "multilabel": "multi-label"}
        said = f"{kind.get(task['kind'], task['kind'])}, {task['level']} level"
        if task["kind"] == "multiclass":
            said += f", {len(task['classes'])} classes"
        return said if task["num_targets"] == 1 else f"{said}, {task['num_targets']} targets"

    def _weights(self) -> str:
        own = str(self.stored_head["backbone"]["weights_sha256"])
        every = self.plan.get("weights", [own])
        if len(every) == 1:
            return own
        return f"{own} (chosen fold); per fold: {', '.join(value[:12] for value in every)}"

    def _splits(self) -> str:
        splits = read_json(self.folder, SPLITS_NAME)
        folds = splits["folds"]
        sizes = ", ".join(
            f"{part} {_range([len(fold[part]) for fold in folds])}" for part in folds[0]
        )
        seed = "" if splits["seed"] is None else f", seed {splits['seed']}"
        return f"{splits['kind']}{seed}, {plural(len(folds), 'fold')}: {sizes} {splits['unit']}s"

    def command(self) -> str:
        """Return the command that gives this run again, or the call, as a user would write it."""
        if self.config is None:
            return self._python_call()
        name = self._command_name()
        words = ["histograph", name]
        words += [str(self.config[each]) for each in _POSITIONAL if each in self.config]
        for option, value in self.config.items():
            if option not in _POSITIONAL:
                words += _flags(option, value)
        saved = shlex.quote(str(self.folder / CONFIG_NAME))
        return (
            f"{shlex.join(words)}\n\n# the same, from the saved options\n"
            f"histograph {name} --config {saved}"
        )

    def _command_name(self) -> str:
        stage = self.plan.get("stage")
        if stage is not None:
            return str(stage) if stage in ("finetune", "tune") else "pretrain"
        return "train-head" if "head" in (self.config or {}) else "compare"

    def _python_call(self) -> str:
        head = next((h for h in self.plan.get("heads", []) if h["name"] == self.head), None)
        options = {} if head is None else head["options"]
        cache = Path(self.stored_head["backbone"]["cache"]).name
        arguments = [
            repr(cache),
            repr(self.name),
            f"head={self.head!r}",
            f"seeds={tuple(self.plan.get('seeds', (0,)))!r}",
            f"training=hg.TrainingOptions(**{dict(self.plan.get('training', {}))!r})",
            *(f"{name}={value!r}" for name, value in options.items()),
        ]
        return f"import histograph_post as hg\n\nhg.train_head({', '.join(arguments)})"


def ranked_trials(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the trials of a search that have a score, as ``results.json`` has them, best first."""
    scored = [trial for trial in results["tuning"]["trials"] if trial["score"] is not None]
    return sorted(scored, key=lambda trial: trial["score"], reverse=results["higher_is_better"])


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run, finished or not."""
    return (folder / RUN_NAME).is_file() or (folder / RESULTS_NAME).is_file()


def _read_config(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file ({error})") from None


def _flags(name: str, value: Any) -> list[str]:
    flag = "-o" if name == "out" else f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{name}"] if name in _SWITCHES else []
    if isinstance(value, list):
        return [word for item in value for word in (flag, str(item))]
    return [flag, str(value)]


def _range(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _with_args(source: Mapping[str, Any]) -> str:
    return f"{source['spec']} ({_pairs(source['args'])})" if source["args"] else source["spec"]


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
