"""Print what capture comes to for every model of the zoo: ``python -m tests.capture.zoo``.

Markdown on stdout: a row per family with its counts, then a row per model. ``--details`` lists
what was expected and what was captured instead. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict

import torch

from . import ENTRIES, Outcome, examine

WORDS = {"right": "captured right", "refused": "refused, says why", "wrong": "**wrong**"}


def family_table(outcomes: list[Outcome]) -> list[str]:
    """A row per family: how many models, and how many of each outcome."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        counts[outcome.entry.family][outcome.result] += 1
        counts["**all**"][outcome.result] += 1
    families = [*(name for name in counts if name != "**all**"), "**all**"]
    rows = [
        "| family | models | captured right | refused, says why | wrong |",
        "|---|---|---|---|---|",
    ]
    for family in families:
        found = counts[family]
        cells = (found.total(), found["right"], found["refused"], found["wrong"])
        rows.append(f"| {family} | {' | '.join(map(str, cells))} |")
    return rows


def model_table(outcomes: list[Outcome]) -> list[str]:
    """A row per model, with the widths of its layers or the refusal."""
    rows = ["| family | model | outcome | layers |", "|---|---|---|---|"]
    for outcome in outcomes:
        layers = "" if outcome.result == "refused" else " ".join(map(str, outcome.widths))
        cells = (outcome.entry.family, outcome.entry.name, WORDS[outcome.result], layers)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def details(outcomes: list[Outcome]) -> list[str]:
    """A row per model with all that is known of it."""
    rows = [
        "| model | data | expected | widths by hand | captured | outcome | |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        entry = outcome.entry
        captured = " ".join(
            f"{name}:{width}" for name, width in zip(outcome.names, outcome.widths, strict=True)
        )
        mark = "" if outcome.as_expected else " (!)"
        cells = (
            entry.name,
            entry.data,
            entry.expected,
            " ".join(map(str, outcome.wanted)),
            captured,
            outcome.result + mark,
            outcome.line.replace("|", "/"),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> int:
    torch.set_num_threads(1)  # the models are tiny
    outcomes = [examine(entry) for entry in ENTRIES]
    lines = [*family_table(outcomes), "", *model_table(outcomes)]
    if "--details" in sys.argv:
        lines = [*family_table(outcomes), "", *details(outcomes)]
    print("\n".join(lines))
    return int(any(outcome.result == "wrong" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
