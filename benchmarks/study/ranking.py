"""The statistics of a study: scores of cells, ranks, and paired differences with intervals.

The units are cells: the folds of a cell share their data, so they are averaged first. Cells of one
data set are not independent either; beside every interval over cells stands one over data sets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from scipy import stats

from histograph_post.metrics import student_interval
from histograph_post.reporting.figures import (
    CHOSEN,
    INK,
    MUTED,
    PAPER,
    SETTINGS,
    require_matplotlib,
)
from histograph_post.utils.files import atomic_path

from .table import AVERAGED, OWN, Row

Part = Literal["valid", "test"]

#: Of intervals and of the critical difference.
LEVEL = 0.95

#: Digits of a score: the table has six, and equal means over folds may differ in the last one.
_DIGITS = 5


@dataclass(frozen=True)
class CellScores:
    """The scores of all readouts on one cell, means over its folds."""

    name: str
    data: str
    metric: str
    higher_is_better: bool
    folds: tuple[int, ...]
    #: Readout -> score; the checkpoint's own is not among them.
    scores: Mapping[str, float]
    own: float | None

    @property
    def sign(self) -> int:
        """One where a higher score is better, else minus one."""
        return 1 if self.higher_is_better else -1

    def ranks(self) -> dict[str, float]:
        """Return the rank of every readout, 1 for the best; equal ones share the mean of theirs."""
        names = list(self.scores)
        ranks = stats.rankdata([-self.sign * self.scores[name] for name in names])
        return dict(zip(names, map(float, ranks), strict=True))

    def best(self) -> list[str]:
        """Return the readouts with the best score."""
        top = max(self.sign * score for score in self.scores.values())
        return [name for name, score in self.scores.items() if self.sign * score == top]


def cell_scores(rows: Sequence[Row], part: Part, *, averaged: bool = True) -> list[CellScores]:
    """Return the scores of every cell, in the order of their names.

    A fold counts once every readout of its cell has been fitted on it, so that all are compared on
    the same rows.

    Args:
        rows: Of the table.
        part: Whose scores.
        averaged: Of the seeds' averaged predictions; else the mean over the scores of single seeds.
    """
    cells: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.readout == OWN or (row.seed == AVERAGED) == averaged:
            cells[row.cell].append(row)
    found = [_cell(name, members, part) for name, members in sorted(cells.items())]
    return [cell for cell in found if cell.scores]


def _cell(name: str, rows: Sequence[Row], part: Part) -> CellScores:
    values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        score = getattr(row, part)
        if score is not None:
            values[row.readout][row.fold].append(score)
    shared = [set(folds) for readout, folds in values.items() if readout != OWN]
    folds = sorted(set.intersection(*shared)) if shared else []
    means = {
        readout: round(float(np.mean([np.mean(of[fold]) for fold in folds])), _DIGITS)
        for readout, of in sorted(values.items())
        if folds and all(fold in of for fold in folds)
    }
    own = means.pop(OWN, None)
    first = rows[0]
    return CellScores(
        name, first.data, first.metric, first.higher_is_better, tuple(folds), means, own
    )


def readouts(cells: Sequence[CellScores]) -> list[str]:
    """Return every readout, best mean rank first."""
    ranks = mean_ranks(cells)
    return sorted(ranks, key=lambda name: (ranks[name], name))


def mean_ranks(cells: Sequence[CellScores]) -> dict[str, float]:
    """Return the mean rank of every readout over the cells that have it."""
    ranks: dict[str, list[float]] = defaultdict(list)
    for cell in cells:
        for name, rank in cell.ranks().items():
            ranks[name].append(rank)
    return {name: float(np.mean(values)) for name, values in ranks.items()}


def wins(cells: Sequence[CellScores]) -> dict[str, int]:
    """Return on how many cells each readout is the best, alone or with others."""
    return {name: sum(name in cell.best() for cell in cells) for name in readouts(cells)}


# --- paired differences


@dataclass(frozen=True)
class Interval:
    """A mean with its Student interval; without one where there is a single unit."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the mean of independent values, and its interval."""
        low, high = student_interval(values) or (None, None)
        return cls(float(np.mean(values)), low, high, len(values))


@dataclass(frozen=True)
class Comparison:
    """How much better one readout is than another, over the cells that have both."""

    other: str
    #: Units are cells, and then data sets, whose cells are averaged first.
    over_cells: Interval
    over_data: Interval
    better: int
    worse: int


def compare_to(cells: Sequence[CellScores], name: str) -> list[Comparison]:
    """Compare a readout to each of the others, the closest first; above zero it is the better.

    Scores in which higher is better are in points, hundred times the score; errors are as they are.
    """
    found = []
    for other in readouts(cells):
        differences: dict[str, list[float]] = defaultdict(list)
        for cell in cells:
            if other != name and {name, other} <= cell.scores.keys():
                unit = 100 if cell.higher_is_better else 1
                gain = cell.sign * (cell.scores[name] - cell.scores[other])
                differences[cell.data].append(unit * gain)
        values = [value for of_data in differences.values() for value in of_data]
        if values:
            found.append(
                Comparison(
                    other,
                    Interval.of(values),
                    Interval.of([float(np.mean(of_data)) for of_data in differences.values()]),
                    better=sum(value > 0 for value in values),
                    worse=sum(value < 0 for value in values),
                )
            )
    return sorted(found, key=lambda each: each.over_cells.mean)


