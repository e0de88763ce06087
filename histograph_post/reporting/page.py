"""The page: sections of text, tables and figures as one self-contained HTML file."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from .. import __version__
from ..errors import printable
from ..utils.text import MINUS, MISSING
from .figures import Figure

#: Marks a file as a report.
GENERATOR = "histograph-post report"


@dataclass(frozen=True)
class Table:
    """Rows of text; the first cell of a row names it.

    Args:
        columns: Headings; none for a list of facts.
        rows: Cells.
        caption: A line below it.
        chosen: Number of the row in bold.
        sortable: Whether a click on a heading sorts it. Such a table scrolls by itself, and only
            its first rows are printed.
        summary: If given, the table is folded under this line.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    chosen: int | None = None
    sortable: bool = False
    summary: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the report under a heading."""

    key: str
    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    #: The legend of all figures, above them.
    legend: Figure | None = None
    #: A command or a listing.
    code: str = ""
    #: Whether figures are small, three in a row.
    small: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.tables or self.figures or self.code or self.text)


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    kicker: str
    #: The verdict; its first words say what to do.
    headline: str
    #: ``use``, ``keep`` or ``undecided``: sets the colour beside it.
    decision: str = "undecided"
    #: What is missing or was sampled, one line each.
    notes: Sequence[str] = ()
    sections: Sequence[Section] = ()

    @property
    def figures(self) -> list[Figure]:
        """Every figure, in order."""
        return [
            figure
            for section in self.sections
            for figure in (section.legend, *section.figures)
            if figure is not None
        ]

    def to_html(self) -> str:
        """Return the page."""
        style, script = (
            files(__package__).joinpath(name).read_text(encoding="utf-8")
            for name in ("page.css", "page.js")
        )
        digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
        links = "".join(f'<a href="#{part.key}">{escape(part.title)}</a>' for part in self.sections)
        notes = "".join(f"<li>{_text(note)}</li>" for note in self.notes)
        return printable(
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="generator" content="{GENERATOR}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            # Nothing is loaded, and no script runs but ours, which sorts tables: not even one that
            # a file name might have smuggled in.
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            f"img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'\">\n"
            '<link rel="icon" href="data:,">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
            f'<header>\n<p class="kicker">{escape(self.kicker)}</p>\n'
            f"<h1>{escape(self.title)}</h1>\n"
            f'<p class="headline {escape(self.decision)}">{_headline(self.headline)}</p>\n'
            f'<nav aria-label="Contents">{links}</nav>\n'
            + (f'<ul class="notes">{notes}</ul>\n' if notes else "")
            + "</header>\n<main>\n"
            + "".join(_section(section) for section in self.sections)
            + f"</main>\n<footer>histograph-post {__version__}</footer>\n"
            + f"<script>{script}</script>\n</body>\n</html>\n"
        )


#: How a verdict begins: what to do.
_DECISION = re.compile(r"(Use \S+?|Keep your own readout|Keep the frozen head|Undecided)(?=[ ,:])")


def _headline(headline: str) -> str:
    found = _DECISION.match(headline)
    if found is None:
        return _text(headline)
    return f"<strong>{escape(found[1])}</strong>{_text(headline[found.end() :])}"


def _text(text: str) -> str:
    """Return text as HTML: backticks mark code, and intervals do not wrap."""
    whole = re.sub(r"\[(\S+), (\S+)\]", "[\\1,\N{NO-BREAK SPACE}\\2]", escape(text))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", whole)


def _section(section: Section) -> str:
    parts = [f'<section id="{section.key}">\n<h2>{escape(section.title)}</h2>\n']
    if section.text:
        parts.append(f"<p>{_text(section.text)}</p>\n")
    parts += [_table(table) for table in section.tables]
    if section.code:
        parts.append(f"<pre>{escape(section.code)}</pre>\n")
    if section.legend is not None:
        parts.append(f'<div class="legend">\n{_figure(section.legend)}</div>\n')
    if section.figures:
        kind = "figures small" if section.small else "figures"
        parts.append(f'<div class="{kind}">\n')
        parts += [_figure(figure) for figure in section.figures]
        parts.append("</div>\n")
    return "".join([*parts, "</section>\n"])


def _figure(figure: Figure) -> str:
    return (
        f'<figure id="{figure.name}">\n<h3>{escape(figure.title)}</h3>\n{figure.inline()}\n'
        f"<figcaption>{escape(figure.caption)}</figcaption>\n</figure>\n"
    )


#: A table of more columns is a list of cards on a phone.
_NARROW = 3


def _table(table: Table) -> str:
    width = max(len(row) for row in table.rows)
    numeric = [
        column > 0
        and bool(table.columns)
        and all(_is_numeric(row[column]) for row in table.rows if column < len(row))
        for column in range(width)
    ]
    marks = [' class="number"' if flag else "" for flag in numeric]
    head = "".join(
        f'<th scope="col"{mark}>{escape(text)}</th>'
        for text, mark in zip(table.columns, marks, strict=False)
    )
    labels = [f' data-label="{escape(text)}"' for text in table.columns] or [""] * width
    body = []
    for number, (first, *rest) in enumerate(table.rows):
        cells = "".join(
            f"<td{mark}{label}>{_cell(text)}</td>"
            for text, mark, label in zip(rest, marks[1:], labels[1:], strict=False)
        )
        chosen = ' class="chosen"' if number == table.chosen else ""
        body.append(f'<tr{chosen}><th scope="row"{labels[0]}>{escape(first)}</th>{cells}</tr>')
    kinds = ["facts"] if not table.columns else ["cards"] if width > _NARROW else []
    kinds += ["sortable"] if table.sortable else []
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    # Below the table and not in it, so that it stays in sight where a wide table is scrolled.
    caption = f'<p class="caption">{_text(table.caption)}</p>\n' if table.caption else ""
    heading = f"<thead><tr>{head}</tr></thead>" if head else ""
    rows = "\n".join(body)
    whole = (
        f'<div class="table{" tall" if table.sortable else ""}" tabindex="0"><table{kind}>{heading}'
        f"<tbody>\n{rows}\n</tbody></table></div>\n{caption}"
    )
    if table.summary:
        return f"<details><summary>{escape(table.summary)}</summary>\n{whole}</details>\n"
    return whole


def _cell(text: str) -> str:
    """Return a cell as HTML; the interval of a difference may go to a line of its own."""
    mean, bracket, interval = text.partition(" [")
    if not bracket or not _is_numeric(mean):
        return _text(text)
    return f'<span>{escape(mean)} <span class="interval">[{escape(interval)}</span></span>'


def _is_numeric(text: str) -> bool:
    return text == MISSING or (
        text[:1] in f"+-{MINUS}0123456789" and any(c.isdigit() for c in text)
    )
