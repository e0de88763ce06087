"""What a row of labels, outputs and splits stands for."""

from __future__ import annotations

from typing import Literal, get_args

#: A whole graph, each node, or each pair of ``edge_label_index``.
Level = Literal["graph", "node", "link"]
LEVELS: tuple[Level, ...] = get_args(Level)
