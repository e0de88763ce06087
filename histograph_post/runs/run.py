"""The run folder: what was asked for, what came out, and everything needed to use it.

config.toml       the options, resolved; can be given as --config
run.json          what the result depends on; a run goes on only if it is the same
splits.json       which rows trained, validated and tested
metrics.jsonl     a line per epoch of every fit
results.json      scores per fit, means, deviations and paired differences
predictions.csv   the outputs for the test rows
head.safetensors  the chosen head, and head.json, how to build it
model.safetensors its backbone, where that was trained too, and fold-0/ ..., one of every fold
fits/             every fit: readout, fold and seed
tensorboard/      event files, if they were asked for
study.log         the trials of a search, trials.csv, the same as a table, best.toml, the best
                  options, and trials/, fits of a trial that is not over
report.html       the report, once it has been asked for
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, OutputExistsError
from ..utils.files import require_folder, to_json, write_config, write_json, write_text

CONFIG_NAME = "config.toml"
RUN_NAME = "run.json"
SPLITS_NAME = "splits.json"
METRICS_NAME = "metrics.jsonl"
RESULTS_NAME = "results.json"
PREDICTIONS_NAME = "predictions.csv"
HEAD_NAME = "head.safetensors"
HEAD_CONFIG_NAME = "head.json"
REPORT_NAME = "report.html"
MODEL_NAME = "model.safetensors"
FITS_NAME = "fits"
EVENTS_NAME = "tensorboard"
STUDY_NAME = "study.log"
TRIALS_NAME = "trials.csv"
BEST_NAME = "best.toml"
TRIAL_FITS_NAME = "trials"

_FILES = (
    CONFIG_NAME,
    RUN_NAME,
    SPLITS_NAME,
    METRICS_NAME,
    RESULTS_NAME,
    PREDICTIONS_NAME,
    HEAD_NAME,
    HEAD_CONFIG_NAME,
    MODEL_NAME,
    REPORT_NAME,
    STUDY_NAME,
    f"{STUDY_NAME}.lock",
    TRIALS_NAME,
    BEST_NAME,
)


#: Characters of a value that an error shows.
_SHORT = 40


def open_run_folder(
    folder: Path,
    plan: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Make a folder ready for a run; go on with a run that has the same plan.

    Args:
        folder: Where the run goes.
        plan: All that the result depends on, as plain values.
        config: The options this came from, saved beside it.
        overwrite: Replace another run in that folder.
    """
    text = to_json(dict(plan))
    require_folder(folder)
    marker = folder / RUN_NAME
    if folder.is_dir() and any(folder.iterdir()):
        if not marker.is_file():
            raise OutputExistsError(
                f"{folder}: found files that are not a run's; choose another -o"
            )
        if overwrite:
            _clear(folder)
        elif marker.read_text(encoding="utf-8") != text:
            found = json.loads(marker.read_text(encoding="utf-8"))
            changed = _first_difference(found, json.loads(text))
            raise OutputExistsError(
                f"{folder}: found a run with {changed}; choose another -o, or --overwrite"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(marker, text)
    if config is not None:
        write_config(folder / CONFIG_NAME, config)


def _clear(folder: Path) -> None:
    """Remove what a run wrote, and nothing else."""
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    for name in (FITS_NAME, EVENTS_NAME, TRIAL_FITS_NAME):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)


def _first_difference(found: Any, expected: Any, name: str = "") -> str:
    """Say where two plans differ first, and in what."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))
        place = f"{name} {keys[0]}" if name else keys[0]
        return _first_difference(found.get(keys[0]), expected.get(keys[0]), place)
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = zip(found, expected, strict=True)
        return next(_first_difference(*pair, name) for pair in pairs if pair[0] != pair[1])
    texts = [json.dumps(value) for value in (found, expected)]
    if any(len(text) > _SHORT for text in texts):
        return f"another {name}"
    return f"{name} {texts[0]}, expected {texts[1]}"


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    #: ``results.json``.
    results: Mapping[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open a run folder; one that is not finished is refused."""
        return cls(Path(folder), read_json(Path(folder), RESULTS_NAME))


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read one of a run's JSON files."""
    path = folder / name
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "; give the same command again to finish it" if (folder / RUN_NAME).is_file() else ""
        raise ConfigError(f"{folder}: found no {name}, expected a finished run{hint}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a JSON file ({error})") from None
    return value


def write_results(folder: Path, results: Mapping[str, Any]) -> None:
    """Write ``results.json``, which makes a run complete."""
    write_json(folder / RESULTS_NAME, dict(results))
