"""What every room may use; none of it knows of graphs or models.

``files.py`` (atomic writes, hashes), ``tensors.py`` (in files), ``outputs.py`` (one writer per
output), ``decoding.py`` (strict values), ``specifications.py`` (which code a name may lead to, and
importing it), ``trust.py`` (what the user approved), ``machine.py`` (devices, memory), ``text.py``
(numbers for readers); here, what a row stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, get_args

#: What a row of labels, outputs and splits stands for: a whole graph, each node, or each pair of
#: ``edge_label_index``.
Level = Literal["graph", "node", "link"]
LEVELS: tuple[Level, ...] = get_args(Level)


def lazy_names(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are loaded on first use.

    So a small question never waits for torch.

    Args:
        modules: Module, relative to the package -> public names in it.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name], package), name)

    return load
