"""Reading a report back."""

from __future__ import annotations

from html.parser import HTMLParser


class Reader(HTMLParser):
    """The figures and table rows of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.figures: dict[str, str] = {}
        #: The rows of each table, headings first.
        self.tables: list[list[list[str]]] = []
        self.references: list[str] = []
        self._figure = ""
        self._cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.references += [given[name] for name in ("src", "href", "xlink:href") if name in given]
        if tag == "figure":
            self._figure = given["id"]
        if tag == "svg":
            assert given["role"] == "img"
            self.figures[self._figure] = given["aria-label"]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self._cell = True
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.tables[-1][-1][-1] += data
