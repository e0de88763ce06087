"""Run a study of readouts, in pieces and in any order, and show its results.

``python -m histograph_benchmarks.study study.toml --data-root DATA -o OUT`` fits what is missing
and writes ``OUT/results.csv``. What is done stays done, so a job that was killed is run again;
``--take-over results.csv`` continues from a table whose folder is gone.
``--validation`` shows validation scores, to choose by; only ``--render`` reads test scores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from histograph_post.errors import ConfigError, HistographError

from .plan import FULL, QUICK, Omission, Study, read_study
from .ranking import Part
from .table import RESULTS_NAME, read_csv


def _part(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not (slash and number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected I/N with I from 0 to N - 1")
    return int(number), int(count)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m histograph_benchmarks.study", description=__doc__)
    parser.add_argument("study", type=Path, metavar="FILE.toml", help="Cells and readouts.")
    parser.add_argument("-o", "--out", type=Path, required=True, help="Folder to write.")
    parser.add_argument("--data-root", type=Path, help="Data sets and checkpoints.")
    parser.add_argument("--budget", help=f"What to leave out; by default {FULL}: nothing.")
    parser.add_argument("--quick", action="store_true", help=f"As --budget {QUICK}.")
    parser.add_argument("--only", type=_names, default=["*"], help="Globs of cells, with commas.")
    parser.add_argument("--readouts", type=_names, help="Globs of readouts, with commas.")
    parser.add_argument("--part", type=_part, default=(0, 1), metavar="I/N", help="Job I of N.")
    parser.add_argument("--jobs", type=int, default=1, help="Fits at once, in processes.")
    parser.add_argument("--redo", type=_names, default=[], help="Readouts to fit again.")
    parser.add_argument("--take-over", type=Path, metavar="TABLE.csv", help="Rows that are done.")
    parser.add_argument("--list", action="store_true", help="Show what would be run.")
    parser.add_argument("--prepare", action="store_true", help="Only make backbones and caches.")
    parser.add_argument("--validation", action="store_true", help="Show validation scores.")
    parser.add_argument("--seeds", action="store_true", help="Show what more seeds gain.")
    parser.add_argument("--calibration", action="store_true", help="Show what temperatures do.")
    parser.add_argument("--render", type=Path, metavar="PAGE.md", help="Write the page.")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Run a study, or show it."""
    parser = _parser()
    chosen = parser.parse_args(words)
    try:
        _run(chosen)
    except HistographError as error:
        parser.exit(1, f"error: {error}\n")


def _others(study: Study, patterns: Sequence[str]) -> list[str]:
    """Return the readouts that match no pattern."""
    names = [readout.name for readout in study.readouts]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"readouts: found {pattern!r}, expected some of {', '.join(names)}")
    return [name for name in names if not any(fnmatchcase(name, each) for each in patterns)]


def _run(chosen: argparse.Namespace) -> None:
    study = read_study(chosen.study)
    if chosen.quick and chosen.budget not in (None, QUICK):
        raise ConfigError(f"budget: found {chosen.budget!r} and --quick, expected one of them")
    name = chosen.budget or (QUICK if chosen.quick else FULL)
    budget = study.budget(name)
    out = chosen.out / name if budget.changes_fits else chosen.out
    if chosen.readouts is not None:
        others = Omission(("*",), tuple(_others(study, chosen.readouts)))
        budget = replace(budget, omit=(*budget.omit, others))
    part: Part = "test" if study.inner else "valid"
    if chosen.take_over is not None:
        from .running import take_over

        rows = read_csv(chosen.take_over, test=True)
        print(take_over(study, budget, out, rows))
        return
    if chosen.seeds or chosen.calibration:
        from .outputs import calibration_view, seeds_view

        print(seeds_view(out, part) if chosen.seeds else calibration_view(out, part))
        return
    if chosen.validation or chosen.render is not None:
        from .page import validation_view, write_page

        reads_test = part == "test" or chosen.render is not None
        rows = read_csv(out / RESULTS_NAME, test=reads_test)
        if chosen.validation:
            print(validation_view(rows, part))
        if chosen.render is not None:
            write_page(rows, chosen.render, study.notes)
        return
    units = study.units(budget, only=chosen.only, part=chosen.part)
    if chosen.list:
        for unit in units:
            named = [settings.readout for settings in study.settings(unit.cell, budget)]
            print(f"{unit.name}: {', '.join(named)}")
        return
    if chosen.data_root is None:
        raise ConfigError("data-root: found none, expected the folder of data and checkpoints")
    from .materials import Materials
    from .running import Runner

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    materials = Materials(study, chosen.study, budget, out, chosen.data_root, log)
    if chosen.prepare:
        for unit in units:
            materials.cache(unit)
            materials.split(unit)
        return
    print(Runner(materials, chosen.jobs, chosen.redo, log).run(units))


if __name__ == "__main__":
    main()
