"""The weights of a head up to its readout, folded: as they are applied to a history.

The letters are those of :mod:`.layer_weights`: E and b embed a layer, P encodes its place, Wq and
Wk make queries and keys. Values are tensors, or arrays where loops read them, and may have a
dimension of copies of the head in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

Values = TypeVar("Values")


class LayerMaps(NamedTuple, Generic[Values]):
    """The maps of the layer stage, for layers that all have one width."""

    #: ``Wq^T E``, from the last layer to queries, ``[dim, D]``.
    query: Values
    #: ``(b + P_last) Wq``, ``[dim]``.
    query_bias: Values
    #: ``Wk^T E``, from queries to channels of the history, ``[heads, dim / heads, D]``.
    key: Values
    #: ``(b + P_l) Wk``, ``[heads, dim / heads, L]``.
    fixed_keys: Values
    #: ``E``, ``[dim, D]``.
    embedding: Values
    #: ``b + P_l``, ``[L, dim]``.
    offset: Values


class Maps(NamedTuple, Generic[Values]):
    """The maps of the layer stage and of node attention, or their gradients."""

    layers: LayerMaps[Values]
    #: From node embeddings to queries, keys and values of node attention, ``[3 * dim, dim]``.
    nodes: Values
    #: ``[3 * dim]``.
    nodes_bias: Values

    @property
    def values(self) -> tuple[Values, ...]:
        """All of them, one after the other."""
        return (*self.layers, self.nodes, self.nodes_bias)


def as_maps(values: Sequence[Values]) -> Maps[Values]:
    """Return :attr:`Maps.values` as what they are."""
    *layers, nodes, nodes_bias = values
    return Maps(LayerMaps(*layers), nodes, nodes_bias)
