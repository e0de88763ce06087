"""A head up to what it makes of a graph, graph by graph: layer weights, node embeddings, attention.

Where a graph is in what goes in and comes out, :mod:`.graph_records` says.
"""

from __future__ import annotations

import numpy as np

from ..folded_maps import Maps
from .ahead import fetch_rest, look_ahead
from .attention_loops import attend, take_values
from .graph_records import Kept, Results, Table, TurnedMaps, Weighing, end_of_block, graph_history
from .layer_loops import embed, score_layers
from .loops import ONE, Floats, Integers, Parts, loop, part_of_loop, take_number
from .products import add_product, add_product_ahead, sum_pieces, write_product
from .row_loops import clear_row, new_rows, repeat_row, take_mean
from .teams import TeamLoop
from .weight_loops import normalize_all


@loop
def read_graphs(
    parts: Parts,
    table: Table,
    maps: Maps[Floats],
    turned: TurnedMaps,
    weighing: Weighing,
    kept: Kept,
    results: Results,
    layer_means: Floats,
) -> None:
    """Run copies of a head on graphs, as long as there are parts of the batch to be taken.

    Args:
        parts: The parts.
        table: The history.
        maps: The weights.
        turned: The same.
        weighing: How scores become weights.
        kept: Filled in.
        results: Filled in.
        layer_means: Filled in: means over the nodes of every layer, ``[num_graphs, L * D]``; empty
            if they are not asked for.
    """
    ahead, (copies, _, channels) = np.zeros(2, np.int64), maps.layers.query.shape
    while True:
        part = take_number(parts.next)
        if part + 1 >= len(parts.bounds):
            return
        stop = parts.bounds[part]
        while stop < parts.bounds[part + 1]:
            first, stop = stop, end_of_block(table, stop, parts.bounds[part + 1], copies)
            for graph in range(first, stop):
                history = graph_history(table, graph, channels)  # [n, L * D]
                if len(layer_means):
                    take_mean(history, layer_means[graph])
                else:
                    fetch_rest(history, ahead)
            for copy in range(copies):
                for graph in range(first, stop):
                    if copy == copies - 1:  # the weights of others would push it out of the cache
                        look_ahead(table, parts, part, graph, channels, ahead)
                    history, begin = graph_history(table, graph, channels), table.ptr[graph]
                    if len(history):
                        read_graph(
                            history,
                            graph,
                            begin,
                            copy,
                            maps,
                            turned,
                            weighing,
                            kept,
                            results,
                            ahead,
                        )
                    else:
                        clear_row(results.contexts[copy, graph])
                        clear_row(results.means[copy, graph])


READ_GRAPHS = TeamLoop(read_graphs)


@part_of_loop
def read_graph(
    history: Floats,
    graph: int,
    begin: int,
    copy: int,
    maps: Maps[Floats],
    turned: TurnedMaps,
    weighing: Weighing,
    kept: Kept,
    results: Results,
    ahead: Integers,
) -> None:
    """Run one copy of a head on one graph.

    Args:
        history: ``[n, L * D]``, of one node at least.
        graph: Which graph of the batch it is.
        begin: Its first row of the batch.
        copy: Which copy of the head.
        maps: The weights.
        turned: The same.
        weighing: How scores become weights.
        kept: Filled in.
        results: Filled in.
        ahead: What is fetched meanwhile, see :mod:`.ahead`.
    """
    layers = maps.layers
    _, heads, width, channels = layers.key.shape
    dim, end = heads * width, begin + len(history)
    queries = kept.queries[copy, begin:end]  # [n, dim]
    repeat_row(layers.query_bias[copy], ONE, queries)
    add_product(history[:, -channels:], turned.query[copy], 0, queries, 0, dim)
    filters = new_rows(len(history), heads * channels)
    for head in range(heads):
        own = queries[:, head * width : (head + 1) * width]  # [n, dim / heads]
        write_product(own, layers.key[copy, head], 0, filters, head * channels, channels)
    scores = kept.scores[copy, graph]  # [heads, L]
    score_layers(history, filters, queries, layers.fixed_keys[copy], weighing.scale, scores)
    weights = np.empty(scores.shape, np.float32)
    normalize_all(scores, weighing.kind, weighing.bound, weights)
    combined = filters  # which are not needed any more
    sum_pieces(weights, history, combined)
    nodes = kept.nodes[copy, begin:end]  # [n, dim]
    embed(combined, weights, turned.embedding[copy], layers.offset[copy], nodes, ahead)
    query_key = kept.query_key[copy, begin:end]  # [n, 2 * dim]
    repeat_row(maps.nodes_bias[copy, : 2 * dim], ONE, query_key)
    add_product_ahead(nodes, turned.nodes[copy], 0, query_key, 0, 2 * dim, ahead)
    summaries = kept.summaries[copy, graph]  # [attention heads, dim]
    attend(nodes, query_key, weighing.node_scale, summaries)
    values, bias = turned.nodes[copy], maps.nodes_bias[copy, 2 * dim :]
    take_values(summaries, values, bias, results.contexts[copy, graph : graph + 1])
    take_mean(nodes, results.means[copy, graph])
