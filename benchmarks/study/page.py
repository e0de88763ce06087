"""The page of a study, made of its table and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from histograph_post.utils.files import write_text
from histograph_post.utils.text import MINUS, MISSING, metric_name, plural

from .ranking import (
    LEVEL,
    CellScores,
    Comparison,
    Interval,
    Part,
    RankTest,
    cell_scores,
    compare_to,
    draw_ranks,
    mean_ranks,
    rank_test,
    readouts,
    wins,
)
from .table import AVERAGED, OWN, Row

#: The readout that the study is about.
CHOSEN = "histograph"

#: The key of a note on the whole study, among those on its cells.
WHOLE = "study"

_COMMAND = """```bash
python -m histograph_benchmarks.study benchmarks/study/study.toml --data-root DATA -o OUT
python -m histograph_benchmarks.study benchmarks/study/study.toml -o OUT --render docs/study.md
```"""


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


_DIFFERENCES = (
    f"Mean paired differences of `{CHOSEN}` to each other readout, above zero where it is the "
    f"better, with {_percent(LEVEL)} Student intervals. The folds of a cell are averaged "
    "first. Cells of one data set resemble each other, so the interval over data sets, whose "
    "cells are averaged first, is the careful one."
)
_SEEDS = (
    "Mean score of single seeds, of their averaged predictions, and what averaging gains; "
    "means over the cells of each kind. A solved readout has one seed."
)
_CELLS = (
    "Test scores, seeds averaged, mean over folds; the best readout of a cell is bold. "
    f"`{OWN}` is the readout that the checkpoint came with: it takes no part in ranks, for "
    "most checkpoints have none."
)


def write_page(rows: Sequence[Row], path: Path, notes: Mapping[str, str]) -> None:
    """Write the page, and its picture beside it.

    Args:
        rows: The table, with test scores.
        path: Of the page.
        notes: Cells, as globs -> why the chosen readout is not the best there; :data:`WHOLE` -> a
            remark on the whole study.
    """
    picture = path.with_suffix(".svg")
    test = rank_test(cell_scores(rows, "test"))
    if test is not None:
        draw_ranks(test, CHOSEN, picture)
    write_text(path, page(rows, notes, picture.name))


def page(rows: Sequence[Row], notes: Mapping[str, str], picture: str) -> str:
    """Return the page as Markdown."""
    cells = cell_scores(rows, "test")
    test = rank_test(cells)
    sections = [
        "# The study of readouts",
        _introduction(rows, cells),
        _COMMAND,
        *([notes[WHOLE]] if WHOLE in notes else []),
        "## Ranks",
        _outcome(cells),
        ranks_table(cells),
        *([] if test is None else [_picture(test, cells, picture)]),
        f"## What `{CHOSEN}` gains",
        _DIFFERENCES,
        *differences(cells),
        "## One seed, and seeds averaged",
        _SEEDS,
        _seeds_table(rows, "test"),
        "## Every cell",
        _CELLS,
        *cells_tables(cells),
        f"## Where `{CHOSEN}` is not the best",
        _losses(cells, notes),
        "## Where the checkpoint's own readout is as good or better",
        _own_wins(cells),
    ]
    return "\n\n".join(section.strip("\n") for section in sections) + "\n"


def validation_view(rows: Sequence[Row], part: Part = "valid") -> str:
    """Return the tables of validation scores, to choose by.

    Args:
        rows: The table.
        part: The column that has them: of inner splits, that of test scores.
    """
    cells = cell_scores(rows, part)
    sections = [
        f"Validation scores, seeds averaged: {plural(len(cells), 'cell')}.",
        ranks_table(cells),
        *differences(cells),
        _seeds_table(rows, part),
        *cells_tables(cells),
    ]
    return "\n\n".join(section.strip("\n") for section in sections) + "\n"


# --- sections


def _introduction(rows: Sequence[Row], cells: Sequence[CellScores]) -> str:
    fits = sum(row.seed != AVERAGED for row in rows)
    folds = sum(len(cell.folds) for cell in cells)
    data = sorted({cell.data for cell in cells})
    return (
        f"Readouts of frozen checkpoints on {plural(len(cells), 'cell')}: a checkpoint on some "
        f"data ({', '.join(data)}) with a kind of split, {plural(folds, 'fold')} and "
        f"{plural(fits, 'fit')} in all. Epochs, strengths and options were chosen on validation "
        "parts; test parts are read for this page and for nothing else. It is made of "
        "[one table](../benchmarks/study/results.csv), which these commands write, in pieces and "
        "in any order:"
    )


def _outcome(cells: Sequence[CellScores]) -> str:
    ranks, order = mean_ranks(cells), readouts(cells)
    if CHOSEN not in ranks:
        return f"There is no `{CHOSEN}` in the table."
    first = order[0] if order[0] != CHOSEN else order[1] if len(order) > 1 else CHOSEN
    return (
        f"`{CHOSEN}` has a mean rank of {ranks[CHOSEN]:.2f} and is number "
        f"{order.index(CHOSEN) + 1} of {len(order)} readouts; "
        f"{'next' if order[0] == CHOSEN else 'first'} is `{first}` with {ranks[first]:.2f}. A "
        "rank is taken among the readouts that a cell has; some of them pool graphs and have no "
        "form for nodes. The best of a cell wins it, and equal ones share it."
    )


def ranks_table(cells: Sequence[CellScores]) -> str:
    """Return mean ranks and wins, best first."""
    ranks, won = mean_ranks(cells), wins(cells)
    lines = [["readout", "mean rank", "wins", "cells"]]
    for name in readouts(cells):
        count = sum(name in cell.scores for cell in cells)
        lines.append([_code(name), f"{ranks[name]:.2f}", str(won[name]), str(count)])
    return markdown(lines)


def _picture(test: RankTest, cells: Sequence[CellScores], picture: str) -> str:
    shown = ", ".join(f"{name} {test.ranks[name]:.2f}" for name in test.ordered)
    missing = [_code(name) for name in readouts(cells) if name not in test.ranks]
    but = f" (not {', '.join(missing)})" if missing else ""
    return (
        f"![Mean ranks: {shown}]({picture})\n\n"
        f"Mean ranks among the {plural(len(test.ranks), 'readout')}{but} that each of "
        f"{test.num_cells} of the {plural(len(cells), 'cell')} has. Friedman's test of equal "
        f"readouts gives p = {test.p_value:.2g}. Bars join readouts whose ranks differ by less "
        f"than Nemenyi's critical difference, {test.critical_difference:.2f} at "
        f"{_percent(1 - LEVEL)}; it takes cells for independent, which those of one data set are "
        "not."
    )


def differences(cells: Sequence[CellScores]) -> list[str]:
    """Return a table of paired differences for classification and one for regression."""
    found = []
    for title, unit, higher in (
        ("Classification", "points of ROC-AUC or accuracy", True),
        ("Regression", "RMSE", False),
    ):
        chosen = [cell for cell in cells if cell.higher_is_better == higher]
        if not chosen:
            continue
        lines = [["to", "mean", "over cells", "over data sets", "better : worse"]]
        lines += [_difference(each, 1 if higher else 3) for each in compare_to(chosen, CHOSEN)]
        count = len({cell.data for cell in chosen})
        heading = (
            f"**{title}**, in {unit}: {plural(len(chosen), 'cell')}, {plural(count, 'data set')}"
        )
        found.append(f"{heading}\n\n{markdown(lines)}")
    return found


def _difference(each: Comparison, decimals: int) -> list[str]:
    return [
        _code(each.other),
        signed(each.over_cells.mean, decimals),
        _interval(each.over_cells, decimals),
        _interval(each.over_data, decimals),
        f"{each.better} : {each.worse}",
    ]


def _seeds_table(rows: Sequence[Row], part: Part) -> str:
    averaged = {cell.name: cell for cell in cell_scores(rows, part)}
    single = {cell.name: cell for cell in cell_scores(rows, part, averaged=False)}
    lines = [["readout", "", "single seeds", "seeds averaged", "gain", "cells"]]
    for name in readouts(list(averaged.values())):
        for title, higher in (("classification", True), ("regression", False)):
            pairs = [
                (single[cell].scores[name], averaged[cell].scores[name])
                for cell in sorted(averaged.keys() & single.keys())
                if averaged[cell].higher_is_better == higher
                and name in single[cell].scores
                and name in averaged[cell].scores
            ]
            if not pairs:
                continue
            alone, together = np.mean(pairs, axis=0)
            gain = (together - alone) * (100 if higher else -1)
            lines.append(
                [
                    _code(name),
                    title,
                    f"{alone:.4f}",
                    f"{together:.4f}",
                    signed(gain, 1 if higher else 3),
                    str(len(pairs)),
                ]
            )
    return markdown(lines)


def cells_tables(cells: Sequence[CellScores]) -> list[str]:
    """Return a table of cells by readouts for each metric."""
    names = readouts(cells)
    found = []
    for metric in sorted({cell.metric for cell in cells}):
        chosen = [cell for cell in cells if cell.metric == metric]
        shown = [name for name in names if any(name in cell.scores for cell in chosen)]
        own = [OWN] if any(cell.own is not None for cell in chosen) else []
        lines = [["cell", "folds", *map(_code, own + shown)]]
        for cell in chosen:
            best = cell.best()
            figures = [_figure(cell.scores.get(name), bold=name in best) for name in shown]
            kept = [_figure(cell.own) for _ in own]
            lines.append([cell.name, str(len(cell.folds)), *kept, *figures])
        direction = "higher" if chosen[0].higher_is_better else "lower"
        found.append(f"**{metric_name(metric)}** ({direction} is better)\n\n{markdown(lines)}")
    return found


def _losses(cells: Sequence[CellScores], notes: Mapping[str, str]) -> str:
    lines = []
    for cell in cells:
        if CHOSEN not in cell.scores or CHOSEN in cell.best():
            continue
        best, own = cell.best()[0], cell.scores[CHOSEN]
        rank = cell.ranks()[CHOSEN]
        why = [text for pattern, text in notes.items() if fnmatchcase(cell.name, pattern)]
        lines.append(
            f"- {cell.name}: {own:.4f}, rank {rank:g} of {len(cell.scores)}; `{best}` has "
            f"{cell.scores[best]:.4f}{'. ' if why else ''}{' '.join(why)}"
        )
    return "\n".join(lines) or "On no cell."


def _own_wins(cells: Sequence[CellScores]) -> str:
    lines = []
    for cell in cells:
        score = cell.scores.get(CHOSEN)
        if cell.own is None or score is None or cell.sign * (cell.own - score) < 0:
            continue
        lines.append(
            f"- {cell.name}: {cell.own:.4f}, `{CHOSEN}` {score:.4f}: keep your own readout"
        )
    return "\n".join(lines) or "On no cell."


# --- text


def _code(name: str) -> str:
    return f"`{name}`"


def _figure(value: float | None, *, bold: bool = False) -> str:
    if value is None:
        return MISSING
    return f"**{value:.4f}**" if bold else f"{value:.4f}"


def signed(value: float, decimals: int) -> str:
    """Return a number with its sign, a true minus."""
    return f"{value:+.{decimals}f}".replace("-", MINUS)


def _interval(found: Interval, decimals: int) -> str:
    if found.low is None or found.high is None:
        return MISSING
    return f"[{signed(found.low, decimals)}, {signed(found.high, decimals)}]"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table, whose first row is its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
