"""Every room of the library is on the map, and the map shows nothing else."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_code_map_names_every_module_and_no_other() -> None:
    library = ROOT / "histograph_post"
    there = {path.name for path in library.glob("*.py")} - {"__init__.py"}
    there |= {f"{path.parent.name}/" for path in library.glob("*/__init__.py")}
    text = (ROOT / "docs" / "code-map.md").read_text(encoding="utf-8")
    table = text[text.index("| step |") : text.index("Two rules")]
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", table))
    assert there - named == set()
    assert {name for name in named if not (library / name).exists()} <= {"cli/demo.py"}
