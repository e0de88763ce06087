"""All weights of a head: one vector, and what stands in it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .loops import Floats, loop


class Form(NamedTuple):
    """What a head is made of."""

    dim: int
    #: Channels of the history, and its layers.
    channels: int
    num_layers: int
    layer_heads: int
    #: Hidden layers of the MLP.
    hidden: int
    out_dim: int
    #: Whether the readout is mixed with all layers, or with the last one as it is embedded.
    mixes_all: bool
    #: Whether the mean of the node embeddings is added to what node attention finds.
    residual: bool
    #: Whether what the MLP reads is normalised.
    normed: bool
    #: The share of the readout in what it is mixed with; below zero if it is learned.
    share: np.float32


class HeadWeights(NamedTuple):
    """The weights of a head, or their gradients; a linear map is ``[outputs, inputs]``."""

    #: Of layer attention, ``[dim, dim]`` each; inputs are rows.
    query: Floats
    key: Floats
    #: Of every layer, ``[dim, D]`` and ``[1, dim]``.
    embedding: Floats
    embedding_bias: Floats
    #: Queries, keys and values of node attention, ``[3 * dim, dim]`` and ``[1, 3 * dim]``.
    nodes: Floats
    nodes_bias: Floats
    #: Of what node attention finds, ``[dim, dim]`` and ``[1, dim]``.
    projection: Floats
    projection_bias: Floats
    #: Of the means of layers: of all, ``[dim, L * D]``, or the embedding; and ``[1, dim]``.
    base: Floats
    base_bias: Floats
    #: Of the share, ``[1, 1]``; empty if it is fixed.
    logit: Floats
    #: Scale and shift of what the MLP reads, ``[2, dim]``; empty if it is not normalised.
    norm: Floats
    #: Maps of the hidden layers with their biases, ``[hidden, (dim + 1) * dim]``.
    hidden: Floats
    #: ``[out_dim, dim]`` and ``[1, out_dim]``.
    output: Floats
    output_bias: Floats


@loop
def view_weights(values: Floats, form: Form) -> HeadWeights:
    """View a vector as the weights it is made of, in the order in which a module names them."""
    dim = form.dim
    query, values = take_matrix(values, dim, dim)
    key, values = take_matrix(values, dim, dim)
    embedding, values = take_matrix(values, dim, form.channels)
    embedding_bias, values = take_matrix(values, 1, dim)
    nodes, values = take_matrix(values, 3 * dim, dim)
    nodes_bias, values = take_matrix(values, 1, 3 * dim)
    projection, values = take_matrix(values, dim, dim)
    projection_bias, values = take_matrix(values, 1, dim)
    base, base_bias = embedding, embedding_bias
    if form.mixes_all:
        base, values = take_matrix(values, dim, form.num_layers * form.channels)
        base_bias, values = take_matrix(values, 1, dim)
    logit, values = take_matrix(values, 1 if form.share < 0 else 0, 1)
    norm, values = take_matrix(values, 2 if form.normed else 0, dim)
    hidden, values = take_matrix(values, form.hidden, (dim + 1) * dim)
    output, values = take_matrix(values, form.out_dim, dim)
    output_bias, values = take_matrix(values, 1, form.out_dim)
    return HeadWeights(
        query,
        key,
        embedding,
        embedding_bias,
        nodes,
        nodes_bias,
        projection,
        projection_bias,
        base,
        base_bias,
        logit,
        norm,
        hidden,
        output,
        output_bias,
    )


@loop
def take_matrix(values: Floats, rows: int, columns: int) -> tuple[Floats, Floats]:
    """Return the first values as a matrix, and the rest."""
    size = rows * columns
    return values[:size].reshape(rows, columns), values[size:]
