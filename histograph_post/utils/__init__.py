"""Utilities for every package; none of them knows about graphs or models.

``files.py`` (atomic writes, hashes, tensors in files), ``outputs.py`` (one writer per output),
``decoding.py`` (strict values), ``specifications.py`` (which code may run, and importing it),
``trust.py`` (what the user approved), ``sources.py`` (the bytes of approved code), ``inert.py``
(files of torch, read without running them), ``machine.py`` (devices, memory), ``text.py`` (numbers
for readers); here, the levels of a task.
"""

from __future__ import annotations

from typing import Literal, get_args

#: What a row of labels, outputs and splits is: a graph, a node, or a pair of ``edge_label_index``.
Level = Literal["graph", "node", "link"]
LEVELS: tuple[Level, ...] = get_args(Level)
