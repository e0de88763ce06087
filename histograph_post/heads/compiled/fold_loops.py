"""The maps that graphs are read with, made of the weights of a head, and the gradients of that.

The letters and formulas are those of :mod:`histograph_post.heads.folded_maps`.
"""

from __future__ import annotations

import numpy as np

from ..folded_maps import Maps
from .graph_records import TurnedMaps
from .head_weights import Form, view_weights
from .loops import Floats, Parts, loop, take_number
from .products import add_dots_of_rows, add_product, write_product
from .row_loops import add_rows, copy_row
from .teams import TeamLoop


@loop
def fold_all(
    parts: Parts,
    weights: Floats,
    encoding: Floats,
    form: Form,
    maps: Maps[Floats],
    turned: TurnedMaps,
    turned_key: Floats,
) -> None:
    """Make the maps of copies of a head, as long as there are parts to be taken.

    Args:
        parts: Two of each copy: what queries need, and what keys and nodes need.
        weights: All weights of each copy, ``[copies, numel]``.
        encoding: Of the places of layers, ``[L, dim]``.
        form: What the head is made of.
        maps: Filled in.
        turned: Filled in.
        turned_key: Filled in: ``maps.layers.key`` with inputs as rows, ``[copies, D, dim]``.
    """
    while True:
        copy, half = divmod(take_number(parts.next), 2)
        if copy >= len(weights):
            return
        own, layers = view_weights(weights[copy], form), maps.layers
        dim, channels, num_layers = form.dim, form.channels, form.num_layers
        offset = np.empty((num_layers, dim), np.float32)
        for layer in range(num_layers):
            for place in range(dim):
                offset[layer, place] = own.embedding_bias[0, place] + encoding[layer, place]
        if half == 0:
            copy_row(offset.reshape(-1), layers.offset[copy].reshape(-1))
            write_product(own.query.T, own.embedding, 0, layers.query[copy], 0, channels)
            write_product(own.embedding.T, own.query, 0, turned.query[copy], 0, dim)
            query_bias = layers.query_bias[copy].reshape(1, dim)
            write_product(offset[-1:], own.query, 0, query_bias, 0, dim)
            copy_row(own.embedding.reshape(-1), layers.embedding[copy].reshape(-1))
            turn(own.embedding, turned.embedding[copy])
        else:
            key = layers.key[copy].reshape(dim, channels)
            write_product(own.key.T, own.embedding, 0, key, 0, channels)
            write_product(own.embedding.T, own.key, 0, turned_key[copy], 0, dim)
            fixed = np.empty((num_layers, dim), np.float32)
            write_product(offset, own.key, 0, fixed, 0, dim)
            turn(fixed, layers.fixed_keys[copy].reshape(dim, num_layers))
            copy_row(own.nodes.reshape(-1), maps.nodes[copy].reshape(-1))
            copy_row(own.nodes_bias[0], maps.nodes_bias[copy])
            turn(own.nodes, turned.nodes[copy])


FOLD_ALL = TeamLoop(fold_all)


@loop
def fold_all_back(
    parts: Parts,
    weights: Floats,
    form: Form,
    maps: Maps[Floats],
    grad_maps: Maps[Floats],
    gradients: Floats,
) -> None:
    """Give the gradients of :func:`fold_all`.

    Args:
        parts: Two of each copy: the gradient of the embedding, and all others.
        weights: All weights of each copy, ``[copies, numel]``.
        form: What the head is made of.
        maps: What :func:`fold_all` has made.
        grad_maps: Of the maps; used up.
        gradients: Of the weights, added to, ``[copies, numel]``.
    """
    while True:
        copy, half = divmod(take_number(parts.next), 2)
        if copy >= len(weights):
            return
        own, grad = view_weights(weights[copy], form), view_weights(gradients[copy], form)
        dim, channels, num_layers = form.dim, form.channels, form.num_layers
        grad_query = grad_maps.layers.query[copy]  # [dim, D]
        grad_key = grad_maps.layers.key[copy].reshape(dim, channels)
        if half == 0:
            add_product(own.query, grad_query, 0, grad.embedding, 0, channels)
            add_product(own.key, grad_key, 0, grad.embedding, 0, channels)
            add_rows(grad_maps.layers.embedding[copy].reshape(1, -1), grad.embedding.reshape(-1))
            continue
        offset, grad_offset = maps.layers.offset[copy], grad_maps.layers.offset[copy]  # [L, dim]
        grad_bias = grad_maps.layers.query_bias[copy].reshape(1, dim)
        grad_fixed = np.empty((num_layers, dim), np.float32)
        turn(grad_maps.layers.fixed_keys[copy].reshape(dim, num_layers), grad_fixed)
        add_dots_of_rows(own.embedding, grad_query, grad.query)
        add_product(offset[-1:].T, grad_bias, 0, grad.query, 0, dim)
        add_dots_of_rows(own.embedding, grad_key, grad.key)
        add_product(offset.T, grad_fixed, 0, grad.key, 0, dim)
        add_dots_of_rows(grad_bias, own.query, grad_offset[-1:])
        add_dots_of_rows(grad_fixed, own.key, grad_offset)
        add_rows(grad_offset, grad.embedding_bias[0])
        add_rows(grad_maps.nodes[copy].reshape(1, -1), grad.nodes.reshape(-1))
        add_rows(grad_maps.nodes_bias[copy].reshape(1, -1), grad.nodes_bias[0])


FOLD_ALL_BACK = TeamLoop(fold_all_back)


@loop
def turn(values: Floats, result: Floats) -> None:
    """Write columns as rows: ``[n, m]`` to ``[m, n]``, a few columns at a time."""
    rows, columns = values.shape
    for first in range(0, columns, 16):
        for row in range(rows):
            for column in range(first, min(first + 16, columns)):
                result[column, row] = values[row, column]
