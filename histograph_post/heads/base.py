"""What every readout shares: its interface, its classifier and how it reads a history."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from ..errors import ConfigError, DataError
from ..utils.machine import send
from .history import History as History
from .history import TableRows, check_batch, kept_dims, layers_of, map_layers
from .history import last_layer as last_layer
from .option_checks import declared_signature, given_options, require_parts
from .ragged import Graphs
from .standardize import LimitedLinear


@dataclass(frozen=True)
class Explanation:
    """What a head paid attention to.

    Args:
        layer_weights: Weight of each layer, ``[num_graphs, L]``; ``[num_graphs, layer_heads, L]``
            if there are several sets of weights.
        node_attention: Attention each node received, averaged over the nodes of its graph and over
            heads, ``[num_nodes]``; one over the size of the graph without node attention.
    """

    layer_weights: Tensor
    node_attention: Tensor


_Method = TypeVar("_Method", bound=Callable[..., Any])


def in_own_precision(method: _Method) -> _Method:
    """Turn autocasting off while a method runs: it computes in the precision of its weights."""

    @wraps(method)
    def run(head: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        device = next(head.parameters()).device.type
        # A meta device, which computes nothing, has no autocasting to ask about.
        if device == "meta" or not torch.is_autocast_enabled(device):
            return method(head, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return method(head, *args, **kwargs)

    return cast(_Method, run)


class Readout(nn.Module):
    """A readout over the history of a graph neural network.

    A subclass computes a row per node (:meth:`node_rows`) or, for graph tasks only, a row per graph
    (:meth:`pool_graphs`), and makes its modules in :meth:`build`, whose arguments are its own
    options. This class adds the rest: at level ``graph`` one output per graph, at level ``node``
    one per node, and at level ``link`` a node embedding of width ``dim`` for :meth:`score`. A
    graph's output never depends on the other graphs of its batch.

    Args:
        in_dims: Width of each layer of the history.
        out_dim: Number of outputs per graph or node; a link has one score, so 1 at level ``link``.
        dim: Width of everything the readout learns.
        level: What is predicted: ``graph``, ``node`` or ``link``.
        dropout: Dropout inside the classifier.
        options: The readout's own, the arguments of its :meth:`build`.
    """

    #: The levels this readout makes sense on.
    levels: ClassVar[tuple[str, ...]] = ("graph",)
    #: Whether :meth:`forward` needs the edges of the graphs.
    needs_edge_index: bool = False
    #: Whether a graph has the same output if its nodes are replaced by one, their mean. A subclass
    #: that overrides :meth:`node_rows` has to set it again.
    reads_means: bool = False
    #: Whether all that is learned is one linear map, the classifier: a fit then solves it instead
    #: of training it. Links are trained, because a score is of the product of two rows.
    solved: ClassVar[bool] = False

    #: What the constructor takes, the options of :meth:`build` included.
    __signature__: ClassVar[inspect.Signature]

    #: What the last forward pass adds to the training loss, for readouts that have such a term.
    aux_loss: Tensor | None

    def __init__(
        self,
        in_dims: Sequence[int],
        out_dim: int,
        *,
        dim: int = 64,
        level: str = "graph",
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.in_dims = tuple(in_dims)
        self.out_dim = out_dim
        self.dim = dim
        self.level = level
        self.dropout = dropout
        self.aux_loss = None
        self.require("in_dims", min(self.in_dims, default=0) >= 1, "one width per layer")
        #: Widths of the layers that are used.
        self.kept_dims = kept_dims(self.in_dims, None)
        self.require("out_dim", out_dim >= 1, "at least 1")
        self.require("dim", dim >= 1, "at least 1")
        self.require("level", level in self.levels, f"one of {', '.join(self.levels)}")
        self.require("out_dim", level != "link" or out_dim == 1, "1 at link level")
        self.require("dropout", 0 <= dropout < 1, "a probability below 1")
        #: The options of :meth:`build`, to build it again.
        self._given = given_options(type(self), options)
        self.build(**options)
        for name, value in self._given.items():
            if not hasattr(self, name):  # `build` has not set it
                setattr(self, name, value)
        require_parts(self, Readout)

    def __init_subclass__(cls) -> None:
        # Tools and help texts see every option by name, from the one place that defines it.
        if "build" in vars(cls):
            cls.__signature__ = declared_signature(cls, Readout)

    def build(self) -> None:
        """Make the modules and end with :meth:`finish`.

        Its arguments are the options; those it does not set as attributes are set afterwards.
        """
        raise NotImplementedError

    def keep_layers(self, history_layers: int | None) -> None:
        """Use only the last so many layers; ``None`` uses all but a raw input.

        See :func:`~histograph_post.heads.history.kept_dims`.
        """
        self.history_layers = history_layers
        kept = history_layers is None or 1 <= history_layers <= len(self.in_dims)
        self.require("history_layers", kept, f"1 to {len(self.in_dims)}")
        self.kept_dims = kept_dims(self.in_dims, history_layers)

    def require(self, option: str, holds: bool, expected: str) -> None:
        """Refuse the value of an option unless it ``holds``."""
        if not holds:
            # Inside `build`, only what it has set itself is an attribute.
            value = getattr(self, option) if hasattr(self, option) else self._given[option]
            raise ConfigError(
                f"{type(self).__name__}: found {option}={value!r}, expected {expected}"
            )

    def finish(self, width: int, *, linear: bool = False) -> None:
        """Add the classifier, for rows of this width; ``linear`` leaves out the hidden layer.

        It is the same for all readouts, so that pooling is what is compared.
        """
        self.width = width
        if self.level == "link":
            self.embedding = nn.Linear(width, self.dim)
            width = self.dim
        if linear:
            self.classifier: nn.Module = LimitedLinear(width, self.out_dim)
            return
        first, last = LimitedLinear(width, self.dim), nn.Linear(self.dim, self.out_dim)
        self.classifier = nn.Sequential(first, nn.ReLU(), nn.Dropout(self.dropout), last)

    def forward(
        self,
        history: History | TableRows,
        batch: Tensor | Graphs | None = None,
        *,
        num_graphs: int | None = None,
        edge_index: Tensor | None = None,
    ) -> Tensor:
        """Read out a batch of graphs.

        Args:
            history: ``[num_nodes, num_layers, dim]`` or a list of ``[num_nodes, dim_l]``, in the
                precision of the weights or, as caches may have it, in half precision; or where
                its rows lie in a table.
            batch: Graph of each node, sorted, ``[num_nodes]``; absent for a single graph; or the
                graphs themselves, where the host knows their sizes.
            num_graphs: Number of graphs, where the last ones may have no nodes.
            edge_index: Edges ``[2, num_edges]`` of the batch, for readouts that need them.

        Returns:
            ``[num_graphs, out_dim]``, ``[num_nodes, out_dim]`` or, for links, ``[num_nodes, dim]``.
        """
        rows = self.classifier_inputs(history, batch, num_graphs=num_graphs, edge_index=edge_index)
        return self.embedding(rows) if self.level == "link" else self.classify(rows)

    def classifier_inputs(
        self,
        history: History | TableRows,
        batch: Tensor | Graphs | None = None,
        *,
        num_graphs: int | None = None,
        edge_index: Tensor | None = None,
    ) -> Tensor:
        """Return what the classifier reads, of a batch as :meth:`forward` takes it.

        Returns:
            ``[num_graphs, width]`` at level ``graph``, else ``[num_nodes, width]``.
        """
        self.aux_loss = None
        history, graphs = self.read(history, batch, num_graphs)
        history = self.in_own_type(history)
        if self.level != "graph":
            rows = self.node_rows(history)  # [num_nodes, width]
            return self._checked_rows(rows, len(graphs.index), "node_rows")
        if self.needs_edge_index and edge_index is None:
            raise DataError(
                f"{type(self).__name__}: found no edge_index, expected the edges of the graphs"
            )
        return self._pool_present(history, graphs, edge_index)  # [num_graphs, width]

    @property
    def is_solved(self) -> bool:
        """Whether a fit of this readout, at its level, is solved."""
        return self.solved and self.level != "link"

    @property
    def is_fixed(self) -> bool:
        """Whether all weights are those of the classifier: the rows it reads are known before."""
        return {name.partition(".")[0] for name, _ in self.named_parameters()} == {"classifier"}

    @property
    def feature_widths(self) -> tuple[int, ...]:
        """Widths of the groups of features, such as layers, in order.

        Where the classifier is solved, the features of a group have a common smallest scale.
        """
        return (self.width,)

    def node_rows(self, history: History) -> Tensor:
        """Return one row per node: ``[num_nodes, width]``."""
        raise NotImplementedError

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        """Return one row per graph, each of which has nodes: ``[num_graphs, width]``."""
        return graphs.mean(self.node_rows(history))

    @staticmethod
    def layers(history: History) -> tuple[Tensor, ...]:
        """Return the layers of a history one by one, each ``[num_nodes, D_l]``."""
        return layers_of(history)

    @in_own_precision
    def score(self, embeddings: Tensor, pairs: Tensor) -> Tensor:
        """Score pairs of nodes ``[2, num_pairs]`` by their embeddings: ``[num_pairs]``.

        The classifier sees the product of the two embeddings, so (u, v) scores as (v, u).
        """
        if self.level != "link":
            raise ConfigError(f"score: found a head for level {self.level!r}, expected 'link'")
        embeddings = embeddings.to(next(self.parameters()).dtype)  # [num_nodes, dim]
        source, target = embeddings.index_select(0, pairs[0]), embeddings.index_select(0, pairs[1])
        return self.classify(source * target).squeeze(-1)  # [num_pairs]

    def classify(self, rows: Tensor) -> Tensor:
        """Return the outputs of pooled rows, node rows or products: ``[rows, out_dim]``."""
        outputs: Tensor = self.classifier(rows)
        return outputs

    def node_embeddings(self, history: History, graphs: Graphs) -> dict[str, Tensor]:
        """Return the embeddings of nodes after each step: ``[num_nodes, width]`` each.

        A readout that turns a graph into one row at once (SOPool, say) has no such step.

        Args:
            history: As :meth:`read` returns it.
            graphs: Which graph each node belongs to.
        """
        if type(self).node_rows is Readout.node_rows:
            return {}
        return {"node embeddings": self.node_rows(self.in_own_type(history))}

    def explain(
        self,
        history: History | TableRows,
        batch: Tensor | Graphs | None = None,
        *,
        num_graphs: int | None = None,
        edge_index: Tensor | None = None,
    ) -> Explanation | None:
        """Return what is behind a prediction; None for a readout that does not weigh layers."""
        return None

    @property
    def num_parameters(self) -> int:
        """Number of trainable values."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments as plain values, to build this readout again."""
        shared = {name: getattr(self, name) for name in ("out_dim", "dim", "level", "dropout")}
        return {"in_dims": list(self.in_dims), **shared, **self._given}

    def __getstate__(self) -> dict[str, Any]:
        # The loss is part of an autograd graph, which can be neither copied nor pickled.
        return {**self.__dict__, "aux_loss": None}

    def read(
        self, history: History | TableRows, batch: Tensor | Graphs | None, num_graphs: int | None
    ) -> tuple[History, Graphs]:
        """Check a batch; return the layers that are kept and which graph each node belongs to."""
        graphs = check_batch(history, batch, num_graphs, self.in_dims)
        depth = len(self.kept_dims)
        if isinstance(history, TableRows):
            history = history.copy()  # [num_nodes, L, D]
        if isinstance(history, Tensor):
            return history[:, -depth:], graphs
        return history[-depth:], graphs

    def in_own_type(self, history: History) -> History:
        """Return a history in the precision of the weights."""
        dtype = next(self.parameters()).dtype
        return map_layers(history, lambda layer: layer.to(dtype))

    def _pool_present(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        """Pool the graphs that have nodes; the others are rows of zeros: ``[num_graphs, width]``.

        Attention over nothing is NaN, so no readout gets to see an empty graph.
        """
        if torch.compiler.is_exporting() or (graphs.sizes.size and graphs.sizes.all()):
            rows = self.pool_graphs(history, graphs, edge_index)
            return self._checked_rows(rows, graphs.num_graphs, "pool_graphs")
        pooled = last_layer(history).new_zeros(graphs.num_graphs, self.width)
        if not graphs.sizes.any():
            return pooled
        present = graphs.sizes.nonzero()[0]
        kept, _ = graphs.take(present)
        rows = self.pool_graphs(history, kept, edge_index)  # [number of present, width]
        rows = self._checked_rows(rows, kept.num_graphs, "pool_graphs")
        (places,) = send([present], rows.device)
        return pooled.index_copy(0, places, rows)  # [num_graphs, width]

    def _checked_rows(self, rows: Tensor, expected: int, method: str) -> Tensor:
        """Refuse rows of another shape than announced, which a custom readout may return."""
        if torch.compiler.is_exporting():
            return rows  # of sizes that are not known yet
        shape = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        wanted = [expected, self.width]
        if shape != wanted:
            each = "node" if method == "node_rows" else "graph"
            raise DataError(
                f"{type(self).__name__}.{method}: found {shape}, expected {wanted}: "
                f"a row for each {each}, of the width that was given to finish"
            )
        return rows
