"""The study of readouts: what it runs, what it keeps, and what its page says of it."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scipy import stats
from sklearn.metrics import roc_auc_score

import histograph_post as hg
from histograph_benchmarks.study import materials as made
from histograph_benchmarks.study.__main__ import main
from histograph_benchmarks.study.page import page, validation_view, write_page
from histograph_benchmarks.study.plan import FULL, QUICK, Study, read_study
from histograph_benchmarks.study.ranking import (
    cell_scores,
    compare_to,
    mean_ranks,
    rank_test,
    wins,
)
from histograph_benchmarks.study.table import (
    AVERAGED,
    OWN,
    RESULTS_NAME,
    Row,
    find_piece,
    join_pieces,
    read_csv,
    to_csv,
    write_piece,
)
from histograph_post.errors import ConfigError
from histograph_post.models import build_model
from histograph_post.runs.fits import OUTPUTS_NAME
from histograph_post.splits import Splits, resolve_splits
from histograph_post.utils.text import MINUS

STUDY = Path(__file__).resolve().parents[2] / "benchmarks" / "study"
PAGE = STUDY.parents[1] / "docs" / "study.md"


def row(cell: str, readout: str, test: float, *, fold: int = 0, seed: str = AVERAGED) -> Row:
    data, checkpoint, split = cell.split("/")
    metric = "rmse" if data == "ESOL" else "roc_auc"
    place = (data, checkpoint, split, fold, readout, seed, metric, metric != "rmse")
    return Row(*place, valid=round(1 - test, 6), test=test)


def averaged(scores: dict[str, dict[str, float]]) -> list[Row]:
    return [row(cell, name, test) for cell, of in scores.items() for name, test in of.items()]


#: Four cells of three data sets, and the ranks that follow: 2 3 1, 1.5 3 1.5, 1 2 3, 1 2 3.
SCORES = {
    "A/gin/random": {"histograph": 0.80, "mean": 0.70, "probe": 0.82},
    "A/gin/scaffold": {"histograph": 0.75, "mean": 0.70, "probe": 0.75},
    "B/gin/random": {"histograph": 0.90, "mean": 0.86, "probe": 0.84},
    "ESOL/gin/random": {"histograph": 1.0, "mean": 1.2, "probe": 1.3},
}


# --- the study file -------------------------------------------------------------------------------


def test_the_study_file_has_the_cells_that_are_asked_for() -> None:
    study = read_study(STUDY / "study.toml")
    cells = [cell.name for cell in study.all_cells()]
    assert len(cells) == len(set(cells)) == 3 * 5 * 2 + 5 + 3
    assert len(study.units(study.budget(FULL))) == 3 * 5 * 6 + 5 * 10 + 3
    assert {"histograph", "histograph-paper", "linear", "concat", "jk-cat", "gmt"} <= {
        readout.name for readout in study.readouts
    }
    on_nodes = {
        settings.readout
        for cell in study.all_cells()
        if cell.name == "Cora/gcn-2/public"
        for settings in study.settings(cell, study.budget(FULL))
    }
    assert "histograph" in on_nodes
    assert "gmt" not in on_nodes
    # A short study is part of the full one; a quick one has other fits, in a folder of their own.
    assert not study.budget("short").changes_fits
    assert study.budget(QUICK).changes_fits


def test_jobs_share_the_units_out_without_sharing_a_cache() -> None:
    study = read_study(STUDY / "study.toml")
    parts = [study.units(study.budget(FULL), part=(number, 3)) for number in range(3)]
    together = [unit.name for part in parts for unit in part]
    assert sorted(together) == sorted(unit.name for unit in study.units(study.budget(FULL)))
    caches = [{unit.cell.activations for unit in part} for part in parts]
    assert sum(map(len, caches)) == len(set.union(*caches))
    only = study.units(study.budget(FULL), only=["BBBP/*/scaffold", "PTC/*"])
    assert len(only) == 3 + 10


def test_a_budget_leaves_out_what_it_says(tmp_path: Path) -> None:
    omission = 'omit = [{ cells = ["demo/own/*"] }, { cells = ["*"], readouts = ["w*"] }]'
    study = read_study(
        write_study(tmp_path, old="[budgets.full]", new=f"[budgets.full]\n{omission}")
    )
    units = study.units(study.budget(FULL))
    assert [unit.name for unit in units] == [f"demo/gin/random/fold-{fold}" for fold in range(3)]
    found = study.settings(units[0].cell, study.budget(FULL))
    assert [settings.readout for settings in found] == ["mean", "linear"]


def test_training_is_that_of_the_kind_then_of_the_readout_then_of_both(tmp_path: Path) -> None:
    more = 'name = "linear"\ntraining = { lr = 0.1, patience = 5 }\nkinds.graphs = { lr = 0.2 }'
    study = read_study(write_study(tmp_path, old='name = "linear"', new=more))
    _, linear, _ = study.settings(study.all_cells()[0], study.budget(FULL))
    assert linear.training == {"epochs": 2, "lr": 0.2, "patience": 5}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('name = "demo"', 'nme = "demo"', "found the unknown field 'nme', expected none"),
        ("seeds = 2", 'seeds = "2"', "found seeds = '2', expected a whole number from 1"),
        ('name = "mean"', 'name = "meen"', "meen"),
        ('data = ["demo"]', 'data = ["dmeo"]', "cells: data: found 'dmeo', expected one of demo"),
        ("epochs = 2", "epoch = 2", "kinds graphs: training: found 'epoch', expected one of"),
        ('kind = "graphs"', 'kind = "trees"', "data demo: kind: found 'trees', expected one of"),
        ("[budgets.full]", "[budgets.most]", "budgets: found no 'full'"),
        ('name = "mean"', 'name = "linear"', "readouts: found the name 'linear', expected one of"),
        ("seeds = 2", "seeds = ", "not a readable TOML file"),
    ],
)
def test_a_wrong_study_file_is_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = write_study(tmp_path, old=old, new=new)
    with pytest.raises(ConfigError, match=re.escape(expected)) as refused:
        read_study(path)
    assert str(path) in str(refused.value)


def test_unknown_cells_and_budgets_are_refused(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path))
    with pytest.raises(ConfigError, match="found 'BBBP/\\*', expected a glob of names such as"):
        study.units(study.budget(FULL), only=["BBBP/*"])
    with pytest.raises(ConfigError, match="budget: found 'large', expected one of full, quick"):
        study.budget("large")


# --- running --------------------------------------------------------------------------------------

TEXT = """
[[checkpoints]]
name = "gin"
model = "gin"
weights = "gin.pt"

