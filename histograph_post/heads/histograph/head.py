"""HistoGraph: a readout that attends to the history of every node, then to the nodes of the graph.

After "Learning from Historical Activations in Graph Neural Networks". For one graph with the
activations ``X [N, L, D_in]`` of N nodes after L layers:

1. ``X' = X E + b``: one embedding for all layers of the same width.
2. ``X~ = X' + P``: a fixed encoding of the layer's position is added.
3. ``Q = X~_last Wq``, ``K = X~ Wk``, ``V = X~``.
4. ``c = mean over nodes of (Q K^T / sqrt(D))``: a score per layer.
5. ``alpha = normalize(c)``, ``H = sum_l alpha_l X~_l``: the layers of every node are summed.
6. ``Z = MultiHeadSelfAttention(H)`` over the nodes of the graph, or of a large one over groups.
7. ``G = mean over nodes of Z``; node and link tasks keep ``Z``.
8. ``Y = a G + (1 - a) base``, where ``base`` is what statistics of all layers over the nodes (or
   the mean of the last layer) are projected to; an MLP turns ``Y`` into outputs.
9. A head that is trained on a cache predicts the mean of these outputs and those of a linear probe
   of the same statistics, solved beforehand.

Steps 1 to 5 are in :mod:`.layer_attention`, step 6 in :mod:`.node_attention`, where a ``Reach`` is
what a node may attend to instead of all nodes. A graph never sees its batch-mates: all means and
all attention are taken inside each graph, so a graph has one output, whatever it is batched with.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import DataError
from ...utils import LEVELS
from ..base import Explanation, Readout, in_own_precision
from ..history import History, TableRows, last_layer
from ..ragged import Graphs
from ..statistics import GraphStatistics, WideDropout, layer_statistics
from .config import HistoGraphConfig
from .landmarks import LandmarkGroups, Landmarks, WholeGraph
from .layer_attention import LayerAttention
from .node_attention import NodeAttention, Reach


def map_parts(linear: nn.Linear, parts: Sequence[Tensor]) -> Tensor:
    """Apply a linear map to rows that come in parts, without joining them: ``[rows, out]``."""
    widths = [part.size(1) for part in parts]
    mapped: Tensor = linear.bias  # [out]
    for part, weight in zip(parts, linear.weight.split(widths, dim=1), strict=True):
        mapped = torch.addmm(mapped, part, weight.t())  # [rows, out]
    return mapped


class HistoGraphHead(Readout):
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

    In single precision, outputs and gradients are finite for activations of magnitude up to 1e11
    (without a normalisation of the layer weights, up to 1e6); beyond, gradients overflow.
    """

    levels = LEVELS
    probe_share: Tensor

    def __init__(self, in_dims: Sequence[int], out_dim: int, **options: Any) -> None:
        self.options = config = HistoGraphConfig(tuple(in_dims), out_dim, **options)
        super().__init__(
            config.in_dims, out_dim, dim=config.dim, level=config.level, dropout=config.dropout
        )

    def build(self) -> None:
        """Make the modules."""
        config, dim = self.options, self.dim
        self.keep_layers(config.history_layers)
        self.layer_weights = LayerAttention(config)
        self.node_attention = (
            NodeAttention(
                dim,
                config.heads,
                kind=config.node_attention,
                zero_token=config.zero_token,
                dropout=config.attention_dropout,
                key_dropout=config.key_dropout,
            )
            if config.node_attention != "none"
            else None
        )
        self.needs_edge_index = config.node_attention == "neighbors"
        by_landmarks = config.node_attention in ("landmark", "auto")
        self.landmarks = (
            LandmarkGroups(config.kept_dims, config.landmarks) if by_landmarks else None
        )
        self.norm = nn.LayerNorm(dim) if config.layer_norm else None
        names, kept = config.statistics_names, config.kept_dims
        self.statistics = (
            GraphStatistics(kept, names)
            if config.mix == "statistics" and self.level == "graph"
            else None
        )
        self.described_dim = kept[-1] if config.mix == "last" else sum(kept)
        if self.statistics is not None:
            self.described_dim = self.statistics.width
        dropped = 0.0 if self.statistics is None else config.statistics_dropout
        self.statistics_dropout = WideDropout(dropped)
        self.all_layers = None if config.mix == "last" else nn.Linear(self.described_dim, dim)
        self.mixing = Mixing(config.mixing, config.mixing_init, config.mixing_delay)
        self.output_norm = nn.LayerNorm(dim) if config.output_norm else None
        hidden: list[nn.Module] = []
        for _ in range(config.mlp_layers):
            hidden += [nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(config.dropout)]
        self.mlp = nn.Sequential(*hidden)
        self.output = nn.Linear(dim, config.out_dim)
        self.shortcut = nn.Linear(config.in_dims[-1], config.out_dim) if config.shortcut else None
        self.probe: nn.Linear | None = None
        if config.solved:
            self._add_probe()

    @classmethod
    def from_config(cls, config: HistoGraphConfig) -> HistoGraphHead:
        """Build the head a configuration describes."""
        return cls(**config.to_json())

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as plain values, to build this head again."""
        return self.options.to_json()

    @in_own_precision
    def forward(
        self,
        history: History | TableRows,
        batch: Tensor | Graphs | None = None,
        *,
        num_graphs: int | None = None,
        edge_index: Tensor | None = None,
        statistics: Tensor | None = None,
        whole: WholeGraph | None = None,
    ) -> Tensor:
        """Read the history out.

        Args:
            history: ``[num_nodes, L, D]`` or one ``[num_nodes, D_l]`` per layer, any float type;
                or where rows of it lie in a table.
            batch: Graph of each node, sorted, ``[num_nodes]``; ``None`` for a single graph; or the
                graphs themselves, where the host knows their sizes.
            num_graphs: Graphs in the batch, if the last ones may be empty.
            edge_index: Edges of the batch ``[2, num_edges]``, for attention along them.
            statistics: Of all layers of these graphs, as
                :func:`~histograph_post.heads.statistics.layer_statistics` gives them, if they are
                known already: ``[num_graphs, 3, sum(D_l)]``.
            whole: What there is to know of the one graph of which only some nodes are given, at
                node level; see :meth:`whole_graph`.

        Returns:
            ``[num_graphs, out_dim]``, ``[num_nodes, out_dim]`` or ``[num_nodes, dim]``, by level.
        """
        layers, graphs = self.read(history, batch, num_graphs)
        attended = self._attended(layers, graphs, edge_index, whole)  # [rows, dim]
        described = self.describe(layers, graphs, statistics)  # [rows, described_dim]
        last = None if self.shortcut is None else self._last_rows(layers, graphs)
        return self.predict(attended, described, graphs, last)

    @in_own_precision
    def classifier_inputs(
        self,
        history: History | TableRows,
        batch: Tensor | Graphs | None = None,
        *,
        num_graphs: int | None = None,
        edge_index: Tensor | None = None,
    ) -> Tensor:
        """Return what the classifier reads, steps 1 to 8; a probe beside it reads statistics.

        Returns:
            ``[num_graphs, dim]`` at level ``graph``, else ``[num_nodes, dim]``.
        """
        layers, graphs = self.read(history, batch, num_graphs)
        attended = self._attended(layers, graphs, edge_index)  # [rows, dim]
        return self.mix(attended, self.describe(layers, graphs), graphs)

    def _attended(
        self,
        history: History,
        graphs: Graphs,
        edge_index: Tensor | None,
        whole: WholeGraph | None = None,
    ) -> Tensor:
        """Return what attention makes of each graph or node: ``[rows, dim]``."""
        if self.level == "graph":
            return self.read_graphs(history, graphs, edge_index)
        return self.read_nodes(history, graphs, edge_index, whole)

    def read_graphs(
        self, history: History, graphs: Graphs, edge_index: Tensor | None = None
    ) -> Tensor:
        """Return what attention makes of each graph, steps 1 to 7: ``[num_graphs, dim]``.

        Args:
            history: The layers that are kept, as :meth:`read` returns them.
            graphs: Which graph each node belongs to.
            edge_index: Edges of the batch, for attention along them.
        """
        nodes, _ = self.layer_weights(history, graphs)  # steps 1 to 5: [num_nodes, dim]
        reach = self._reach(nodes, history, graphs, edge_index)
        if self.node_attention is None or self.norm is not None:
            return graphs.mean(self._attend_nodes(nodes, graphs, reach))  # [num_graphs, dim]
        attended = self.node_attention.pool(nodes, graphs, reach)  # steps 6 and 7
        return attended + graphs.mean(nodes) if self.options.residual else attended

    def read_nodes(
        self,
        history: History,
        graphs: Graphs,
        edge_index: Tensor | None = None,
        whole: WholeGraph | None = None,
    ) -> Tensor:
        """Return what attention makes of each node, steps 1 to 6: ``[num_nodes, dim]``."""
        nodes, weights = self.layer_weights(history, graphs, whole)  # steps 1 to 5
        if whole is None:
            reach = self._reach(nodes, history, graphs, edge_index)
        else:
            reach = Reach(self._landmarks_of(whole, weights), edge_index)
        return self._attend_nodes(nodes, graphs, reach)

    def _reach(
        self, nodes: Tensor, history: History, graphs: Graphs, edge_index: Tensor | None
    ) -> Reach:
        """Return what the nodes of whole graphs may attend to, besides each other."""
        if self.node_attention is None or self.landmarks is None:
            return Reach(edge_index=edge_index)
        larger_than = self.node_attention.exact_nodes
        return Reach(self.landmarks.of_large(nodes, history, graphs, larger_than))

    def _landmarks_of(self, whole: WholeGraph, weights: Tensor) -> Landmarks | None:
        """Sum the layers of the landmarks of one graph, as those of its nodes are summed."""
        if whole.counts is None:
            return None
        count = len(whole.counts)
        one = Graphs.from_batch(None, count, 1, weights.device)
        rows = self.layer_weights.combine(whole.landmarks, weights, one)  # [k, dim]
        counts = whole.counts.to(rows.dtype).unsqueeze(0)  # [1, k]
        return Landmarks(rows.unsqueeze(0), counts, np.ones(1, dtype=np.bool_))

    def settle(self, smallest: int) -> None:
        """Settle what ``auto`` stands for where all graphs are large: the head is saved as it is.

        Args:
            smallest: Nodes of the smallest graph that it is trained on.
        """
        attention = self.node_attention
        if attention is not None and attention.kind == "auto" and smallest > attention.exact_nodes:
            self.options = replace(self.options, node_attention="landmark")
            attention.attend_to("landmark")

    def whole_graph(self, pieces: Iterable[History]) -> WholeGraph | None:
        """Return what makes :meth:`forward` exact on some nodes of a graph; None if nothing does.

        Exact attention needs all nodes. Along edges, the nodes that are asked for come with those
        that have an edge to them.

        Args:
            pieces: All nodes of the graph, in pieces as :meth:`forward` takes them; it is gone
                through twice.
        """
        if self.level != "node" or self.options.node_attention == "exact":
            return None
        return WholeGraph.of(pieces, self.kept_dims, self.landmarks)

    def describe(
        self, history: History, graphs: Graphs, statistics: Tensor | None = None
    ) -> list[Tensor]:
        """Return what is known of a graph or node without attention: ``[rows, described_dim]``.

        It comes in parts, side by side: layers in half precision are converted one by one.

        Args:
            history: The layers that are kept, as :meth:`read` returns them.
            graphs: Which graph each node belongs to.
            statistics: Of all layers, if they are known already: ``[num_graphs, 3, sum(D_l)]``.
        """
        if self.options.mix == "last":
            return [self._last_rows(history, graphs)]  # [rows, D_last]
        if self.statistics is not None:
            if statistics is None:
                statistics = layer_statistics(self.in_own_type(history), graphs)
            return self.summarize(statistics, graphs)[0]
        layers = (block.rows.flatten(1) for block in self.layer_weights.blocks(history))
        return [graphs.mean(layer) if self.level == "graph" else layer for layer in layers]

    def summarize(self, statistics: Tensor, graphs: Graphs) -> tuple[list[Tensor], Tensor]:
        """Return what :meth:`describe` does, from statistics alone, and the mean last layer.

        Args:
            statistics: Of all layers, or of those that are kept: ``[num_graphs, 3, sum(D_l)]``.
            graphs: Which graph each node belongs to.

        Returns:
            A list of one tensor, ``[num_graphs, described_dim]``, and ``[num_graphs, D_last]``.
        """
        kept = statistics[:, :, -sum(self.kept_dims) :]  # [num_graphs, 3, sum(kept_dims)]
        last = kept[:, 0, -self.kept_dims[-1] :]  # [num_graphs, D_last]
        if self.statistics is not None:
            return [self.statistics(kept, graphs.counts)], last
        return [last if self.options.mix == "last" else kept[:, 0]], last

    def predict(
        self,
        attended: Tensor,
        described: Sequence[Tensor],
        graphs: Graphs,
        last: Tensor | None = None,
        map_parts: Callable[[nn.Linear, Sequence[Tensor]], Tensor] = map_parts,
    ) -> Tensor:
        """Mix, normalise and classify: steps 8 and 9, for graphs or nodes alike.

        Args:
            attended: What attention has made of every row, ``[rows, dim]``.
            described: What is known without it, ``[rows, described_dim]`` in parts.
            graphs: Which graph each node belongs to.
            last: The (mean) last layer for the shortcut, ``[rows, D_last]``; None without one.
            map_parts: Maps what is described.
        """
        mixed = self.mix(attended, described, graphs, map_parts)  # [rows, dim]
        if self.level == "link":
            return mixed  # [num_nodes, dim], for pairs of them to be scored
        outputs = self.classify(mixed)  # [rows, out_dim]
        if self.shortcut is not None:
            outputs = outputs + self.shortcut(last)
        if self.probe is None:
            return outputs
        if self.training:
            # The probe has little left to learn of the rows it was solved on. Beside it the head
            # would learn that rest; without it, it learns a second opinion.
            self.probe_share.fill_(self.options.probe)
            return outputs
        return torch.lerp(outputs, map_parts(self.probe, described), self.probe_share)

    def mix(
        self,
        attended: Tensor,
        described: Sequence[Tensor],
        graphs: Graphs,
        map_parts: Callable[[nn.Linear, Sequence[Tensor]], Tensor] = map_parts,
    ) -> Tensor:
        """Mix what attention made with what is known without it, step 8: ``[rows, dim]``."""
        project = self.layer_weights.last_embedding if self.all_layers is None else self.all_layers
        base = map_parts(project, [self.statistics_dropout(part) for part in described])
        if self.level == "graph":
            base = graphs.empty_to_zero(base)  # an empty graph has no bias either
        mixed: Tensor = self.mixing(attended, base)  # [rows, dim]
        return mixed if self.output_norm is None else self.output_norm(mixed)

    def classify(self, rows: Tensor) -> Tensor:
        """Return the outputs of rows ``[rows, dim]``: ``[rows, out_dim]``."""
        outputs: Tensor = self.output(self.mlp(rows))
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
        return super().score(embeddings, pairs)

    @torch.no_grad()
    @in_own_precision
    def explain(
        self,
        history: History | TableRows,
        batch: Tensor | Graphs | None = None,
        *,
        num_graphs: int | None = None,
        edge_index: Tensor | None = None,
    ) -> Explanation:
        """Return the layer weights and the node attention behind a prediction, without dropout.

        Without ``edge_index`` there is no attention along edges to be told: all nodes count alike.
        """
        layers, graphs = self.read(history, batch, num_graphs)
        nodes, weights = self.layer_weights(layers, graphs)
        attention = graphs.spread(graphs.divisor_as(nodes.dtype).reciprocal())  # [num_nodes]
        if self.node_attention is not None and (
            edge_index is not None or not self.needs_edge_index
        ):
            reach = self._reach(nodes, layers, graphs, edge_index)
            attention = self.node_attention.received(nodes, graphs, reach)  # [num_nodes]
        return Explanation(weights.squeeze(1), attention)

    def node_stages(self, history: History, graphs: Graphs) -> dict[str, Tensor]:
        """Return every node with its layers summed, then attended to: ``[num_nodes, dim]`` each."""
        nodes, _ = self.layer_weights(history, graphs)
        stages: dict[str, Tensor] = {"after layer attention": nodes}
        if self.node_attention is not None and not self.needs_edge_index:
            reach = self._reach(nodes, history, graphs, None)
            stages["after node attention"] = self._attend_nodes(nodes, graphs, reach)
        return stages

    @torch.no_grad()
    def warm_start(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Start where a mean-pool network stands: predict ``weight @ mean(last layer) + bias``.

        The classifier becomes a linear shortcut from the last layer, as the head is given it, to
        the outputs, and the head's own output map starts at zero: exact for every option, and
        everything keeps learning. At node level there is no mean. This adds parameters: call it
        before making an optimizer. For rows that are standardised before they get here, see
        :meth:`~histograph_post.heads.standardize.Standardizer.fold_into`.

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

    @torch.no_grad()
    def start_at(self, weight: Tensor, bias: Tensor) -> None:
        """Start where a solved linear probe stands: predict what it predicts.

        Once training has begun, its share is that of the options: the head learns by itself, and
        predicts the mean of both. This adds parameters, which are not trained.

        Args:
            weight: Of the probe of what :meth:`describe` returns, ``[out_dim, described_dim]``.
            bias: Of the same, ``[out_dim]``.
        """
        expected = [self.options.out_dim, self.described_dim]
        if list(weight.shape) != expected:
            raise DataError(f"probe: found weight {list(weight.shape)}, expected {expected}")
        self.options = replace(self.options, solved=True)
        self._add_probe()
        assert self.probe is not None
        self.probe.weight.copy_(weight)
        self.probe.bias.copy_(bias)

    def _add_probe(self) -> None:
        self.probe = nn.Linear(self.described_dim, self.options.out_dim).to(self.output.weight)
        self.probe.requires_grad_(False)
        #: Of the probe in the predictions: all of it until training begins.
        self.register_buffer("probe_share", torch.ones(()).to(self.output.weight))

    def _attend_nodes(self, nodes: Tensor, graphs: Graphs, reach: Reach) -> Tensor:
        """Node attention with residual and LayerNorm: ``[num_nodes, dim]``."""
        attended = nodes
        if self.node_attention is not None:
            attended = self.node_attention(nodes, graphs, reach)
            if self.options.residual:
                attended = attended + nodes
        return attended if self.norm is None else self.norm(attended)

    def _last_rows(self, history: History, graphs: Graphs) -> Tensor:
        """The last layer, averaged per graph at graph level: ``[rows, D_last]``."""
        last = last_layer(history).to(self.output.weight.dtype)  # [num_nodes, D_last]
        return graphs.mean(last) if self.level == "graph" else last

    def __repr__(self) -> str:
        counts = Counter(self.options.in_dims)
        layers = " + ".join(f"{count} x {width}" for width, count in counts.items())
        options = "".join(f", {name}={value!r}" for name, value in self.options.changed().items())
        return f"{type(self).__name__}({layers} -> {self.options.out_dim}{options})"


# Tools and help texts see every option by name, from the one place that defines them.
HistoGraphHead.__signature__ = inspect.signature(HistoGraphConfig)


class Mixing(nn.Module):
    """The stabiliser of step 8: ``a * readout + (1 - a) * base`` with ``a`` in [0, 1].

    Args:
        kind: ``fixed``; ``learned``; or ``delayed``: learned, but not before ``delay`` training
            steps have passed.
        initial: The coefficient to start from.
        delay: Training steps a ``delayed`` coefficient waits.
    """

    steps: Tensor

    def __init__(self, kind: str, initial: float, delay: int) -> None:
        super().__init__()
        self.kind, self.initial, self.delay = kind, initial, delay
        if kind != "fixed":
            self.logit = nn.Parameter(torch.tensor(math.log(initial / (1 - initial))))
        if kind == "delayed":
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @property
    def coefficient(self) -> Tensor | float:
        """The share ``a`` of the readout."""
        return self.initial if self.kind == "fixed" else self.logit.sigmoid()

    def forward(self, readout: Tensor, base: Tensor) -> Tensor:
        """Mix two tensors of the same shape."""
        coefficient = self.coefficient
        if self.kind == "delayed" and self.training and isinstance(coefficient, Tensor):
            if bool(self.steps < self.delay):
                coefficient = coefficient.detach()
            self.steps += 1
        return coefficient * readout + (1 - coefficient) * base

    def extra_repr(self) -> str:
        """Describe the coefficient in one line."""
        return f"kind={self.kind!r}, coefficient={float(self.coefficient):.3f}"
