"""Every package of the library is on the map, and the map shows nothing else."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_code_map_names_every_package_and_no_other() -> None:
    library = ROOT / "histograph_post"
    packages = {path.name for path in library.glob("*.py")} - {"__init__.py"}
    packages |= {f"{path.parent.name}/" for path in library.glob("*/__init__.py")}
    text = (ROOT / "docs" / "code-map.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^[0-9]+\. `([\w/]+)`|`(\w+(?:/|\.py))`", text, flags=re.MULTILINE))
    names = {name for pair in named for name in pair if name}
    assert packages - names == set()
    places = (library, ROOT)
    unknown = {name for name in names if not any((place / name).exists() for place in places)}
    assert unknown <= {"__init__.py"}
