"""The report in a real browser, at the width of a desk and of a phone, in both themes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from histograph_post.reporting import Report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

#: What the test asks the page, once it is laid out.
QUESTIONS = """
<script>
const found = {
  figures: [...document.querySelectorAll("figure")].map((figure) => {
    const svg = figure.querySelector("svg");
    const box = svg.getBoundingClientRect();
    return {
      name: figure.id,
      words: svg.getAttribute("aria-label"),
      width: box.width,
      height: box.height,
      marks: svg.querySelectorAll("path, ellipse, use").length,
    };
  }),
  tables: [...document.querySelectorAll(".table")].map((t) => t.scrollWidth - t.clientWidth),
  page: document.documentElement.scrollWidth,
  window: window.innerWidth,
  paper: getComputedStyle(document.body).backgroundColor,
};
const answer = document.createElement("template");
answer.setAttribute("data-found", JSON.stringify(found));
document.body.append(answer);
</script>
</body>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser on this machine ({', '.join(BROWSERS)})")
    return found


def look(browser: str, page: Path, profile: Path, *, width: int = 1200, dark: bool = False) -> str:
    """Open a page and return what became of it; a line on its console fails the test."""
    offline = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *offline),
            *(f"--user-data-dir={profile}", "--enable-logging=stderr", "--hide-scrollbars"),
            *(f"--window-size={width},900", f"--blink-settings=preferredColorScheme={1 - dark}"),
            *("--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    return done.stdout


def ask(browser: str, report: Report, script: str, folder: Path, **options: Any) -> str:
    """Open a report with another script at its end; return what that left in ``data-found``."""
    html = report.path.read_text(encoding="utf-8")
    # The page allows no script but its own, so the other one comes in a copy that does.
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    assert policy.search(html)
    asked = folder / "asked.html"
    asked.write_text(policy.sub("", html).replace("</body>", script), encoding="utf-8")
    shown = look(browser, asked, folder / "profile", **options)
    answer = re.search(r'data-found="([^"]*)"', shown)
    assert answer is not None
    return answer[1]


def test_nothing_complains(browser: str, binary_report: Report, tmp_path: Path) -> None:
    shown = look(browser, binary_report.path, tmp_path / "profile")
    assert shown.count("<figure") == len(binary_report.figures)


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (500, True)])
def test_every_figure_is_there(
    browser: str, binary_report: Report, tmp_path: Path, width: int, dark: bool
) -> None:
    answer = ask(browser, binary_report, QUESTIONS, tmp_path, width=width, dark=dark)
    found = json.loads(unescape(answer))
    assert [figure["name"] for figure in found["figures"]] == list(binary_report.figures)
    for figure in found["figures"]:
        assert figure["words"], figure
        assert figure["width"] > 150, figure
        assert figure["height"] > 40, figure
        assert figure["marks"] > 3, figure
    assert found["page"] <= found["window"]  # nothing sticks out
    assert max(found["tables"]) <= 0  # and no table is cut
    brightness = sum(map(int, re.findall(r"\d+", found["paper"])[:3])) / 3
    assert (brightness < 128) == dark


def test_a_click_sorts_the_predictions(browser: str, binary_report: Report, tmp_path: Path) -> None:
    click = """<script>
    const table = document.querySelector("table.sortable");
    const column = [...table.tHead.rows[0].cells].findIndex((c) => c.textContent === "p(1)");
    table.tHead.rows[0].cells[column].querySelector("button").click();
    const rows = [...table.tBodies[0].rows];
    document.body.dataset.found = rows.map((row) => row.cells[column].textContent);
    </script></body>"""
    answer = ask(browser, binary_report, click, tmp_path)
    shown = [float(text) for text in answer.split(",")]
    assert shown == sorted(shown)
    assert len(shown) == 48
