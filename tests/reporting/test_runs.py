"""Reports on other runs than those of one HistoGraph head on one cache."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import histograph_post as hg
from histograph_post.models import build_model

from ..helpers import make_model
from .conftest import QUICK
from .pages import Reader


def test_head_that_pools_at_once_has_no_layer_weights(binary_run: Path, tmp_path: Path) -> None:
    cache = binary_run.parent / "binary.cache"
    hg.train_head(cache, tmp_path / "run", head="sopool", training=QUICK, dim=8)
    written = hg.report(tmp_path / "run", figures=tmp_path / "figures", form="png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written.files)
    assert "layer-weights" not in written.figures
    assert {"smoothing-cosine", "example-best-1"} <= set(written.figures)
    assert any("one row at once" in note for note in written.notes)


def test_comparison_is_ranked(binary_run: Path, tmp_path: Path) -> None:
    cache = binary_run.parent / "binary.cache"
    heads = ("mean", "linear", "concat", "max", "histograph")
    hg.compare(cache, tmp_path / "all", heads=heads, dim=8, training=QUICK)
    written = hg.report(tmp_path / "all")
    results = json.loads((tmp_path / "all" / "results.json").read_text())["readouts"]
    order = ["own readout", *sorted(heads, key=lambda n: -results[n]["averaged"]["valid"]["mean"])]
    page = Reader(written.path.read_text(encoding="utf-8"))
    shown = [name for name, *_ in page.tables[0][1:]]
    assert shown[0] == order[0]
    valid = [results[name]["averaged"]["valid"]["mean"] for name in shown[1:]]
    assert valid == [results[name]["averaged"]["valid"]["mean"] for name in order[1:]]
    order = shown  # of equal ones the smaller comes first
    places = [page.figures["ranking"].index(f" {name} ") for name in order]
    assert places == sorted(places)


def test_per_fold_caches(binary_run: Path, tmp_path: Path) -> None:
    data = hg.load_data("demo:", args={"num_graphs": 30})
    for fold in range(3):
        model = make_model(seed=fold, num_layers=2)
        hg.cache(model, data, tmp_path / "caches" / f"fold-{fold}.cache", splits="kfold:3")
    options = {"training": QUICK, "dim": 8, "heads": 2, "seeds": [0]}
    hg.train_head(tmp_path / "caches", tmp_path / "run", **options)
    written = hg.report(tmp_path / "run")
    assert "layer-weights" in written.figures
    assert all("before the first epoch" in note for note in written.notes)  # nothing is missing
    assert "3 fits" in written.path.read_text()


def test_molecules_are_drawn_as_molecules(tmp_path: Path) -> None:
    table = tmp_path / "alcohols.csv"
    smiles = ["C" * n + "O" for n in range(2, 14)] + ["c1ccccc1" + "C" * n for n in range(12)]
    lines = [f"{text},{int(text.endswith('O'))},molecule {at}" for at, text in enumerate(smiles)]
    table.write_text("smiles,alcohol,name\n" + "\n".join(lines) + "\n")
    data = hg.load_data(f"smiles:{table}")
    torch.manual_seed(0)
    categories = [119, 5, 12, 12, 10, 6, 6, 2, 2]
    model = build_model("gin", {"hidden": 8, "num_layers": 2, "in_dim": categories}, out_dim=1)
    hg.cache(model, data, tmp_path / "a.cache", splits="stratified")
    hg.train_head(tmp_path / "a.cache", tmp_path / "run", training=QUICK, dim=8, heads=2)
    page = Reader(hg.report(tmp_path / "run").path.read_text(encoding="utf-8"))
    assert page.figures["example-best-1"].startswith("Drawing of molecule")
    (rows,) = [table for table in page.tables if "SMILES" in table[0]]
    assert {row[1] for row in rows[1:]} <= set(smiles)
    assert {row[0] for row in rows[1:]} <= {f"molecule {at}" for at in range(len(smiles))}
    figures = hg.report(tmp_path / "run", tmp_path / "f.html", figures=tmp_path / "f", form="pdf")
    assert all(path.read_bytes().startswith(b"%PDF-") for path in figures.files)
    # After fine-tuning no cache fits, but the molecules are the same.
    tuned = hg.finetune(tmp_path / "run", tmp_path / "t", model=model, data=data, epochs=1)
    page = Reader(hg.report(tuned).path.read_text(encoding="utf-8"))
    (rows,) = [table for table in page.tables if "SMILES" in table[0]]
    assert {row[1] for row in rows[1:]} <= set(smiles)
    # The cache knows its molecules, whatever becomes of the table; other ones are not drawn.
    table.unlink()
    known = tmp_path / "a.cache" / "molecules.smi"
    known.write_text(known.read_text().replace("O\t", "OC\t").replace("c1ccccc1", "C1CCCCCC1"))
    written = hg.report(tmp_path / "run")
    page = Reader(written.path.read_text(encoding="utf-8"))
    assert page.figures["example-best-1"].startswith("Drawing of graph")
    assert any("drawn as graphs" in note for note in written.notes)
