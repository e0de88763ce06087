"""What node attention over a large graph will cost, said before it starts."""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from ..heads.histograph import HistoGraphHead
from ..heads.histograph.edge_attention import attend_along_edges
from ..heads.histograph.node_attention import EXACT_NODES
from .head_batches import LoadedCache
from .node_batches import NODES_PER_BATCH, goes_by_nodes

#: Graphs of fewer nodes are not worth a word.
WORTH_A_WORD = EXACT_NODES // 2

#: What a step takes, in units of what its forward pass takes.
BACKWARD_SHARE = 3.5

#: Queries and keys whose attention is timed.
_TIMED = 1024, 4096


def attention_note(head: nn.Module, loaded: LoadedCache) -> str | None:
    """Say how nodes of the largest graph are attended to, and what a step takes; None if little."""
    nodes = int(loaded.cache.num_nodes.max())
    if not isinstance(head, HistoGraphHead) or head.node_attention is None or nodes <= WORTH_A_WORD:
        return None
    options, kind = head.options, head.options.node_attention
    if kind == "auto":
        kind = "exact" if nodes <= EXACT_NODES else "landmark"
    asked = min(nodes, NODES_PER_BATCH) if goes_by_nodes(head, loaded) else nodes
    keys = {"exact": float(nodes), "landmark": float(options.landmarks)}.get(kind)
    if keys is None:
        edges = loaded.edge_index
        keys = 1 + (0 if edges is None else edges.shape[1]) / nodes
    seconds = BACKWARD_SHARE * asked * keys * _seconds_of_a_score(kind, options.dim, options.heads)
    rows = asked + (keys * asked if kind == "neighbors" else keys)
    # Queries, keys, values and what they find, and the gradients of all of them.
    num_bytes = 8 * 4 * rows * options.dim
    chosen = f"{kind}, because {nodes:,} nodes are more than {EXACT_NODES:,}"
    how = chosen if options.node_attention != kind and kind == "landmark" else kind
    return (
        f"node attention: {how}; a step on up to {asked:,} of {nodes:,} nodes, "
        f"{keys:,.0f} keys each: about {_short(seconds)} s and {_short(num_bytes / 1e6)} MB "
        "on this processor (node_attention=exact|landmark|neighbors|none)"
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _seconds_of_a_score(kind: str, dim: int, heads: int) -> float:
    """Time attention between random rows; an estimate, not a promise."""
    queries, keys = _TIMED
    rows = torch.zeros(keys, 3, heads, dim // heads)
    if kind == "neighbors":
        edges = torch.randint(keys, (2, queries * 64), generator=torch.Generator().manual_seed(0))
        scores, attend = edges.shape[1], partial(attend_along_edges, rows, edges, False)
    else:
        query, key, value = rows.permute(1, 2, 0, 3).unsqueeze(1)  # [1, heads, keys, d] each
        attention = functional.scaled_dot_product_attention
        scores, attend = queries * keys, partial(attention, query[:, :, :queries], key, value)
    attend()  # wakes threads up
    started = time.perf_counter()
    attend()
    return (time.perf_counter() - started) / scores
