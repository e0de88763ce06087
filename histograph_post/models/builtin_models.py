"""The built-in backbones: GCN, GIN, GAT, GraphSAGE and GraphGPS in one class.

    features -> embedding -> num_layers x (convolution, norm, activation, dropout, residual)
             -> pool over the nodes of each graph -> classifier

A checkpoint of a built-in model describes itself: its state dict has the settings beside the
weights, because a pool or a residual connection leaves no trace in the weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    GINEConv,
    GPSConv,
    GraphNorm,
    SAGEConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.resolver import activation_resolver

from ..errors import ModelError
from ..utils.decoding import parse_json, require_sane
from ..utils.specifications import BUILT_IN_MODELS

POOLS: Final = {"mean": global_mean_pool, "sum": global_add_pool, "max": global_max_pool}
_NORMS: Final = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "graph": GraphNorm}

#: The choices of every setting that has a closed set of them.
CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "kind": BUILT_IN_MODELS,
    "norm": ("none", "batch", "layer", "graph"),
    "activation": ("relu", "leaky_relu", "elu", "gelu", "silu", "tanh"),
    "residual": ("none", "add", "scaled"),
    "pool": ("mean", "sum", "max", "none"),
    "classifier": ("linear", "mlp"),
}

#: Kinds whose convolution can read edge features.
EDGE_KINDS: Final = ("gin", "gat", "gps")

#: A weight that identifies the convolution. GAT has that of GCN too, so it goes first.
KIND_WEIGHTS: Final = {
    "gat": "att_src",
    "gps": "attn.in_proj_weight",
    "gin": "nn.0.weight",
    "sage": "lin_l.weight",
    "gcn": "lin.weight",
}

#: The key of the settings in a state dict: torch's own for what is not a parameter or buffer.
SETTINGS_KEY: Final = "_extra_state"


@dataclass(frozen=True)
class GNNSettings:
    """Everything that makes one built-in model differ from another.

    Args:
        kind: ``gcn``, ``gin``, ``gat``, ``sage`` or ``gps``.
        in_dim: the number of float node features, or the number of categories of each column of
            integer features, such as the nine atom features of OGB.
        edge_dim: as ``in_dim``, for edge features (``gin``, ``gat``, ``gps``); None ignores them.
        heads: attention heads (``gat``, ``gps``).
        norm: ``none``, ``batch``, ``layer`` (each node) or ``graph`` (each graph).
        activation: ``relu``, ``leaky_relu``, ``elu``, ``gelu``, ``silu`` or ``tanh``.
        dropout: probability, after the embedding and after every layer.
        residual: ``add`` adds the input of a layer to its output; ``scaled`` divides the output by
            the square root of the depth first, so that activations and gradients do not grow with
            it; ``none`` does neither (a ``gps`` layer always has residuals inside).
        pool: ``mean``, ``sum`` or ``max`` over each graph; ``none`` predicts for every node.
        classifier: ``linear``, or ``mlp`` with one hidden layer.
    """

    kind: str
    in_dim: int | Sequence[int]
    out_dim: int
    hidden: int = 64
    num_layers: int = 5
    edge_dim: int | Sequence[int] | None = None
    heads: int = 4
    norm: str = "batch"
    activation: str = "relu"
    dropout: float = 0.0
    residual: str = "scaled"
    pool: str = "mean"
    classifier: str = "linear"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ModelError(f"{name}={value!r} is not one of {', '.join(choices)}")
        for name in ("in_dim", "out_dim", "hidden", "num_layers", "edge_dim", "heads"):
            self._check_size(name)
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise ModelError(f"dropout={self.dropout!r} is not in [0, 1)")
        if self.kind in ("gat", "gps") and self.hidden % self.heads:
            raise ModelError(f"hidden={self.hidden} is not a multiple of heads={self.heads}")
        if self.edge_dim is not None and self.kind not in EDGE_KINDS:
            raise ModelError(f"{self.kind} reads no edge features; {', '.join(EDGE_KINDS)} do")

    def _check_size(self, name: str) -> None:
        value = getattr(self, name)
        if name == "edge_dim" and value is None:
            return
        several = name in ("in_dim", "edge_dim") and isinstance(value, (list, tuple)) and value
        for size in value if several else [value]:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ModelError(f"{name}={value!r} is not a positive whole number")
        if name == "num_layers":
            require_sane(name, value)

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Self:
        """Build settings from model arguments, in which some choices may be None, True or False."""
        spelled = dict(args)
        for name in ("norm", "pool", "residual"):
            if name in args and (args[name] is None or args[name] is False):
                spelled[name] = "none"
        if args.get("residual") is True:
            spelled["residual"] = "scaled"
        unknown = args.keys() - {field.name for field in fields(cls)}
        if unknown:
            known = ", ".join(field.name for field in fields(cls) if field.name != "kind")
            raise ModelError(
                f"a built-in model has no argument {', '.join(sorted(unknown))}; it has {known}"
            )
        return cls(**spelled)

    def to_tensor(self) -> Tensor:
        """Return the settings as bytes of JSON, the one form every checkpoint format can hold."""
        text = json.dumps(asdict(self))
        # Padded, so that models whose weights have equal shapes have equal shapes here too.
        return torch.tensor(list(text.ljust(1024).encode()), dtype=torch.uint8)  # [1024], at least


def settings_of(state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the settings of a built-in model from its state dict; empty for any other.

    Sizes are taken from the weights: a file cannot ask for more memory than it has bytes. The rest
    (activation, dropout, residual, pool, and the heads of ``gps``) leaves no trace there; it is
    taken from the settings in the state dict, if there are any.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    visible = _settings_of_shapes(shapes)
    return {**_recorded_settings(state_dict), **visible} if visible else {}


def _recorded_settings(state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    record = state_dict.get(SETTINGS_KEY)
    if record is None:
        return {}
    try:
        settings = dict(parse_json(bytes(record.tolist()), SETTINGS_KEY))
    except (ValueError, TypeError) as error:
        raise ModelError(f"the settings in the checkpoint are damaged: {error}") from error
    unknown = settings.keys() - {field.name for field in fields(GNNSettings)}
    if unknown:
        raise ModelError(
            f"the checkpoint has settings this version does not know: {', '.join(sorted(unknown))}"
        )
    return settings


def _settings_of_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    kind = next((kind for kind, name in KIND_WEIGHTS.items() if f"convs.0.{name}" in shapes), None)
    embedding = _embedding_sizes(shapes, "embedding")
    classifier = "linear" if "classifier.weight" in shapes else "mlp"
    last = shapes.get("classifier.weight" if classifier == "linear" else "classifier.3.weight", ())
    if kind is None or embedding is None or len(last) != 2:  # [out_dim, hidden]
        return {}
    settings = {
        "kind": kind,
        "in_dim": embedding,
        "out_dim": last[0],
        "hidden": last[1],
        "num_layers": len({name.split(".")[1] for name in shapes if name.startswith("convs.")}),
        "edge_dim": _embedding_sizes(shapes, "edge_embedding"),
        "norm": _norm_of(shapes, "convs.0.norm1." if kind == "gps" else "norms.0."),
        "classifier": classifier,
    }
    if kind == "gat" and len(attention := shapes["convs.0.att_src"]) == 3:
        settings["heads"] = attention[1]  # [1, heads, channels]
    return settings


def _embedding_sizes(shapes: Mapping[str, tuple[int, ...]], name: str) -> int | list[int] | None:
    linear = shapes.get(f"{name}.linear.weight")  # [hidden, in_dim]
    if linear is not None and len(linear) == 2:
        return linear[1]
    sizes: list[int] = []
    while column := shapes.get(f"{name}.columns.{len(sizes)}.weight"):
        sizes.append(column[0])  # [categories, hidden]
    return sizes or None


def _norm_of(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> str:
    names = {name.removeprefix(prefix) for name in shapes if name.startswith(prefix)}
    if {"running_mean", "module.running_mean"} & names:
        return "batch"
    if "mean_scale" in names:
        return "graph"
    return "layer" if names else "none"


# --- the network


class FeatureEmbedding(nn.Module):
    """Map node or edge features to the hidden width.

    Float features go through a linear map, each column of integer features through an embedding of
    its own; the embeddings are summed. ``setting`` is the name of ``in_dim`` in errors.
    """

    def __init__(self, in_dim: int | Sequence[int], out_dim: int, *, setting: str) -> None:
        super().__init__()
        self.in_dim = in_dim
        self.setting = setting
        if isinstance(in_dim, int):
            self.linear = nn.Linear(in_dim, out_dim)
        else:
            self.columns = nn.ModuleList(nn.Embedding(size, out_dim) for size in in_dim)

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[rows, out_dim]`` for features ``[rows, columns]``, or ``[rows]`` for one."""
        if features.dim() == 1:
            features = features.unsqueeze(-1)  # [rows, 1]
        self._check(features)
        if isinstance(self.in_dim, int):
            return self.linear(features)  # [rows, out_dim]
        embedded = [column(features[:, i]) for i, column in enumerate(self.columns)]
        return torch.stack(embedded).sum(dim=0)  # [rows, out_dim]

    def _check(self, features: Tensor) -> None:
        categorical = not isinstance(self.in_dim, int)
        num_columns = self.in_dim if isinstance(self.in_dim, int) else len(self.in_dim)
        if features.is_floating_point() != categorical and features.shape[-1] == num_columns:
            return
        what = "edge features" if self.setting == "edge_dim" else "node features"
        dtype = str(features.dtype).removeprefix("torch.")
        message = f"{what} are {list(features.shape)} {dtype}; this model was built for "
        message += f"{num_columns} columns of {'categories' if categorical else 'numbers'}"
        if not categorical and not features.is_floating_point():
            message += f" (for categories give how many each column has: {self.setting}=[119,5,12])"
        raise ModelError(message)


