"""HistoGraph: a readout that attends to the history of every node, then to the nodes of the graph.

After "Learning from Historical Activations in Graph Neural Networks". For one graph with the
activations ``X [N, L, D_in]`` of N nodes after L layers:

1. ``X' = X E + b``: one embedding for all layers of the same width.
2. ``X~ = X' + P``: a fixed encoding of the layer's position is added.
3. ``Q = X~_last Wq``, ``K = X~ Wk``, ``V = X~``.
4. ``c = mean over nodes of (Q K^T / sqrt(D))``: a score per layer.
5. ``alpha = normalize(c)``, ``H = sum_l alpha_l X~_l``: the layers of every node are summed.
6. ``Z = MultiHeadSelfAttention(H) + H`` over the nodes of the graph; in a large one, over groups.
7. ``G = mean over nodes of Z``; node and link tasks keep ``Z``.
8. ``Y = LayerNorm(a G + (1 - a) base)``, where ``base`` is a projection of statistics of all layers
   over the nodes, some of which are dropped in training.
9. An MLP turns ``Y`` into outputs. A head that is trained on a cache predicts a weighted mean of
   these and of the outputs of a linear probe of the same statistics, solved beforehand.

In the paper's form (``PAPER_FORM``), step 5 divides the scores by their sum, step 6 adds no ``H``,
step 8 has no LayerNorm, ``base`` is the mean of the last layer, embedded as in step 1, and there is
no probe. By default ``normalize`` gives signed weights that sum to one, too, but bounded ones,
whatever the sum of the scores.

:meth:`HistoGraphHead.forward` takes these steps in order, steps 1 to 7 in :meth:`~.attend`. Steps 1
to 5 are in :mod:`.layer_attention`, step 6 in :mod:`.node_attention`, what is mixed in steps 8 and
9 in :mod:`.mixing`. A graph never sees its batch-mates: all means and all attention are taken
inside each graph, so a graph has one output, whatever it is batched with.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import DataError
from ...utils import LEVELS
from ..base import Explanation, in_own_precision
from ..history import History, TableRows, last_layer, layer_statistics
from ..ragged import Graphs
from .config import HistoGraphConfig
from .large_graphs import LandmarkGroups, WholeGraph
from .layer_attention import LayerAttention
from .mixing import (
    ApplyParts,
    GraphStatistics,
    LinearStarts,
    Mixing,
    Parts,
    WideDropout,
    map_parts,
)
from .node_attention import EXACT_NODES, NodeAttention, Reach


class HistoGraphHead(LinearStarts):
    """A readout over the history of a graph neural network.

    Args:
        in_dims: Width of each layer of the history, input embedding first.
        out_dim: Outputs per graph or node; 1 at link level.
        options: Any other field of :class:`HistoGraphConfig`: ``dim``, ``heads``, ``level``...

    Shapes:
        - **history:** ``[num_nodes, L, D]``, or one ``[num_nodes, D_l]`` per layer, any float type
        - **batch:** graph of each node, sorted, ``[num_nodes]``
        - **output:** ``[num_graphs, out_dim]``; ``[num_nodes, out_dim]`` at node level; node
          embeddings ``[num_nodes, dim]`` for :meth:`score` at link level

    In single precision, outputs and gradients are finite for activations of magnitude up to 1e11
    (without a normalisation of the layer weights, up to 1e6); beyond, gradients overflow.
    """

    levels = LEVELS

    def __init__(self, in_dims: Sequence[int], out_dim: int, **options: Any) -> None:
        self.options = config = HistoGraphConfig(tuple(in_dims), out_dim, **options)
        super().__init__(
            config.in_dims, out_dim, dim=config.dim, level=config.level, dropout=config.dropout
        )

    def build(self) -> None:
        """Make the modules."""
        config, dim = self.options, self.dim
        kind, kept = config.node_attention, config.kept_dims
        self.keep_layers(config.history_layers)
        # Steps 1 to 5
        self.layer_weights = LayerAttention(config)
        # Step 6
        self.node_attention: NodeAttention | None = None
        if kind != "none":
            self.node_attention = NodeAttention(
                dim,
                config.heads,
                zero_token=config.zero_token,
                dropout=config.attention_dropout,
                key_dropout=config.key_dropout,
            )
        self.needs_edge_index = kind == "neighbors"
        self.landmarks: LandmarkGroups | None = None
        if kind in ("landmark", "auto"):
            larger_than = EXACT_NODES if kind == "auto" else -1
            self.landmarks = LandmarkGroups(kept, config.landmarks, larger_than)
        self.norm = nn.LayerNorm(dim) if config.layer_norm else None
        # Step 8
        self.described_dim = kept[-1] if config.mix == "last" else sum(kept)
        self.statistics: GraphStatistics | None = None
        if config.mix == "statistics" and self.level == "graph":
            self.statistics = GraphStatistics(kept, config.statistics_names)
            self.described_dim = self.statistics.width
        self.statistics_dropout = WideDropout(config.statistics_dropout if self.statistics else 0.0)
        self.all_layers = None if config.mix == "last" else nn.Linear(self.described_dim, dim)
        self.mixing = Mixing(config.mixing, config.mixing_init, config.mixing_delay)
        self.output_norm = nn.LayerNorm(dim) if config.output_norm else None
        # Step 9
        hidden: list[nn.Module] = []
        for _ in range(config.mlp_layers):
            hidden += [nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(config.dropout)]
        self.mlp = nn.Sequential(*hidden)
        self.output = nn.Linear(dim, config.out_dim)
        self.shortcut = nn.Linear(config.in_dims[-1], config.out_dim) if config.shortcut else None
        self.probe = None
        if config.solved:
            self._add_probe()

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
        """Read out a batch of graphs, as :meth:`.Readout.forward` does.

        Args:
            statistics: What :func:`~histograph_post.heads.history.layer_statistics` returns for all
                layers of these graphs, if it is known already: ``[num_graphs, 3, sum(D_l)]``.
            whole: Summary of the one graph of which only some nodes are given, at node level.
        """
        layers, graphs = self.read(history, batch, num_graphs)
        # 1 to 7. Every node attends to its layers, then to the other nodes of its graph.
        attended = self.attend(layers, graphs, edge_index, whole)  # [rows, dim]
        # 8. What is known without attention is mixed in.
        described = self.describe(layers, graphs, statistics)  # parts of [rows, described_dim]
        mixed = self.mix(attended, described, graphs)  # [rows, dim]
        if self.level == "link":
            return mixed  # for pairs of nodes to be scored
        # 9. An MLP turns the mixture into outputs; a shortcut and a probe may add theirs.
        last = None if self.shortcut is None else self.last_rows(layers, graphs)
        return self.predict(mixed, described, last)  # [rows, out_dim]

    def attend(
        self,
        layers: History,
        graphs: Graphs,
        edge_index: Tensor | None = None,
        whole: WholeGraph | None = None,
    ) -> Tensor:
        """Take steps 1 to 7: ``[rows, dim]``, of graphs or, at node and link level, of nodes."""
        # 1 to 5. Layers are embedded, encoded, scored by queries and keys (whose maps are folded
        # into the embedding, see LayerAttention), and summed by the weights of the graph.
        nodes, weights = self.layer_weights(layers, graphs, whole)  # [num_nodes, dim], [.., L]
        if whole is None or self.landmarks is None:
            reach = self.reach(nodes, layers, graphs, edge_index)
        else:  # these are some nodes of one large graph
            reach = whole.landmarks_by(self.layer_weights, weights)
        # 6. Nodes attend to each other; 7. at graph level they are averaged. What follows the
        # softmax is linear unless there is a LayerNorm, and is applied to the mean alone.
        if self.level == "graph" and self.node_attention is not None and self.norm is None:
            return self.node_attention.pool(nodes, graphs, reach, residual=self.options.residual)
        attended = self.attend_nodes(nodes, graphs, reach)  # [num_nodes, dim]
        return graphs.mean(attended) if self.level == "graph" else attended

    def reach(
        self, nodes: Tensor, layers: History, graphs: Graphs, edge_index: Tensor | None
    ) -> Reach:
        """Return what nodes attend to; None for all nodes of their graph."""
        if not self.needs_edge_index:
            return None if self.landmarks is None else self.landmarks(nodes, layers, graphs)
        if edge_index is None:
            raise DataError("node_attention='neighbors': found no edge_index, expected the edges")
        return edge_index

    def attend_nodes(self, nodes: Tensor, graphs: Graphs, reach: Reach) -> Tensor:
        """Node attention with residual and LayerNorm, step 6: ``[num_nodes, dim]``."""
        attended = nodes
        if self.node_attention is not None:
            attended = self.node_attention(nodes, graphs, reach)
            if self.options.residual:
                attended = attended + nodes
        return attended if self.norm is None else self.norm(attended)

    def describe(self, layers: History, graphs: Graphs, statistics: Tensor | None = None) -> Parts:
        """Describe graphs or nodes without attention: ``[rows, described_dim]``, in parts.

        The parts stand side by side: layers in half precision are converted one by one.
        """
        if self.options.mix == "last":
            return [self.last_rows(layers, graphs)]  # [rows, D_last]
        if self.statistics is not None:
            if statistics is None:
                statistics = layer_statistics(self.in_own_type(layers), graphs)
            return self.describe_by(statistics, graphs)[0]
        parts = (block.rows.flatten(1) for block in self.layer_weights.blocks(layers))
        return [graphs.mean(part) if self.level == "graph" else part for part in parts]

    def describe_by(self, statistics: Tensor, graphs: Graphs) -> tuple[Parts, Tensor]:
        """Describe graphs by statistics of all layers alone, ``[num_graphs, 3, sum(D_l)]``.

        Returns what :meth:`describe` does, in one part, and the means of the last layer,
        ``[num_graphs, D_last]``.
        """
        kept = statistics[:, :, -sum(self.kept_dims) :]  # [num_graphs, 3, sum(kept_dims)]
        last = kept[:, 0, -self.kept_dims[-1] :]  # [num_graphs, D_last]
        if self.statistics is not None:
            return [self.statistics(kept, graphs.counts_as(kept.dtype))], last
        if self.options.mix == "last":
            return [last], last
        means = kept[:, 0].split(self.kept_dims, dim=1)  # [num_graphs, D_l] each
        return [torch.cat([means[layer] for layer in self.layer_weights.order], dim=1)], last

    @property
    def last_columns(self) -> slice:
        """Where the last layer stands in the description of a node."""
        last = len(self.kept_dims) - 1
        order = [last] if self.options.mix == "last" else self.layer_weights.order
        start = sum(self.kept_dims[layer] for layer in order[: order.index(last)])
        return slice(start, start + self.kept_dims[-1])

    def last_rows(self, layers: History, graphs: Graphs) -> Tensor:
        """Return the last layer, averaged per graph at graph level: ``[rows, D_last]``."""
        last = last_layer(layers).to(self.output.weight.dtype)  # [num_nodes, D_last]
        return graphs.mean(last) if self.level == "graph" else last

    def mix(
        self, attended: Tensor, described: Parts, graphs: Graphs, apply: ApplyParts = map_parts
    ) -> Tensor:
        """Mix attended rows with a projection of the description, step 8: ``[rows, dim]``."""
        project = self.layer_weights.last_embedding if self.all_layers is None else self.all_layers
        base = apply(project, [self.statistics_dropout(part) for part in described])  # [rows, dim]
        if self.level == "graph":
            base = graphs.empty_to_zero(base)  # an empty graph has no bias either
        mixed: Tensor = self.mixing(attended, base)  # [rows, dim]
        return mixed if self.output_norm is None else self.output_norm(mixed)

    def classify(self, rows: Tensor) -> Tensor:
        """Return the outputs of rows ``[rows, dim]``: ``[rows, out_dim]``."""
        outputs: Tensor = self.output(self.mlp(rows))
        return outputs

    def predict(
        self, mixed: Tensor, described: Parts, last: Tensor | None, apply: ApplyParts = map_parts
    ) -> Tensor:
        """Classify mixed rows, and add shortcut and probe, step 9: ``[rows, out_dim]``.

        The shortcut reads the (mean) ``last`` layer, ``[rows, D_last]``, the probe the description.
        """
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
        return torch.lerp(outputs, apply(self.probe, described), self.probe_share)

    @in_own_precision
    def classifier_inputs(
        self,
        history: History | TableRows,
        batch: Tensor | Graphs | None = None,
        *,
        num_graphs: int | None = None,
        edge_index: Tensor | None = None,
    ) -> Tensor:
        """Return what the MLP reads, steps 1 to 8: ``[rows, dim]``."""
        layers, graphs = self.read(history, batch, num_graphs)
        attended = self.attend(layers, graphs, edge_index)  # [rows, dim]
        return self.mix(attended, self.describe(layers, graphs), graphs)

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

        Where attention is along edges, but no ``edge_index`` is given, all nodes count alike.
        """
        layers, graphs = self.read(history, batch, num_graphs)
        nodes, weights = self.layer_weights(layers, graphs)
        # 1 / n for the nodes of a graph of n
        attention = graphs.spread(graphs.divisor_as(nodes.dtype).reciprocal())  # [num_nodes]
        if self.node_attention is not None and (
            edge_index is not None or not self.needs_edge_index
        ):
            reach = self.reach(nodes, layers, graphs, edge_index)
            attention = self.node_attention.received(nodes, graphs, reach)  # [num_nodes]
        return Explanation(weights.squeeze(1), attention)

    def node_embeddings(self, history: History, graphs: Graphs) -> dict[str, Tensor]:
        """Return the nodes after each kind of attention: ``[num_nodes, dim]`` each."""
        nodes, _ = self.layer_weights(history, graphs)
        found: dict[str, Tensor] = {"after layer attention": nodes}
        if self.node_attention is not None and not self.needs_edge_index:
            reach = self.reach(nodes, history, graphs, None)
            found["after node attention"] = self.attend_nodes(nodes, graphs, reach)
        return found

    def __repr__(self) -> str:
        counts = Counter(self.options.in_dims)
        layers = " + ".join(f"{count} x {width}" for width, count in counts.items())
        options = "".join(f", {name}={value!r}" for name, value in self.options.changed().items())
        return f"{type(self).__name__}({layers} -> {self.options.out_dim}{options})"


# Tools and help texts see every option by name, from the one place that defines them.
HistoGraphHead.__signature__ = inspect.signature(HistoGraphConfig)