[[checkpoints]]
name = "own"
model = "gin"
args = { num_layers = 2, hidden = 8 }

[kinds.graphs]
training = { epochs = 2 }
pretraining = { epochs = 2 }

[[data]]
name = "demo"
spec = "demo:"
args = { num_graphs = 40 }
kind = "graphs"
metric = "roc_auc"

[splits]
random = { spec = "kfold:3", folds = 3 }

[[cells]]
checkpoints = ["gin", "own"]
data = ["demo"]
splits = ["random"]

[[readouts]]
name = "mean"
seeds = 2

[[readouts]]
name = "linear"

[[readouts]]
name = "wide"
head = "mean"
options = { dim = 12 }

[budgets.full]
[budgets.quick]
folds = { "*/random" = 1 }
seeds = 1
"""


def write_study(folder: Path, *, old: str = "", new: str = "") -> Path:
    path = folder / "study.toml"
    assert old in TEXT
    path.write_text(TEXT.replace(old, new, 1) if old else TEXT)
    return path


@pytest.fixture
def study_words(tmp_path: Path) -> list[str]:
    torch.manual_seed(0)
    model = build_model("gin", {"num_layers": 2, "hidden": 8}, in_dim=4, out_dim=1)
    torch.save(model.state_dict(), tmp_path / "gin.pt")
    return [str(write_study(tmp_path)), "--data-root", str(tmp_path), "-o", str(tmp_path / "out")]


@pytest.mark.long
def test_a_study_in_pieces_gives_what_it_gives_in_one_go(
    study_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main([*study_words, "--only", "demo/own/*"])
    main([*study_words, "--part", "0/2"])
    table = tmp_path / "out" / RESULTS_NAME
    some = read_csv(table, test=False)
    assert {found.cell for found in some} == {"demo/gin/random", "demo/own/random"}
    main([*study_words[:-1], str(tmp_path / "again")])
    whole = read_csv(tmp_path / "again" / RESULTS_NAME, test=True)
    assert [replace(found, seconds=None) for found in read_csv(table, test=True)] == [
        replace(found, seconds=None) for found in whole
    ]
    # Three folds of two cells: two seeds and their average, one seed twice, and their own readout.
    assert len(whole) == 3 * 2 * (3 + 2 + 2) + 3
    assert {found.cell for found in whole if found.readout == OWN} == {"demo/own/random"}
    assert [found.order for found in whole] == sorted(found.order for found in whole)
    # What is done is not done again, nor is a cache made that nobody reads.
    shutil.rmtree(tmp_path / "out" / "caches")
    monkeypatch.setattr(made.hg, "cache", None)
    before = table.read_bytes()
    main(study_words)
    assert table.read_bytes() == before


@pytest.mark.long
def test_a_readout_that_is_new_or_has_changed_is_fitted_alone(
    study_words: list[str], tmp_path: Path
) -> None:
    table = tmp_path / "out" / RESULTS_NAME
    main([*study_words, "--only", "demo/gin/*"])
    before = read_csv(table, test=True)
    runs = set((tmp_path / "out" / "runs").rglob("run.json"))
    write_study(tmp_path, old="options = { dim = 12 }", new="options = { dim = 16 }")
    main([*study_words, "--only", "demo/gin/*"])
    after = read_csv(table, test=True)
    changed = {b.readout for b, a in zip(before, after, strict=True) if b != a}
    assert changed == {"wide"}
    assert len(set((tmp_path / "out" / "runs").rglob("run.json")) - runs) == 3
    main([*study_words, "--only", "demo/gin/*", "--redo", "mean"])
    redone = read_csv(table, test=True)
    assert [replace(found, seconds=None) for found in after] == [
        replace(found, seconds=None) for found in redone
    ]


@pytest.mark.long
def test_a_table_whose_folder_is_gone_is_taken_over(
    study_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main([*study_words, "--readouts", "mean,linear"])
    table = tmp_path / "table.csv"
    shutil.copyfile(tmp_path / "out" / RESULTS_NAME, table)
    shutil.rmtree(tmp_path / "out")
    main([*study_words, "--take-over", str(table)])
    # Of networks that are trained on every fold, all readouts are asked for, and one is missing.
    done = read_csv(tmp_path / "out" / RESULTS_NAME, test=True)
    expected = [row for row in read_csv(table, test=True) if row.checkpoint == "gin"]
    assert done == expected
    main([*study_words, "--readouts", "mean,linear", "--take-over", str(table)])
    assert (tmp_path / "out" / RESULTS_NAME).read_bytes() == table.read_bytes()
    monkeypatch.setattr(made.hg, "cache", None)
    main([*study_words, "--readouts", "mean,linear"])  # nothing is left to do
    assert (tmp_path / "out" / RESULTS_NAME).read_bytes() == table.read_bytes()
    table.write_text(table.read_text().replace("demo/gin/random,demo", "other/gin/random,other"))
    with pytest.raises(SystemExit, match="1"):
        main([*study_words, "--take-over", str(table)])


def test_inner_splits_judge_on_validation_rows_and_leave_the_test_part(
    study_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path, old="folds = 3 }", new="folds = 3, inner = true }")
    main([*study_words, "--only", "demo/gin/*", "--readouts", "mean"])
    outer = resolve_splits(hg.load_data("demo:", args={"num_graphs": 40}), "kfold:3")
    for number, fold in enumerate(outer.folds):
        place = tmp_path / f"out/splits/demo/random/fold-{number}.json"
        (inner,) = Splits.load(place).folds
        assert np.array_equal(inner.train, fold.train)
        judged = np.concatenate([inner.valid, inner.test])
        assert sorted(judged) == sorted(fold.valid)
        assert abs(len(inner.valid) - len(inner.test)) <= 1
    capsys.readouterr()
    main([*study_words, "--validation"])
    rows = read_csv(tmp_path / "out" / RESULTS_NAME, test=True)
    mean = np.mean([row.test for row in rows if row.seed == AVERAGED and row.test is not None])
    assert f"| demo/gin/random | 3 | **{mean:.4f}** |" in capsys.readouterr().out


def test_seeds_and_temperatures_are_judged_by_validation_rows(
    study_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path, old='name = "mean"\nseeds = 2', new='name = "histograph"\nseeds = 8')
    path = tmp_path / "study.toml"
    path.write_text(path.read_text().replace("num_graphs = 40", "num_graphs = 60"))
    main([*study_words, "--only", "demo/gin/*", "--readouts", "histograph"])
    capsys.readouterr()
    main([*study_words, "--seeds"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "demo/gin" in line]
    gains = []
    for fold in range(3):
        (run,) = (tmp_path / f"out/runs/demo/gin/random/fold-{fold}").iterdir()
        places = [hg.Run.open(run).fit_folder("histograph", 0, seed) for seed in range(8)]
        fits = [load_file(place / OUTPUTS_NAME) for place in places]
        labels = hg.Cache.open(tmp_path / "out/caches/demo/gin.cache").labels()
        truth = labels[fits[0]["valid_rows"], 0]
        outputs = np.stack([fit["valid_outputs"][:, 0] for fit in fits])
        single = np.mean([roc_auc_score(truth, each) for each in outputs])
        gains.append(100 * (roc_auc_score(truth, outputs.mean(axis=0)) - single))
    eight = line.split("|")[-2].strip().replace(MINUS, "-")
    assert float(eight) == pytest.approx(np.mean(gains), abs=0.006)
    main([*study_words, "--calibration"])
    assert "| 8 | 18 |" in capsys.readouterr().out


def test_other_fits_than_those_of_the_full_budget_stay_apart(
    study_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*study_words, "--quick", "--only", "demo/gin/*"])
    assert not (tmp_path / "out" / RESULTS_NAME).exists()
    rows = read_csv(tmp_path / "out" / QUICK / RESULTS_NAME, test=False)
    assert {(found.fold, found.seed) for found in rows} == {(0, "0"), (0, AVERAGED)}
    assert "demo/gin/random/fold-0: mean, linear" in capsys.readouterr().err
    main([*study_words, "--quick", "--validation"])
    assert "| `mean` |" in capsys.readouterr().out


def test_errors_end_the_command_in_one_line(
    study_words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        main([*study_words, "--budget", "large"])
    assert capsys.readouterr().err == "error: budget: found 'large', expected one of full, quick\n"
    with pytest.raises(SystemExit, match="1"):
        main([study_words[0], "-o", study_words[-1]])
    assert "data-root: found none" in capsys.readouterr().err


def test_parts_of_a_table_are_the_same_every_time(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    lines = [f"{number},C{'C' * number},{number % 2},1" for number in range(9)]
    (root / "mol.csv").write_text("\n".join(["num,smiles,a,b", *lines]) + "\n")
    study: Study = read_study(write_study(tmp_path))
    part = replace(study.data[0], spec="smiles:mol.csv", rows=4, columns=2)
    place = made.Materials(study, tmp_path, study.budget(FULL), tmp_path / "out", root)
    assert place._part(part).read_text().splitlines() == [
        "num,smiles,a",
        "0,C,0",
        "2,CCC,0",
        "6,CCCCCCC,0",
        "8,CCCCCCCCC,0",
    ]


@pytest.mark.long
def test_seeds_together_are_the_mean_of_their_outputs(study_words: list[str]) -> None:
    out = Path(study_words[-1])
    main([*study_words, "--only", "demo/gin/*"])
    (folder,) = (out / "runs/demo/gin/random/fold-1").glob("*/fits/mean/fold-0-seed-1/../../..")
    run, cache = hg.Run.open(folder), hg.Cache.open(out / "caches/demo/gin.cache")
    fits = [load_file(run.fit_folder("mean", 0, seed) / OUTPUTS_NAME) for seed in (0, 1)]
    outputs = (fits[0]["outputs"] + fits[1]["outputs"])[:, 0] / 2
    (found,) = [
        row
        for row in read_csv(out / RESULTS_NAME, test=True)
        if (row.fold, row.readout, row.seed) == (1, "mean", AVERAGED)
    ]
    truth = cache.labels()[fits[0]["rows"], 0]
    assert found.test == pytest.approx(roc_auc_score(truth, outputs), abs=1e-6)


# --- the table ------------------------------------------------------------------------------------


def test_the_table_can_be_read_back_with_or_without_test_scores(tmp_path: Path) -> None:
    rows = [*averaged(SCORES), row("A/gin/random", "mean", 0.7, seed="1", fold=2)]
    path = tmp_path / RESULTS_NAME
    path.write_text(to_csv(rows))
    assert read_csv(path, test=True) == sorted(rows, key=lambda found: found.order)
    assert {found.test for found in read_csv(path, test=False)} == {None}
    path.write_text(to_csv(rows).replace("A/gin/random,A", "A/gin/random,B", 1))
    with pytest.raises(ConfigError, match="line 2: found cell 'A/gin/random', expected 'B/gin/"):
        read_csv(path, test=True)
    path.write_text("a,b\n")
    with pytest.raises(ConfigError, match="found the columns a,b, expected cell,data"):
        read_csv(path, test=True)


def test_a_piece_counts_only_with_the_settings_it_was_made_with(tmp_path: Path) -> None:
    rows, settings = averaged(SCORES), {"seeds": (0, 1)}
    write_piece(tmp_path, "A/gin/random/fold-0", "mean", settings, rows[:1])
    write_piece(tmp_path, "A/gin/random/fold-1", "mean", settings, rows[1:])
    assert find_piece(tmp_path, "A/gin/random/fold-0", "mean", settings)
    assert not find_piece(tmp_path, "A/gin/random/fold-0", "mean", {"seeds": (0,)})
    assert not find_piece(tmp_path, "A/gin/random/fold-2", "mean", settings)
    assert join_pieces(tmp_path).read_text() == to_csv(rows)


# --- ranks and differences, by hand ---------------------------------------------------------------


def test_mean_ranks_and_wins_by_hand() -> None:
    cells = cell_scores(averaged(SCORES), "test")
    assert mean_ranks(cells) == {"histograph": 5.5 / 4, "mean": 10 / 4, "probe": 8.5 / 4}
    assert wins(cells) == {"histograph": 3, "mean": 0, "probe": 2}


def test_differences_by_hand() -> None:
    cells = [cell for cell in cell_scores(averaged(SCORES), "test") if cell.higher_is_better]
    probe, mean = compare_to(cells, "histograph")
    assert (probe.other, probe.better, probe.worse) == ("probe", 1, 1)
    assert probe.over_cells.mean == pytest.approx((-2 + 0 + 6) / 3)
    assert probe.over_data.mean == pytest.approx((-1 + 6) / 2)
    values = [10.0, 5.0, 4.0]
    reach = stats.t.ppf(0.975, 2) * np.std(values, ddof=1) / np.sqrt(3)
    assert mean.over_cells.mean == pytest.approx(np.mean(values))
    assert mean.over_cells.low == pytest.approx(np.mean(values) - reach)
    assert mean.over_cells.high == pytest.approx(np.mean(values) + reach)
    assert (mean.over_data.count, mean.over_cells.count) == (2, 3)
    (esol,) = [cell for cell in cell_scores(averaged(SCORES), "test") if not cell.higher_is_better]
    gains = {each.other: each.over_cells.mean for each in compare_to([esol], "histograph")}
    assert gains == pytest.approx({"mean": 0.2, "probe": 0.3})  # less error is a gain


def test_folds_are_averaged_first_and_only_those_that_every_readout_has() -> None:
    rows = [
        row("A/gin/random", name, test, fold=fold)
        for name, scores in {"mean": (0.5, 0.7, 0.9), "probe": (0.6, 0.6)}.items()
        for fold, test in enumerate(scores)
    ]
    (cell,) = cell_scores(rows, "test")
    assert cell.folds == (0, 1)
    assert cell.scores == pytest.approx({"mean": 0.6, "probe": 0.6})


def test_single_seeds_are_scored_one_by_one() -> None:
    rows = [row("A/gin/random", "mean", test, seed=seed) for seed, test in (("0", 0.6), ("1", 0.8))]
    rows.append(row("A/gin/random", "mean", 0.9))
    assert cell_scores(rows, "test")[0].scores == {"mean": 0.9}
    assert cell_scores(rows, "test", averaged=False)[0].scores == pytest.approx({"mean": 0.7})


def test_the_critical_difference_is_nemenyis() -> None:
    # Demsar (2006), table 5: q for four classifiers at 0.05 is 2.569.
    names = ["a", "b", "c", "d"]
    scores = {
        f"A{cell}/gin/random": {name: 0.5 + 0.1 * place for place, name in enumerate(names)}
        for cell in range(14)
    }
    test = rank_test(cell_scores(averaged(scores), "test"))
    assert test is not None
    assert test.critical_difference == pytest.approx(2.569 * np.sqrt(4 * 5 / (6 * 14)), abs=1e-3)
    assert test.ranks == {"d": 1, "c": 2, "b": 3, "a": 4}
    assert test.groups() == [["d", "c"], ["c", "b"], ["b", "a"]]
    assert test.p_value < 1e-6


def test_ranks_are_tested_among_readouts_that_many_cells_have() -> None:
    nodes = {f"N{cell}/gcn/public": {"histograph": 0.8, "probe": 0.7} for cell in range(3)}
    costly = {**SCORES, "B/gin/random": {**SCORES["B/gin/random"], "gmt": 0.99}}
    test = rank_test(cell_scores(averaged({**nodes, **costly}), "test"))
    assert test is not None
    # Twelve scores of three readouts on four cells; without nodes, and without gmt.
    assert test.ranks == {"histograph": 5.5 / 4, "mean": 10 / 4, "probe": 8.5 / 4}


def test_groups_are_as_large_as_they_can_be() -> None:
    test = rank_test(cell_scores(averaged(SCORES), "test"))
    assert test is not None  # four cells tell nothing apart
    assert test.groups() == [["histograph", "probe", "mean"]]


# --- the page -------------------------------------------------------------------------------------


def test_the_page_says_what_the_table_has(tmp_path: Path) -> None:
    rows = [
        *averaged(SCORES),
        replace(row("B/gin/random", OWN, 0.95)),
        row("A/gin/random", "histograph", 0.78, seed="0"),
    ]
    path = tmp_path / "study.md"
    write_page(rows, path, {"A/*/random": "Scaffolds."})
    text = path.read_text()
    assert "| `histograph` | 1.38 | 3 | 4 |" in text
    assert "| A/gin/random | 1 | \N{EN DASH} | 0.8000 | **0.8200** | 0.7000 |" in text
    assert "| B/gin/random | 1 | 0.9500 | **0.9000** | 0.8400 | 0.8600 |" in text
    assert "| `probe` | +1.3 | [" in text
    assert "- A/gin/random: 0.8000, rank 2 of 3; `probe` has 0.8200. Scaffolds." in text
    assert "- B/gin/random: 0.9500, `histograph` 0.9000: keep your own readout" in text
    assert "| `histograph` | classification | 0.7800 | 0.8000 | +2.0 | 1 |" in text
    picture = path.with_suffix(".svg").read_text()
    assert "critical difference" in picture
    assert "histograph  1.38" in picture
    assert page(rows, {"A/*/random": "Scaffolds."}, "study.svg") == text


def test_the_validation_view_needs_no_test_scores(tmp_path: Path) -> None:
    path = tmp_path / RESULTS_NAME
    path.write_text(to_csv(averaged(SCORES)))
    text = validation_view(read_csv(path, test=False))
    assert "0.2000" in text  # what a made-up row has as its validation score
    assert "0.8000" not in text


@pytest.mark.skipif(not (STUDY / RESULTS_NAME).exists(), reason="no results yet")
def test_the_short_budget_is_what_the_table_has() -> None:
    study = read_study(STUDY / "study.toml")
    budget = study.budget("short")
    planned = {
        (unit.cell.name, unit.fold, settings.readout)
        for unit in study.units(budget)
        for settings in study.settings(unit.cell, budget)
    }
    rows = read_csv(STUDY / RESULTS_NAME, test=False)
    assert {(row.cell, row.fold, row.readout) for row in rows if row.readout != OWN} == planned


def test_page_and_table_of_the_study_agree(tmp_path: Path) -> None:
    rows: Any = read_csv(STUDY / RESULTS_NAME, test=True)
    notes = read_study(STUDY / "study.toml").notes
    assert PAGE.read_text(encoding="utf-8") == page(rows, notes, PAGE.with_suffix(".svg").name)
    write_page(rows, tmp_path / "study.md", notes)
    assert (STUDY / RESULTS_NAME).read_text(encoding="utf-8") == to_csv(rows)