class GNN(nn.Module):
    """A message-passing network of one of five kinds, with its own readout."""

    def __init__(self, settings: GNNSettings) -> None:
        super().__init__()
        self.settings = settings
        hidden, num_layers = settings.hidden, settings.num_layers
        self.embedding = FeatureEmbedding(settings.in_dim, hidden, setting="in_dim")
        if settings.edge_dim is not None:
            self.edge_embedding = FeatureEmbedding(settings.edge_dim, hidden, setting="edge_dim")
        self.convs = nn.ModuleList(make_conv(settings) for _ in range(num_layers))
        # A GPS layer normalises inside.
        norm = "none" if settings.kind == "gps" else settings.norm
        self.norms = nn.ModuleList(_NORMS.get(norm, nn.Identity)(hidden) for _ in range(num_layers))
        self.norm_per_graph = norm == "graph"
        self.activation = activation_resolver(settings.activation)
        self.dropout = nn.Dropout(settings.dropout)
        self.residual_scale = num_layers**-0.5 if settings.residual == "scaled" else 1.0
        self.classifier = make_classifier(settings)
        self.register_load_state_dict_pre_hook(_settings_are_optional)

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_attr: Tensor | None = None,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
    ) -> Tensor:
        """Return ``[num_graphs, out_dim]``, or ``[num_nodes, out_dim]`` without a pool."""
        edges = self._edge_arguments(edge_attr, edge_weight)
        h = self.dropout(self.embedding(x))  # [num_nodes, hidden]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            if self.settings.kind == "gps":  # norm, activation and dropout are inside
                update = conv(h, edge_index, batch, **edges)  # [num_nodes, hidden]
            else:
                update = conv(h, edge_index, **edges)  # [num_nodes, hidden]
                update = norm(update, batch, batch_size) if self.norm_per_graph else norm(update)
                update = self.dropout(self.activation(update))  # [num_nodes, hidden]
            if self.settings.residual == "none":
                h = update
            else:
                h = h + self.residual_scale * update  # [num_nodes, hidden]
        if self.settings.pool != "none":
            h = POOLS[self.settings.pool](h, batch, batch_size)  # [num_graphs, hidden]
        return self.classifier(h)  # [num_graphs or num_nodes, out_dim]

    def _edge_arguments(
        self, edge_attr: Tensor | None, edge_weight: Tensor | None
    ) -> dict[str, Tensor | None]:
        """Return the arguments of the convolutions besides nodes and edges."""
        if self.settings.kind == "gcn":
            return {"edge_weight": edge_weight}  # [num_edges]
        if self.settings.edge_dim is None:
            return {}
        if edge_attr is None:
            raise ModelError(
                f"{self.settings.kind} was built with edge_dim, the data has no edge_attr"
            )
        return {"edge_attr": self.edge_embedding(edge_attr)}  # [num_edges, hidden]

    def get_extra_state(self) -> Tensor:
        """Return the settings for the state dict."""
        return self.settings.to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Ignore the settings of loaded weights: this module is built already."""


def _settings_are_optional(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Let weights without settings pass the strict check."""
    state_dict.setdefault(prefix + SETTINGS_KEY, module.get_extra_state())


