"""The page: sections of text, tables and figures as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files

from .. import __version__
from ..utils.text import MINUS, MISSING
from .figures import Figure

#: How a page of ours is known again.
GENERATOR = "histograph-post report"


@dataclass(frozen=True)
class Table:
    """Rows of text; the first cell of a row names it.

    Args:
        columns: Headings; none for a list of facts.
        rows: Cells.
        caption: A line below it.
        chosen: Number of the row to stress.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    chosen: int | None = None


@dataclass(frozen=True)
class Section:
    """A part of the report under a heading."""

    key: str
    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
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
    headline: str
    #: What is missing or was sampled, one line each.
    notes: Sequence[str] = ()
    sections: Sequence[Section] = field(default_factory=tuple)

    @property
    def figures(self) -> list[Figure]:
        """Every figure, in order."""
        return [figure for section in self.sections for figure in section.figures]

    def to_html(self) -> str:
        """Return the page."""
        style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
        links = "".join(f'<a href="#{part.key}">{escape(part.title)}</a>' for part in self.sections)
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="generator" content="{GENERATOR}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            # Nothing is loaded, not even by what a file name might have smuggled in.
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            "img-src data:; style-src 'unsafe-inline'\">\n"
            '<link rel="icon" href="data:,">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
            f'<header>\n<p class="kicker">{escape(self.kicker)}</p>\n'
            f"<h1>{escape(self.title)}</h1>\n"
            f'<p class="headline">{escape(self.headline)}</p>\n'
            + (f'<ul class="notes">{notes}</ul>\n' if notes else "")
            + f'<nav aria-label="Contents">{links}</nav>\n</header>\n<main>\n'
            + "".join(_section(section) for section in self.sections)
            + f"</main>\n<footer>histograph-post {__version__}</footer>\n</body>\n</html>\n"
        )


def _section(section: Section) -> str:
    parts = [f'<section id="{section.key}">\n<h2>{escape(section.title)}</h2>\n']
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>\n")
    parts += [_table(table) for table in section.tables]
    if section.code:
        parts.append(f"<pre>{escape(section.code)}</pre>\n")
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
    body = []
    for number, (first, *rest) in enumerate(table.rows):
        cells = "".join(
            f"<td{mark}>{escape(text)}</td>" for text, mark in zip(rest, marks[1:], strict=False)
        )
        stress = ' class="chosen"' if number == table.chosen else ""
        body.append(f'<tr{stress}><th scope="row">{escape(first)}</th>{cells}</tr>')
    kind = "" if table.columns else ' class="facts"'
    # Below the table and not in it: where a wide one is scrolled, its words stay in sight.
    caption = f'<p class="caption">{escape(table.caption)}</p>\n' if table.caption else ""
    heading = f"<thead><tr>{head}</tr></thead>" if head else ""
    rows = "\n".join(body)
    return (
        f'<div class="table" tabindex="0"><table{kind}>{heading}<tbody>\n{rows}\n</tbody></table>'
        f"</div>\n{caption}"
    )


def _is_numeric(text: str) -> bool:
    return text == MISSING or (
        text[:1] in f"+-{MINUS}0123456789" and any(c.isdigit() for c in text)
    )
