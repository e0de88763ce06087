"""The report as a reader gets it, for every kind of task."""

from __future__ import annotations

import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from scipy import stats

import histograph_post as hg
from histograph_post.reporting import Report
from histograph_post.reporting.figures import Chart
from histograph_post.reporting.page import Page, Section
from histograph_post.utils.text import MINUS

from .conftest import KINDS
from .pages import Reader

EXPECTED = {
    "binary": {"roc", "precision-recall", "confusion", "calibration"},
    "multiclass": {"confusion", "calibration"},
    "multilabel": {"targets", "calibration"},
    "regression": {"predicted-0-y", "errors-0-y"},
    "node": {"confusion", "calibration"},
    "link": {"roc", "precision-recall", "confusion", "calibration"},
}
ALWAYS = {
    *("ranking", "learning-validation", "learning-loss", "layer-weights", "evolution-distance"),
    *("smoothing-distance", "smoothing-dirichlet", "smoothing-cosine"),
    *("attention-scale", "example-best-1", "example-worst-1"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_task_has_its_figures(
    kind: str, make_run: Callable[[str], Path], tmp_path: Path
) -> None:
    written = hg.report(make_run(kind), tmp_path / "report.html")
    page = Reader(written.path.read_text(encoding="utf-8"))
    assert set(page.figures) == set(written.figures)
    assert set(page.figures) >= ALWAYS | EXPECTED[kind]
    assert ("depth" in page.figures) == (kind != "link")
    assert len(page.tables) >= 4  # readouts, metrics, layers, rows and facts
    assert all(len(words) > 20 and "nan" not in words for words in page.figures.values())
    assert all(reference.startswith(("#", "data:")) for reference in page.references)
    assert not [note for note in written.notes if "missing" in note]


def test_page_is_self_contained_and_its_names_are_unique(binary_report: Report) -> None:
    html = binary_report.path.read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\"' <]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    names = re.findall(r'\bid="([^"]+)"', html)
    assert len(names) == len(set(names))
    used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', html)
    assert {a or b for a, b in used} <= set(names)
    # One script, which the page allows by its hash; nothing else may run.
    (script,) = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html


def test_names_are_shown_as_they_are_and_steer_nothing() -> None:
    name = "$\\frac{1}$ a_{b}$ [bold] \x1b[2J<b>"

    def draw(axes: Axes) -> None:
        axes.bar([name], [1.0])

    chart = Chart(draw)
    assert chart.render("png")  # without a warning that shows the name
    shown = ElementTree.fromstring(chart.render("svg"))
    assert name.replace("\x1b", "?") in "".join(shown.itertext())
    page = Page(name, name, name, notes=[name], sections=[Section("key", name)]).to_html()
    assert "\x1b" not in page
    assert "<b>" not in page


def test_headline_table_has_the_scores_and_the_paired_differences(
    binary_run: Path, binary_report: Report
) -> None:
    html = binary_report.path.read_text(encoding="utf-8")
    results = json.loads((binary_run / "results.json").read_text())
    rows = {row[0]: row for row in Reader(html).tables[0]}
    scores = {
        head: np.array(
            [f["scores"]["test"]["accuracy"] for f in results["fits"] if f["head"] == head]
        )
        for head in ("mean", "histograph")
    }
    test = scores["histograph"]
    assert rows["histograph"][1] == f"{test.mean():.3f} ± {test.std(ddof=1):.3f}"
    gaps = test - scores["mean"]
    reach = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / np.sqrt(len(gaps))
    shown = [
        float(text) for text in re.findall(r"[+-][\d.]+", rows["histograph"][4].replace(MINUS, "-"))
    ]
    expected = [gaps.mean(), gaps.mean() - reach, gaps.mean() + reach]
    assert shown == pytest.approx(expected, abs=6e-5)


def test_same_run_same_page(binary_run: Path, binary_report: Report, tmp_path: Path) -> None:
    again = hg.report(binary_run, tmp_path / "again.html")
    assert again.path.read_bytes() == binary_report.path.read_bytes()