# --- whether ranks differ by more than chance


@dataclass(frozen=True)
class RankTest:
    """Friedman's test of equal ranks, and Nemenyi's critical difference between two of them."""

    ranks: Mapping[str, float]
    #: The p value of equal readouts.
    p_value: float
    critical_difference: float
    num_cells: int

    @property
    def ordered(self) -> list[str]:
        """The readouts, best mean rank first."""
        return sorted(self.ranks, key=lambda name: (self.ranks[name], name))

    def groups(self) -> list[list[str]]:
        """Return the largest sets of readouts whose ranks do not differ by more than chance."""
        found: list[list[str]] = []
        for start, first in enumerate(self.ordered):
            reach = self.ranks[first] + self.critical_difference
            group = [name for name in self.ordered[start:] if self.ranks[name] <= reach]
            if len(group) > 1 and not (found and group[-1] == found[-1][-1]):
                found.append(group)
        return found


def rank_test(cells: Sequence[CellScores]) -> RankTest | None:
    """Test the ranks on the largest complete table of readouts and cells; None for too small a one.

    Readouts that pool graphs have no scores on node tasks, and a costly one may be left out
    elsewhere: of the sets of readouts that some cell has, the one with the most scores is taken.
    """
    best: tuple[int, tuple[str, ...], list[CellScores]] = (0, (), [])
    for names in {tuple(sorted(cell.scores)) for cell in cells}:
        having = [cell for cell in cells if set(names) <= cell.scores.keys()]
        if len(names) >= 3 and len(having) >= 2:
            best = max(best, (len(names) * len(having), names, having), key=lambda found: found[:2])
    _, taken, complete = best
    if not complete:
        return None
    # Ranks among these readouts only.
    among = [replace(cell, scores={name: cell.scores[name] for name in taken}) for cell in complete]
    scores = [[cell.sign * cell.scores[name] for cell in among] for name in taken]
    if all(len(set(column)) == 1 for column in zip(*scores, strict=True)):
        p_value = 1.0
    else:
        p_value = float(stats.friedmanchisquare(*scores).pvalue)
    count = len(taken)
    quantile = stats.studentized_range.ppf(LEVEL, count, np.inf) / np.sqrt(2)
    reach = float(quantile * np.sqrt(count * (count + 1) / (6 * len(among))))
    return RankTest(mean_ranks(among), p_value, reach, len(among))


_WIDTH, _LINE = 8.4, 0.24


def draw_ranks(test: RankTest, chosen: str, path: Path) -> None:
    """Draw the mean ranks as an SVG file; the chosen readout stands out."""
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure

    ordered, groups = test.ordered, test.groups()
    half = (len(ordered) + 1) // 2
    low = np.floor(min(test.ranks.values()))
    high = np.ceil(max(max(test.ranks.values()), low + test.critical_difference))
    margin = 0.28 * (high - low)
    # From top to bottom: the critical difference, the axis, bars, names.
    first_bar, first_name = 0.6, 0.6 + 0.5 * len(groups) + 0.7
    bottom = first_name + half
    with matplotlib.rc_context({**SETTINGS, "axes.grid": False}):
        figure = Figure(figsize=(_WIDTH, _LINE * (bottom + 2.6)), layout="constrained")
        axes = figure.subplots()
        axes.set_xlim(low - margin, high + margin)
        axes.set_ylim(bottom, -2.4)
        axes.axis("off")
        axes.plot([low, high], [0, 0], color=INK, linewidth=1)
        for rank in range(int(low), int(high) + 1):
            axes.plot([rank, rank], [0, -0.25], color=INK, linewidth=1)
            axes.text(rank, -0.4, str(rank), ha="center", va="bottom", color=MUTED)
        ends = [low, low + test.critical_difference]
        axes.plot(ends, [-1.6, -1.6], color=MUTED, linewidth=1, marker="|")
        text = f"critical difference {test.critical_difference:.2f}"
        axes.text(ends[1] + 0.02 * (high - low), -1.6, text, va="center", color=MUTED)
        for number, group in enumerate(groups):
            ranks = [test.ranks[name] for name in group]
            height, reach = first_bar + 0.5 * number, 0.008 * (high - low)
            axes.plot(
                [min(ranks) - reach, max(ranks) + reach],
                [height, height],
                color=MUTED,
                linewidth=3,
                solid_capstyle="butt",
            )
        for place, name in enumerate(ordered):
            left = place < half
            # The best and the worst stand highest, so that no line crosses another.
            height = first_name + (place if left else len(ordered) - 1 - place)
            edge = low - 0.04 * margin if left else high + 0.04 * margin
            mean, colour = test.ranks[name], CHOSEN if name == chosen else INK
            width = 1.8 if name == chosen else 0.8
            axes.plot([mean, mean, edge], [0, height, height], color=colour, linewidth=width)
            text = f"{name}  {mean:.2f}" if left else f"{mean:.2f}  {name}"
            axes.text(
                edge - 0.03 * margin if left else edge + 0.03 * margin,
                height,
                text,
                ha="right" if left else "left",
                va="center",
                color=colour,
                weight="bold" if name == chosen else "normal",
            )
        with atomic_path(path) as partial:
            # Without a date and a version the same figure has the same bytes.
            metadata = {"Date": None, "Creator": None}
            figure.savefig(partial, format="svg", metadata=metadata, facecolor=PAPER)
