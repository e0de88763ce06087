"""HistoGraph: a readout that attends to the history of every node, then to the nodes of the graph.

After "Learning from Historical Activations in Graph Neural Networks". A graph never sees its
batch-mates: all means and all attention are taken inside each graph, so a graph has one output,
whatever it is batched with.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError, DataError
from .fast_path import READ_IN_LOOPS, in_loops
from .folded_maps import Maps
from .graph_stage import StageOptions, can_read, read_graphs
from .histograph_config import HistoGraphConfig
from .history import History, HistoryBatch, TableRows, check_layers
from .layer_kernels import layer_means, layer_project
from .layer_weights import LayerWeights
from .mixing import Mixing
from .node_attention import NodeAttention
from .own_precision import in_own_precision
from .ragged import Graphs
from .registry import PAPER_FORM
from .standardize import Standardizer

__all__ = ["PAPER_FORM", "Explanation", "HistoGraphConfig", "HistoGraphHead"]


@dataclass(frozen=True)
class Explanation:
    """What a head paid attention to.

    Args:
        layer_weights: Weight of each layer, ``[num_graphs, L]``; ``[num_graphs, layer_heads, L]``
            if there are several sets of weights.
        node_attention: Attention each node received, averaged over the nodes of its graph and over
            heads, ``[num_nodes]``; the share of the mean where there is no node attention.
    """

    layer_weights: Tensor
    node_attention: Tensor


class HistoGraphHead(nn.Module):
    """A readout over the history of a graph neural network.

    Args:
        in_dims: Width of each layer of the history, input embedding first.
        out_dim: Outputs per graph or node; 1 at link level.
        options: Any other field of :class:`HistoGraphConfig`: ``dim``, ``heads``, ``level``...

    Shapes:
        - **history:** ``[num_nodes, L, D]``, or one ``[num_nodes, D_l]`` per layer
        - **batch:** graph of each node, sorted, ``[num_nodes]``
        - **output:** ``[num_graphs, out_dim]``; ``[num_nodes, out_dim]`` at node level; node
          embeddings ``[num_nodes, dim]`` for :meth:`score` at link level

    In single precision, outputs and gradients are finite for activations of magnitude up to 1e12
    (without a normalisation of the layer weights, up to 1e6); beyond, gradients overflow.
    """

    def __init__(self, in_dims: Sequence[int], out_dim: int, **options: Any) -> None:
        super().__init__()
        config = HistoGraphConfig(tuple(in_dims), out_dim, **options)
        self.options, self.level = config, config.level
        self.standardizer = Standardizer(config.in_dims) if config.standardize else None
        self.layer_weights = LayerWeights(
            config.kept_dims,
            config.dim,
            heads=config.layer_heads,
            attention=config.layer_attention,
            normalization=config.normalization,
            eps=config.eps,
            radius=config.radius,
        )
        self.node_attention = (
            NodeAttention(
                config.dim,
                config.heads,
                zero_token=config.zero_token,
                dropout=config.attention_dropout,
                key_dropout=config.key_dropout,
            )
            if config.node_attention
            else None
        )
        self.norm = nn.LayerNorm(config.dim) if config.layer_norm else None
        self.all_layers = (
            nn.Linear(sum(config.kept_dims), config.dim) if config.mix == "all" else None
        )
        self.mixing = Mixing(config.mixing, config.mixing_init, config.mixing_delay)
        self.output_norm = nn.LayerNorm(config.dim) if config.output_norm else None
        hidden: list[nn.Module] = []
        for _ in range(config.mlp_layers):
            hidden += [nn.Linear(config.dim, config.dim), nn.ReLU(), nn.Dropout(config.dropout)]
        self.mlp = nn.Sequential(*hidden)
        self.output = nn.Linear(config.dim, out_dim)
        self.shortcut = nn.Linear(config.in_dims[-1], out_dim) if config.shortcut else None

    @classmethod
    def from_config(cls, config: HistoGraphConfig) -> HistoGraphHead:
        """Build the head a configuration describes."""
        return cls(**config.to_json())

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as plain values, to build this head again."""
        return self.options.to_json()

    @property
    def stackable(self) -> bool:
        """Whether copies with other weights can be run as one.

        Nothing may be drawn or counted, and there must be no fused attention of every node: what
        vmap makes of that is as slow as one copy after the other.
        """
        options = self.options
        drawn = options.dropout or options.attention_dropout or options.key_dropout
        own_buffers = options.layer_attention == "random" or options.mixing == "delayed"
        fused = self.node_attention is not None and (self.level != "graph" or options.layer_norm)
        return not (drawn or own_buffers or fused)

    @property
    def trains_in_loops(self) -> bool:
        """Whether compiled loops are made for training it on a cache, whatever mode it is in.

        They are used where numba is, and for graphs that are not too large for them.
        """
        return in_loops(self, READ_IN_LOOPS)

    @property
    def num_parameters(self) -> int:
        """Number of trainable values."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    @in_own_precision
    def forward(
        self,
        history: History | TableRows,
        batch: Tensor | None = None,
        *,
        num_graphs: int | None = None,
        edge_index: Tensor | None = None,
        standardized: bool = False,
    ) -> Tensor:
        """Read the history out.

        Args:
            history: ``[num_nodes, L, D]`` or one ``[num_nodes, D_l]`` per layer, any float type;
                or where rows of it lie in a table.
            batch: Graph of each node, sorted, ``[num_nodes]``; ``None`` for a single graph.
            num_graphs: Graphs in the batch, if the last ones may be empty.
            edge_index: Not used; structural readouts take it in this place.
            standardized: The rows have been through ``standardizer.apply_`` as they were loaded.

        Returns:
            ``[num_graphs, out_dim]``, ``[num_nodes, out_dim]`` or ``[num_nodes, dim]``, by level.
        """
        inputs = self._read(history, batch, num_graphs, standardized)
        if self.level == "graph":
            mixed = self.mixing(*self._read_graphs(inputs))  # [num_graphs, dim]
        else:
            nodes, _ = self.layer_weights(inputs.stacks, inputs.last, inputs.graphs)
            mixed = self.mixing(self._attend_nodes(nodes, inputs.graphs), self._node_base(inputs))
        if self.output_norm is not None:
            mixed = self.output_norm(mixed)  # [rows, dim]
        if self.level == "link":
            return mixed  # [num_nodes, dim]
        outputs: Tensor = self.output(self.mlp(mixed))  # [rows, out_dim]
        if self.shortcut is not None:
            outputs = outputs + self.shortcut(self._unstandardized_last(inputs))
        return outputs

    @in_own_precision
    def score(self, embeddings: Tensor, pairs: Tensor) -> Tensor:
        """Score node pairs at link level; the order within a pair does not matter.

        Args:
            embeddings: What :meth:`forward` returned, ``[num_nodes, dim]``.
            pairs: Node indices, ``[2, num_pairs]``.

        Returns:
            One logit per pair, ``[num_pairs]``.
        """
        if self.level != "link":
            raise ConfigError(f"score: found a head for level {self.level!r}, expected 'link'")
        embeddings = embeddings.to(self.output.weight.dtype)
        source, target = embeddings.index_select(0, pairs[0]), embeddings.index_select(0, pairs[1])
        scores: Tensor = self.output(self.mlp(source * target))  # [num_pairs, 1]
        return scores.squeeze(-1)

    @torch.no_grad()
    @in_own_precision
    def explain(
        self,
        history: History | TableRows,
        batch: Tensor | None = None,
        *,
        num_graphs: int | None = None,
        standardized: bool = False,
    ) -> Explanation:
        """Return the layer weights and the node attention behind a prediction, without dropout."""
        was_training = self.training
        self.eval()
        try:
            inputs = self._read(history, batch, num_graphs, standardized)
            nodes, weights = self.layer_weights(inputs.stacks, inputs.last, inputs.graphs)
            if self.node_attention is None:
                attention = inputs.graphs.spread(inputs.graphs.divisor.to(nodes.dtype).reciprocal())
            else:
                attention = self.node_attention.received(nodes, inputs.graphs)
        finally:
            self.train(was_training)
        return Explanation(weights.squeeze(1), attention)

    @torch.no_grad()
    def warm_start(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Start where a mean-pool network stands: predict ``weight @ mean(last layer) + bias``.

        The classifier becomes a linear shortcut from the last layer (as captured, before any
        standardisation) to the outputs, and the head's own output map starts at zero: exact for
        every option, and everything keeps learning. At node level there is no mean. This adds
        parameters: call it before making an optimizer.

        Args:
            weight: Of the network's own classifier, ``[out_dim, D_last]``.
            bias: Of the same, ``[out_dim]``; zero if it has none.
        """
        expected = [self.options.out_dim, self.options.in_dims[-1]]
        if list(weight.shape) != expected:
            raise DataError(f"warm start: found weight {list(weight.shape)}, expected {expected}")
        self.options = replace(self.options, shortcut=True)
        self.shortcut = nn.Linear(expected[1], expected[0]).to(self.output.weight)
        self.shortcut.weight.copy_(weight)
        self.shortcut.bias.zero_() if bias is None else self.shortcut.bias.copy_(bias)
        self.output.weight.zero_()
        self.output.bias.zero_()

    def _read(
        self,
        history: History | TableRows,
        batch: Tensor | None,
        num_graphs: int | None,
        standardized: bool,
    ) -> HistoryBatch:
        """Check a batch."""
        table = history.table if isinstance(history, TableRows) else history
        num_nodes, device = check_layers(table, self.options.in_dims)
        if isinstance(history, TableRows):
            num_nodes = int(history.sizes.sum())
        graphs = Graphs.from_batch(batch, num_nodes, num_graphs, device)
        if isinstance(history, TableRows) and not np.array_equal(graphs.sizes, history.sizes):
            raise DataError(
                f"batch: found graphs of {graphs.sizes.tolist()} nodes, "
                f"expected those of the rows, {history.sizes.tolist()}"
            )
        return HistoryBatch(
            history,
            graphs,
            groups=self.layer_weights.groups,
            statistics=None if standardized else self._statistics(),
            dtype=self.output.weight.dtype,
        )

    def _statistics(self) -> list[tuple[Tensor, Tensor]] | None:
        """Mean and scale of every layer, or ``None`` if there is nothing to apply."""
        if self.standardizer is None or not self.standardizer.is_fitted:
            return None
        return [self.standardizer.statistics(layer) for layer in range(len(self.options.in_dims))]

    def _attend_nodes(self, nodes: Tensor, graphs: Graphs) -> Tensor:
        """Node attention with residual and LayerNorm: ``[num_nodes, dim]``."""
        attended = nodes
        if self.node_attention is not None:
            attended = self.node_attention(nodes, graphs)
            if self.options.residual:
                attended = attended + nodes
        return attended if self.norm is None else self.norm(attended)

    def _read_graphs(self, inputs: HistoryBatch) -> tuple[Tensor, Tensor]:
        """Return the readout of each graph and what it is mixed with: ``[num_graphs, dim]``."""
        rows = inputs.rows() if self.trains_in_loops else None
        if rows is not None and can_read(rows):
            return self._read_graphs_compiled(inputs, rows)
        nodes, _ = self.layer_weights(inputs.stacks, inputs.last, inputs.graphs)
        return self._attend_graphs(nodes, inputs.graphs), self._graph_base(inputs)

    def _read_graphs_compiled(self, inputs: HistoryBatch, rows: TableRows) -> tuple[Tensor, Tensor]:
        """Do what :meth:`_read_graphs` does in one reading of the history."""
        layers, attention, graphs = self.layer_weights, self.node_attention, inputs.graphs
        assert attention is not None  # it compiles
        stage = read_graphs(
            rows,
            Maps(layers.folded(), attention.in_projection.weight, attention.in_projection.bias),
            StageOptions(
                layers.normalization,
                bound=layers.bound,
                node_heads=attention.heads,
                with_means=self.all_layers is not None,
            ),
        )
        attended = attention.out_projection(stage.contexts)  # [num_graphs, dim]
        if self.options.residual:
            attended = attended + stage.means
        if not graphs.all_present:
            attended = attended * graphs.nonempty(attended.dtype)
        return attended, self._graph_base(inputs, stage.layer_means)

    def _attend_graphs(self, nodes: Tensor, graphs: Graphs) -> Tensor:
        """The mean of :meth:`_attend_nodes` over each graph, the short way where there is one."""
        if self.norm is not None or self.node_attention is None:
            return graphs.mean(self._attend_nodes(nodes, graphs))
        pooled = self.node_attention.pool(nodes, graphs)  # [num_graphs, dim]
        return pooled + graphs.mean(nodes) if self.options.residual else pooled

    def _graph_base(self, inputs: HistoryBatch, known_means: Tensor | None = None) -> Tensor:
        """What a graph's readout is mixed with: ``[num_graphs, dim]``.

        Args:
            inputs: The batch.
            known_means: Of the nodes of every layer, ``[num_graphs, L * D]``.
        """
        graphs = inputs.graphs
        if self.all_layers is None:
            linear, rows = self.layer_weights.last_embedding, graphs.mean(inputs.last)
        elif known_means is not None:
            linear, rows = self.all_layers, known_means
        else:
            means = [layer_means(stack, graphs).flatten(1) for stack in inputs.stacks]
            linear, rows = self.all_layers, torch.cat(means, dim=1)
        base: Tensor = linear(rows)
        return base if graphs.all_present else base * graphs.nonempty(rows.dtype)

    def _node_base(self, inputs: HistoryBatch) -> Tensor:
        """What a node's embedding is mixed with: ``[num_nodes, dim]``."""
        if self.all_layers is None:
            return self.layer_weights.last_embedding(inputs.last)
        base: Tensor = self.all_layers.bias
        sizes = [stack.num_layers * stack.width for stack in inputs.stacks]
        maps = self.all_layers.weight.split(sizes, dim=1)
        for stack, weight in zip(inputs.stacks, maps, strict=True):
            base = base + layer_project(stack, weight)  # [num_nodes, dim]
        return base

    def _unstandardized_last(self, inputs: HistoryBatch) -> Tensor:
        """The last layer as it was captured, averaged per graph at graph level."""
        graphs, last = inputs.graphs, inputs.last
        statistics = self._statistics()
        if statistics is not None:
            last = last * statistics[-1][1] + statistics[-1][0]  # [num_nodes, D_last]
        return graphs.mean(last) if self.level == "graph" else last

    def __repr__(self) -> str:
        counts = Counter(self.options.in_dims)
        layers = " + ".join(f"{count} x {width}" for width, count in counts.items())
        options = "".join(f", {name}={value!r}" for name, value in self.options.changed().items())
        return f"{type(self).__name__}({layers} -> {self.options.out_dim}{options})"


# Tools and help texts see every option by name, from the one place that defines them.
_signature = inspect.signature(HistoGraphConfig.__init__)
HistoGraphHead.__init__.__signature__ = _signature  # type: ignore[attr-defined]
