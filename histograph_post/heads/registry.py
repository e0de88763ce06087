"""Every readout by name, known without loading torch.

``histograph train-head --head NAME`` and ``histograph compare`` look here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..utils.levels import LEVELS

if TYPE_CHECKING:
    from torch import nn

    from .base import Readout

#: Arguments of every head's constructor that :func:`build_head` passes itself.
_FIXED = ("in_dims", "out_dim", "level")


@dataclass(frozen=True)
class HeadInfo:
    """What is known of a readout before it is loaded.

    Attributes:
        name: What the user types.
        description: One line for help texts and tables.
        location: ``module:Class``, the module relative to this package.
        levels: What it can predict.
        needs_edge_index: Whether it needs the edges of the graphs.
        warm_starts: Whether it can start at the checkpoint's own predictions.
        preset: Options of the class that this name stands for.
    """

    name: str
    description: str
    location: str
    levels: tuple[str, ...] = ("graph",)
    needs_edge_index: bool = False
    warm_starts: bool = False
    preset: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> type[Readout]:
        """Import and return the class."""
        found: type[Readout] = _import(self.location)
        return found

    def options(self) -> dict[str, Any]:
        """Return the options this readout takes and their defaults."""
        declared = inspect.signature(self.load())
        return {
            name: parameter.default
            for name, parameter in declared.parameters.items()
            if name not in (*_FIXED, *self.preset)
        }


def _import(location: str) -> Any:
    module, _, name = location.partition(":")
    return getattr(import_module(module, __package__), name)


#: The options that turn HistoGraph into the paper's own form.
PAPER_FORM: Mapping[str, Any] = MappingProxyType(
    {
        "normalization": "signed",
        "layer_heads": 1,
        "mix": "last",
        "residual": False,
        "output_norm": False,
    }
)

_HEADS = (
    HeadInfo(
        "histograph",
        "attention over the history of layers, then over the nodes",
        ".histograph:HistoGraphHead",
        levels=LEVELS,
        warm_starts=True,
    ),
    HeadInfo(
        "histograph-paper",
        "HistoGraph in the paper's own form",
        ".histograph:HistoGraphHead",
        levels=LEVELS,
        warm_starts=True,
        preset=PAPER_FORM,
    ),
    HeadInfo(
        "mean",
        "mean over the nodes of the last layer",
        ".readouts:LastLayer",
        preset={"reduce": "mean"},
    ),
    HeadInfo(
        "sum",
        "sum over the nodes of the last layer",
        ".readouts:LastLayer",
        preset={"reduce": "sum"},
    ),
    HeadInfo(
        "max",
        "maximum over the nodes of the last layer",
        ".readouts:LastLayer",
        preset={"reduce": "max"},
    ),
    HeadInfo(
        "mlp",
        "MLP probe of the last layer, node by node",
        ".readouts:LastLayer",
        levels=("node", "link"),
        preset={"reduce": "mean"},
    ),
    HeadInfo(
        "linear", "linear probe of the (mean) last layer", ".readouts:LinearProbe", levels=LEVELS
    ),
    HeadInfo("layer-mean", "mean over all layers", ".readouts:LayerMean", levels=LEVELS),
    HeadInfo(
        "concat",
        "(mean) of every layer, concatenated, and a linear map",
        ".readouts:Concat",
        levels=LEVELS,
    ),
    HeadInfo(
        "jk-cat",
        "JumpingKnowledge: layers concatenated per node",
        ".readouts:JumpingKnowledge",
        levels=LEVELS,
        preset={"mode": "cat"},
    ),
    HeadInfo(
        "jk-max",
        "JumpingKnowledge: maximum over layers per node",
        ".readouts:JumpingKnowledge",
        levels=LEVELS,
        preset={"mode": "max"},
    ),
    HeadInfo(
        "jk-lstm",
        "JumpingKnowledge: LSTM attention over layers per node",
        ".readouts:JumpingKnowledge",
        levels=LEVELS,
        preset={"mode": "lstm"},
    ),
    HeadInfo("attention", "softmax-gated sum of nodes", ".set_pooling:AttentionReadout"),
    HeadInfo("set2set", "LSTM attending to the nodes in steps", ".set_pooling:Set2Set"),
    HeadInfo("sortpool", "first k sorted nodes, 1-D convolution", ".set_pooling:SortPool"),
    HeadInfo(
        "set-transformer",
        "self-attention over nodes, attention pooling",
        ".set_pooling:SetTransformer",
    ),
    HeadInfo("gmt", "Graph Multiset Transformer", ".set_pooling:GraphMultisetTransformer"),
    HeadInfo(
        "topkpool",
        "TopK pooling: nodes dropped by a learned projection",
        ".structural:TopKPool",
        needs_edge_index=True,
    ),
    HeadInfo(
        "sagpool",
        "SAGPool: nodes dropped by a graph convolution",
        ".structural:SAGPool",
        needs_edge_index=True,
    ),
    HeadInfo(
        "asap",
        "ASAP: attention over neighbourhoods, the best kept",
        ".structural:ASAPool",
        needs_edge_index=True,
    ),
    HeadInfo(
        "edgepool",
        "EdgePool: edges contracted by score",
        ".structural:EdgePool",
        needs_edge_index=True,
    ),
    HeadInfo(
        "diffpool",
        "DiffPool: soft clusters from a graph convolution",
        ".dense_pooling:DiffPool",
        needs_edge_index=True,
    ),
    HeadInfo(
        "mincutpool",
        "MinCutPool: soft clusters that cut few edges",
        ".dense_pooling:MinCutPool",
        needs_edge_index=True,
    ),
    HeadInfo(
        "sopool",
        "SOPool: second-order pooling, bilinear mapping",
        ".second_order:SOPool",
        preset={"mode": "bilinear"},
    ),
    HeadInfo(
        "sopool-attention",
        "SOPool: second-order pooling, attentional",
        ".second_order:SOPool",
        preset={"mode": "attentional"},
    ),
    HeadInfo(
        "dkepool",
        "DKEPool: mean and covariance of the nodes",
        ".second_order:DKEPool",
        preset={"robust": False},
    ),
    HeadInfo(
        "dkepool-robust",
        "DKEPool for few nodes: square root of the covariance",
        ".second_order:DKEPool",
        preset={"robust": True},
    ),
)

#: Every readout, in the order of help texts.
HEADS: Mapping[str, HeadInfo] = MappingProxyType({info.name: info for info in _HEADS})


def head_names(level: str | None = None) -> tuple[str, ...]:
    """Return the names of all readouts, or of those that work at one level."""
    return tuple(name for name, info in HEADS.items() if level is None or level in info.levels)


def head_info(name: str) -> HeadInfo:
    """Return what is known of a readout; an unknown name is refused with the nearest ones."""
    if name not in HEADS:
        near = get_close_matches(name, HEADS, n=3) or HEADS
        raise ConfigError(f"head: found {name!r}, expected a readout such as {', '.join(near)}")
    return HEADS[name]


def build_head(
    name: str, in_dims: Sequence[int], out_dim: int, level: str = "graph", **options: Any
) -> Readout:
    """Build a readout by name.

    Args:
        name: One of :data:`HEADS`.
        in_dims: Width of each layer of the history.
        out_dim: Number of outputs per graph or node; 1 for links.
        level: ``graph``, ``node`` or ``link``.
        options: Any of the readout's own options, see :meth:`HeadInfo.options`.
    """
    info = head_info(name)
    if level not in info.levels:
        raise ConfigError(
            f"head {name!r}: found level {level!r}, expected {' or '.join(info.levels)}"
        )
    valid = info.options()
    unknown = [option for option in options if option not in valid]
    if unknown:
        raise ConfigError(
            f"head {name!r}: found option {unknown[0]!r}, expected one of {', '.join(valid)}"
        )
    # The command line reads `none` as nothing, where an option may have it as a word.
    words = {
        name: "none"
        for name, value in options.items()
        if value is None and isinstance(valid[name], str)
    }
    return info.load()(in_dims, out_dim, level=level, **info.preset, **options | words)


def head_config(name: str, head: nn.Module) -> dict[str, Any]:
    """Return what builds a head again, as plain values: ``build_head(name, **config)``."""
    config: Any = head.config
    return {key: value for key, value in config().items() if key not in head_info(name).preset}
