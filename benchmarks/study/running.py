"""From the cells of a study to the rows of its table."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import histograph_post as hg
from histograph_post.errors import ConfigError
from histograph_post.metrics import LOWER_IS_BETTER
from histograph_post.runs.fits import FIT_NAME, OUTPUTS_NAME
from histograph_post.utils.files import load_arrays

from .materials import Materials
from .plan import Budget, Settings, Study, Unit
from .table import AVERAGED, OWN, Row, find_piece, join_pieces, write_piece


@dataclass
class Runner:
    """Fits what is missing of a study, a unit at a time."""

    materials: Materials
    #: Fits at once, each in a process of its own.
    jobs: int = 1
    #: Readouts that are fitted again.
    redo: Collection[str] = ()
    #: Called with a line after each step.
    log: Callable[[str], None] = print

    def run(self, units: Sequence[Unit]) -> Path:
        """Fit every readout that is missing on these units; return the table."""
        for number, unit in enumerate(units, start=1):
            self.run_unit(unit, f"[{number}/{len(units)}] ")
        return join_pieces(self.materials.out)

    def run_unit(self, unit: Unit, prefix: str = "") -> None:
        """Fit the readouts that are missing on one unit, those that are trained alike together."""
        made, cell = self.materials, unit.cell
        missing = [
            settings
            for settings in made.study.settings(cell, made.budget)
            if settings.readout in self.redo
            or not find_piece(made.out, unit.name, settings.readout, asdict(settings))
        ]
        if not missing:
            return
        cache, split = made.cache(unit), made.split(unit)
        own = self._own_row(unit, cache)
        if own is not None:
            write_piece(made.out, unit.name, OWN, {}, [own])
        groups: dict[str, list[Settings]] = {}
        for settings in missing:
            groups.setdefault(_alike(settings), []).append(settings)
        for group in groups.values():
            started = time.monotonic()
            run = self._compare(unit, cache, split, group)
            for settings in group:
                rows = rows_of(run, unit, settings, cache)
                write_piece(made.out, unit.name, settings.readout, asdict(settings), rows)
            named = ", ".join(settings.readout for settings in group)
            self.log(f"{prefix}{unit.name}: {named}, {time.monotonic() - started:.0f} s")
        join_pieces(made.out)

    def _compare(
        self, unit: Unit, cache: hg.Cache, split: Path, group: Sequence[Settings]
    ) -> hg.Run:
        """Train readouts that share all settings but their names."""
        first = group[0]
        again = any(settings.readout in self.redo for settings in group)
        key = json.dumps([asdict(settings) for settings in group], sort_keys=True)
        folder = hashlib.sha256(key.encode()).hexdigest()[:12]
        return hg.compare(
            cache,
            self.materials.out / "runs" / unit.name / folder,
            heads=[settings.head for settings in group],
            head_options=first.options,
            seeds=first.seeds,
            split=str(split),
            metric=first.metric,
            training=first.training,
            jobs=self.jobs,
            overwrite=again,
        )

    def _own_row(self, unit: Unit, cache: hg.Cache) -> Row | None:
        """Return the scores of the checkpoint's own readout; None where it has none."""
        own = cache.manifest.own_metrics
        if own is None or unit.cell.checkpoint.weights is not None:
            return None
        scores, metric = own["folds"][0], unit.cell.data.metric
        return _row(unit, OWN, AVERAGED, scores["valid"][metric], scores["test"][metric])


def take_over(study: Study, budget: Budget, out: Path, rows: Sequence[Row]) -> Path:
    """Count the rows of a table as done, as if they had been fitted in this folder; join them.

    The table does not record settings: the caller must know that the study and the code have not
    changed. A fold with a network of its own is taken over only if nothing is missing on it:
    missing readouts would be fitted on another network.
    """
    cells = {cell.name: cell for cell in study.all_cells()}
    units: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for row in rows:
        units.setdefault((row.cell, row.fold), {}).setdefault(row.readout, []).append(row)
    for (name, fold), found in units.items():
        if name not in cells:
            raise ConfigError(f"table: found the cell {name!r}, expected some of the study")
        cell = cells[name]
        asked = {settings.readout for settings in study.settings(cell, budget)}
        if cell.checkpoint.weights is None and not asked <= found.keys():
            continue
        everything = {settings.readout: settings for settings in study.settings(cell, Budget())}
        for readout, members in found.items():
            settings = {} if readout == OWN else asdict(everything[readout])
            write_piece(out, Unit(cell, fold).name, readout, settings, members)
    return join_pieces(out)


def _alike(settings: Settings) -> str:
    """Return a key of the settings that readouts of one run share: all but their names."""
    shared = {**asdict(settings), "readout": None, "head": None}
    # One run cannot train the same readout twice, under two names.
    if settings.readout != settings.head:
        shared["readout"] = settings.readout
    return json.dumps(shared, sort_keys=True)


def rows_of(run: hg.Run, unit: Unit, settings: Settings, cache: hg.Cache) -> list[Row]:
    """Return a row per seed, and one for the seeds averaged."""
    valid, test = (run.scores(settings.head, part) for part in ("valid", "test"))
    parameters = run.results["readouts"][settings.head]["num_parameters"]
    rows = []
    for fit in run.results["fits"]:
        if fit["head"] != settings.head:
            continue
        key = (fit["fold"], fit["seed"])
        more = {
            "epochs": fit["epochs"],
            "best_epoch": fit["best_epoch"],
            "seconds": _seconds(run.fit_folder(settings.head, *key)),
            "parameters": parameters,
        }
        scores = (valid.get(key), test.get(key))
        rows.append(_row(unit, settings.readout, str(fit["seed"]), *scores, **more))
    averaged = averaged_scores(run, settings.head, cache)
    seconds = [row.seconds for row in rows if row.seconds is not None]
    more = {"seconds": sum(seconds) if seconds else None, "parameters": parameters}
    scores = (averaged.get("valid"), averaged.get("test"))
    return [*rows, _row(unit, settings.readout, AVERAGED, *scores, **more)]


def averaged_scores(run: hg.Run, head: str, cache: hg.Cache) -> dict[str, float]:
    """Return the validation and test score of the mean output of all seeds, as a run predicts."""
    folders = [run.fit_folder(head, fold, seed) for fold, seed in run.scores(head, "test")]
    fits = [load_arrays(folder / OUTPUTS_NAME) for folder in folders]
    labels, found = cache.labels(), {}
    for part, prefix in (("valid", "valid_"), ("test", "")):
        rows = fits[0][f"{prefix}rows"]
        outputs = np.mean([fit[f"{prefix}outputs"] for fit in fits], axis=0)  # [rows, out_dim]
        score = run.task.score(outputs, labels[rows])
        if score == score:
            found[part] = score
    return found


def _seconds(folder: Path) -> float | None:
    """Return the training time of a fit."""
    stored = json.loads((folder / FIT_NAME).read_text(encoding="utf-8"))
    return float(stored["seconds_per_epoch"] * stored["epochs"]) or None


def _row(
    unit: Unit,
    readout: str,
    seed: str,
    valid: float | None,
    test: float | None,
    **more: Any,
) -> Row:
    cell = unit.cell
    return Row(
        data=cell.data.name,
        checkpoint=cell.checkpoint.name,
        split=cell.split,
        fold=unit.fold,
        readout=readout,
        seed=seed,
        metric=cell.data.metric,
        higher_is_better=cell.data.metric not in LOWER_IS_BETTER,
        valid=valid,
        test=test,
        **more,
    )