def make_conv(settings: GNNSettings) -> nn.Module:
    """Return one convolution of the given kind, hidden width to hidden width."""
    hidden, heads = settings.hidden, settings.heads
    reads_edges = settings.edge_dim is not None
    match settings.kind:
        case "gcn":
            return GCNConv(hidden, hidden)
        case "sage":
            return SAGEConv(hidden, hidden)
        case "gat":
            edge_dim = hidden if reads_edges else None
            return GATConv(
                hidden, hidden // heads, heads, dropout=settings.dropout, edge_dim=edge_dim
            )
    mlp = nn.Sequential(
        nn.Linear(hidden, hidden),
        activation_resolver(settings.activation),
        nn.Linear(hidden, hidden),
    )
    gin = GINEConv(mlp, train_eps=True) if reads_edges else GINConv(mlp, train_eps=True)
    if settings.kind == "gin":
        return gin
    return GPSConv(
        hidden,
        gin,
        heads=heads,
        dropout=settings.dropout,
        act=settings.activation,
        norm=None if settings.norm == "none" else f"{settings.norm}_norm",
        # PyG's own layer norm runs over a whole graph unless told otherwise.
        norm_kwargs={"mode": "node"} if settings.norm == "layer" else None,
    )


def make_classifier(settings: GNNSettings) -> nn.Module:
    """Return the map from the pooled graph (or from the node) to the targets."""
    if settings.classifier == "linear":
        return nn.Linear(settings.hidden, settings.out_dim)
    return nn.Sequential(
        nn.Linear(settings.hidden, settings.hidden),
        activation_resolver(settings.activation),
        nn.Dropout(settings.dropout),
        nn.Linear(settings.hidden, settings.out_dim),
    )
