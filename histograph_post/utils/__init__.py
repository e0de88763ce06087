"""Utilities for every room; none of them knows about graphs or models.

``files.py`` (atomic writes, hashes, tensors in files), ``outputs.py`` (one writer per output),
``decoding.py`` (strict values), ``specifications.py`` (which code may run, and importing it),
``trust.py`` (what the user approved, and the bytes of that code), ``machine.py`` (devices, memory),
``text.py`` (numbers for readers); here, the levels of a task.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

#: What a row of labels, outputs and splits is: a graph, a node, or a pair of ``edge_label_index``.
Level = Literal["graph", "node", "link"]
LEVELS: tuple[Level, ...] = get_args(Level)


def lazy_names(package: str, source: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are imported on first use.

    They are what it imports under ``TYPE_CHECKING``, so that they stand there once. So commands
    that do not need torch do not wait for it.

    Args:
        package: Its name.
        source: Its file.
    """
    module_of: dict[str, str] = {}
    for block in ast.parse(Path(source).read_text(encoding="utf-8")).body:
        if isinstance(block, ast.If):
            for node in block.body:
                assert isinstance(node, ast.ImportFrom)
                module = "." * node.level + (node.module or "")
                module_of |= dict.fromkeys((each.name for each in node.names), module)

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name], package), name)

    return load
