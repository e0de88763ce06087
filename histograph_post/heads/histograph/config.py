"""Every option of the HistoGraph head, in one frozen, serialisable place."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass, fields
from typing import Any, TypeAlias

from ...errors import ConfigError
from ...utils import LEVELS
from ..history import DERIVED, STATISTICS, kept_dims
from .layer_attention import LAYER_ATTENTIONS, NORMALIZATIONS
from .node_attention import NODE_ATTENTIONS

MIXINGS = ("learned", "fixed", "delayed")
BASES = ("statistics", "all", "last")

#: Values of ``node_attention`` in the first version.
_FIRST_VERSION = {True: "exact", False: "none"}


#: A name; or, as in the first version, True or False, which :data:`_FIRST_VERSION` names.
AttentionName: TypeAlias = str


@dataclass(frozen=True)
class HistoGraphConfig:
    """What a :class:`~histograph_post.heads.histograph.HistoGraphHead` is made of.

    The defaults are the form that trained best and most evenly over seeds on frozen backbones;
    ``PAPER_FORM`` (:mod:`~histograph_post.heads.registry`) holds the options of the paper's own.

    Args:
        in_dims: Width of each layer of the history, input embedding first.
        out_dim: Outputs per graph or node; 1 for ``level="link"``.
        dim: Width of the head.
        heads: Heads of the node attention.
        level: ``graph``, ``node`` or ``link``.
        history_layers: Use only the last so many layers; ``None`` uses all but a raw input, see
            :func:`~histograph_post.heads.history.kept_dims`.
        layer_attention: ``learned``, or the ablations ``mean``, ``last``, ``random``.
        normalization: How layer scores become weights: a name in :data:`.NORMALIZATIONS`, whose
            functions say what they do.
        eps: Smallest magnitude of what a normalisation divides by, as ``signed`` does.
        radius: Largest distance of ``bounded`` weights from the mean over layers.
        layer_heads: Sets of layer weights, each for its own slice of the channels.
        node_attention: What a node attends to. ``exact``: all nodes of its graph, as in the paper.
            ``landmark``: the means of groups of them, see :mod:`.large_graphs`. ``neighbors``: the
            nodes with an edge to it, and itself. ``none``: nothing. ``auto``: ``exact`` in graphs
            of up to :data:`.node_attention.EXACT_NODES` nodes, ``landmark`` in larger ones. True
            and False, of the first version, are ``exact`` and ``none``.
        landmarks: Groups of nodes for ``landmark``, a power of two.
        zero_token: Add a key and value of zeros to the node attention.
        attention_dropout: Drop single attention weights.
        key_dropout: Drop whole nodes as keys.
        residual: Add the node attention's input to its output.
        layer_norm: LayerNorm of every node after the node attention (and the residual).
        mix: What the result is mixed with, projected: ``statistics`` of all layers over the nodes
            of the graph, the means of ``all`` layers, or the mean of the ``last`` layer. At other
            levels than ``graph`` a node's own layers take the place of means and statistics.
        statistics: Which, joined by ``+``: ``mean``, ``max`` and ``deviation`` of every channel,
            its ``sum``, and the graph's ``size``.
        statistics_dropout: Dropout of the statistics before they are projected.
        mixing: The coefficient ``a`` of ``a * attended + (1 - a) * mixed in``: ``learned``,
            ``fixed``, or ``delayed`` (learned, its gradient held back for ``mixing_delay`` steps).
        mixing_init: Initial ``a``.
        mixing_delay: Training steps before a ``delayed`` coefficient starts to learn.
        output_norm: LayerNorm of what the MLP reads: a graph's readout, or a node's.
        mlp_layers: Hidden layers of the MLP; 0 is a linear map.
        dropout: Dropout inside the MLP.
        shortcut: A linear map from the last layer's mean straight to the outputs, as
            :meth:`~histograph_post.heads.histograph.HistoGraphHead.warm_start` adds it.
        probe: Share of a linear start in the predictions of a head that is trained on a cache: a
            solved probe, or for nodes the checkpoint's own classifier; 0 leaves it out.
        solved: Whether there is such a probe, as
            :meth:`~histograph_post.heads.histograph.HistoGraphHead.start_at` adds it.
        standardize: Without effect, for runs and scripts of the first version: standardisation
            comes before a head, see :mod:`~histograph_post.heads.standardize`.
    """

    in_dims: tuple[int, ...]
    out_dim: int
    _: KW_ONLY
    dim: int = 64
    heads: int = 4
    level: str = "graph"
    history_layers: int | None = None
    layer_attention: str = "learned"
    normalization: str = "bounded"
    eps: float = 1e-6
    radius: float = 2.0
    layer_heads: int = 4
    node_attention: AttentionName = "auto"
    landmarks: int = 256
    zero_token: bool = False
    attention_dropout: float = 0.0
    key_dropout: float = 0.0
    residual: bool = True
    layer_norm: bool = False
    mix: str = "statistics"
    statistics: str = "mean+max+deviation+sum+size"
    statistics_dropout: float = 0.5
    mixing: str = "learned"
    mixing_init: float = 0.5
    mixing_delay: int = 100
    output_norm: bool = True
    mlp_layers: int = 1
    dropout: float = 0.0
    shortcut: bool = False
    probe: float = 0.5
    solved: bool = False
    standardize: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "in_dims", tuple(int(width) for width in self.in_dims))
        given: Any = self.node_attention
        if isinstance(given, bool):
            object.__setattr__(self, "node_attention", _FIRST_VERSION[given])
        if not self.in_dims or min(self.in_dims) < 1:
            raise ConfigError(f"in_dims: found {self.in_dims}, expected one width per layer")
        for name in ("out_dim", "dim", "heads", "layer_heads"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("mixing_delay", "mlp_layers"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        for name in ("eps", "radius"):
            self._require(name, getattr(self, name) > 0, "a positive number")
        for name in ("attention_dropout", "key_dropout", "dropout", "statistics_dropout"):
            self._require(name, 0 <= getattr(self, name) < 1, "a probability below 1")
        for name in ("heads", "layer_heads"):
            self._require(name, self.dim % getattr(self, name) == 0, f"a divisor of dim={self.dim}")
        for name, choices in (
            ("level", LEVELS),
            ("layer_attention", LAYER_ATTENTIONS),
            ("normalization", NORMALIZATIONS),
            ("node_attention", NODE_ATTENTIONS),
            ("mix", BASES),
            ("mixing", MIXINGS),
        ):
            self._require(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        learned = self.mixing != "fixed"
        inside = 0 < self.mixing_init < 1 if learned else 0 <= self.mixing_init <= 1
        self._require("mixing_init", inside, "a number between 0 and 1, not at the ends if learned")
        count = self.landmarks
        self._require("landmarks", count > 0 and not count & (count - 1), "a power of two")
        self._require("probe", 0 <= self.probe <= 1, "a number from 0 to 1")
        names = self.statistics_names
        known = len({*names}) == len(names) and {*STATISTICS, *DERIVED}.issuperset(names)
        listed = ", ".join((*STATISTICS, *DERIVED))
        self._require("statistics", known, f"some of {listed}, each once, joined by +")
        kept = self.history_layers
        if kept is not None:
            self._require("history_layers", 1 <= kept <= len(self.in_dims), "1 to all layers")
        if self.level == "link":
            self._require("out_dim", self.out_dim == 1, "1 at link level")
            for name in ("shortcut", "solved"):
                self._require(name, not getattr(self, name), "False at link level")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(f"{name}: found {getattr(self, name)!r}, expected {expected}")

    @property
    def kept_dims(self) -> tuple[int, ...]:
        """Widths of the layers that are used."""
        return kept_dims(self.in_dims, self.history_layers)

    @property
    def statistics_names(self) -> tuple[str, ...]:
        """The statistics one by one."""
        return tuple(self.statistics.split("+"))

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {**asdict(self), "in_dims": list(self.in_dims)}

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, in order."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("in_dims", "out_dim")
            and getattr(self, field.name) != field.default
        }
