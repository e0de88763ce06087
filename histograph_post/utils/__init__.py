"""Utilities for every room; none of them knows about graphs or models.

``files.py`` (atomic writes, hashes, tensors in files), ``outputs.py`` (one writer per output),
``decoding.py`` (strict values), ``specifications.py`` (which code may run, and importing it),
``trust.py`` (what the user approved), ``sources.py`` (the bytes of approved code), ``machine.py``
(devices, memory), ``text.py`` (numbers for readers); here, the levels of a task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, get_args

#: What a row of labels, outputs and splits is: a graph, a node, or a pair of ``edge_label_index``.
Level = Literal["graph", "node", "link"]
LEVELS: tuple[Level, ...] = get_args(Level)


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are imported on first use.

    So commands that do not need torch do not wait for it.

    Args:
        modules: Module, relative to the package -> public names in it.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name], package), name)

    return load
