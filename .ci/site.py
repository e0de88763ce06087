"""The site has more than docs/: the README as its first page, examples, files that pages link to.

MkDocs calls these functions. Pages stay as GitHub shows them; only their links are turned around.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

#: File in the repository -> page of the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples/index.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add what is not in docs/: those pages, and every other file that a page links to."""
    for source, page in PAGES.items():
        if (ROOT / source).is_file():
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=text))
    for page in [file for file in files if file.is_documentation_page()]:
        for target in _targets(page):
            path = ROOT / target
            known = target in PAGES or target.startswith("docs/")
            if path.is_file() and not known and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return a page with its links as they are on the site, and files named above their code."""
    source = _source(page.file)
    here = Path(page.file.src_uri).parent

    def turned(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        target, hash_, anchor = link.partition("#")
        if not target or "://" in target or target.startswith(("data:", "mailto:")):
            return match[0]
        found = _on_site(_normal(source.parent / target))
        relative = Path(*[".."] * len(here.parts), found)
        return f"{before}{relative.as_posix()}{hash_}{anchor}{after}"

    markdown = re.sub(r'(\]\(|src=")([^)"\s]+)([)"])', turned, markdown)
    return re.sub(r"^( *```\w+) (\S+\.\w+)$", r'\1 title="\2"', markdown, flags=re.MULTILINE)


def _source(file: File) -> Path:
    """Return where a page is in the repository."""
    pages = {page: source for source, page in PAGES.items()}
    return Path(pages.get(file.src_uri, f"docs/{file.src_uri}"))


def _targets(file: File) -> list[str]:
    """Return the files of the repository that a page links to."""
    links = re.findall(r'\]\(([^)"\s#]+)|src="([^"]+)"', file.content_string)
    source = _source(file)
    return [_normal(source.parent / (a or b)) for a, b in links if "://" not in (a or b)]


def _on_site(target: str) -> str:
    return PAGES.get(target, target.removeprefix("docs/"))


def _normal(path: Path) -> str:
    """Return a path from the root of the repository, without `..`."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
