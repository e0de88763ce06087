"""Public checkpoints by name: a network is built with the sizes of its file, or it is refused.

A file must hold the named family, by the names and shapes of its weights. Those are the same for
GCN and GraphSAGE of pretrain-gnns, and a residual connection leaves no trace in the weights: there
a pass over a few molecules decides. In the right network, the input of a batch norm has about the
variance that was recorded in training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from ..data import GraphDataset
from ..data.batching import make_batch
from ..errors import CheckpointError, DataError, ModelError
from ..utils.decoding import MOST_LAYERS, Positive, decode, require_number
from ..utils.machine import require_memory
from .building import Given, build_model
from .builtin_models import POOLS
from .checkpoints import Checkpoint
from .model_call import call_model
from .public_networks import (
    BondConv,
    MolclrGCN,
    MoleculeGNN,
    MoleculePrediction,
    OgbGCN,
    OgbGIN,
    OgbNodes,
    PretrainGAT,
    PretrainGCN,
    PretrainGIN,
    PretrainSAGE,
)
from .spec import RECIPES, ModelSpec

_CONVS: Final[dict[str, type[BondConv]]] = {
    "pretrain-gnns:gcn": PretrainGCN,
    "pretrain-gnns:gin": PretrainGIN,
    "pretrain-gnns:gat": PretrainGAT,
    "pretrain-gnns:sage": PretrainSAGE,
    "molclr:gcn": MolclrGCN,
    "molclr:gin": PretrainGIN,
}

#: The first weight of an encoder; its prefix is that of the whole encoder.
_FIRST: Final = ("x_embedding1.weight", "atom_encoder.atom_embedding_list.0.weight")

#: Beginnings of the names in an encoder.
_ENCODER: Final = re.compile(
    r"(x_embedding[12]|gnns|batch_norms|atom_encoder|convs|virtualnode_embedding"
    r"|mlp_virtualnode_list)\."
)

#: The layer that predicts, where there is one.
_READOUT: Final = "graph_pred_linear."


@dataclass(frozen=True)
class Sizes:
    """The sizes of a network; by default the published ones."""

    atoms: tuple[Positive, ...]
    bonds: tuple[Positive, ...]
    num_layer: Positive = 5
    emb_dim: Positive = 300
    #: Outputs of its own readout; None for an encoder, which has none.
    num_tasks: Positive | None = None


_DEFAULTS: Final = {
    "pretrain-gnns": Sizes((120, 3), (6, 3)),
    "molclr": Sizes((119, 3), (5, 3)),
    "ogb": Sizes((119, 5, 12, 12, 10, 6, 6, 2, 2), (5, 6, 2)),
}

#: Arguments that leave no trace in the weights, and their choices.
_CHOICES: Final[dict[str, dict[str, Sequence[Any]]]] = {
    "pretrain-gnns": {"graph_pooling": tuple(POOLS)},
    "molclr": {"graph_pooling": tuple(POOLS)},
    "ogb": {"graph_pooling": tuple(POOLS), "residual": (False, True), "JK": ("last", "sum")},
}

#: Arguments of all of them.
_NUMBERS: Final = {"drop_ratio": 1, "num_layer": MOST_LAYERS, "emb_dim": math.inf}


def build_public(name: str, given: Given) -> nn.Module:
    """Return the network of a public checkpoint with initial weights.

    Args:
        given: Its arguments are ``graph_pooling`` and ``drop_ratio``, for OGB also ``residual`` and
            ``JK``; where there are no weights to read sizes from, ``num_layer`` and ``emb_dim``.
            Its weights are named as by :func:`adapted`.
    """
    family, kind = name.split(":")
    options = _checked(name, given.args)
    if given.state_dict:
        sizes = sizes_of(given.state_dict)
    else:
        usual = _DEFAULTS[family]
        known = vars(usual) | {"num_tasks": given.out_dim} | given.filled | options  # from a file
        plain = {key: list(v) if isinstance(v, tuple) else v for key, v in known.items()}
        sizes = decode(Sizes, plain, name, error=ModelError, unknown=True)
        if (len(sizes.atoms), len(sizes.bonds)) != (len(usual.atoms), len(usual.bonds)):
            raise ModelError(f"{name}: found {sizes}, expected as many columns as in {usual}")
    for key in ("num_layer", "emb_dim"):
        if options.pop(key, getattr(sizes, key)) != getattr(sizes, key):
            raise ModelError(
                f"{name}: the weights have {key}={getattr(sizes, key)}, not {given.args[key]}"
            )
    if given.num_columns not in (None, len(sizes.atoms)):
        raise ModelError(
            f"{name} reads {len(sizes.atoms)} node features, the data has {given.num_columns}; its "
            f"molecules are encoded with mol_features={RECIPES[name].features}"
        )
    shape = {**vars(sizes), **options}
    for key, most in _NUMBERS.items():
        require_number(f"{name}: {key}", shape.get(key, 1), low=0, high=most)
    num_tasks = shape.pop("num_tasks")
    given.filled.update(vars(sizes))
    pooling = shape.pop("graph_pooling", "mean")

    def build() -> nn.Module:
        encoder: MoleculeGNN | OgbNodes
        if family == "ogb":
            conv, _, virtual = kind.partition("-")
            ogb_conv = OgbGCN if conv == "gcn" else OgbGIN
            encoder = OgbNodes(ogb_conv, virtual_node=bool(virtual), **shape)
        else:
            encoder = MoleculeGNN(_CONVS[name], **shape)
        return encoder if num_tasks is None else MoleculePrediction(encoder, num_tasks, pooling)

    chosen = [sizes.num_layer * sizes.emb_dim, *sizes.atoms, *sizes.bonds, num_tasks]
    require_memory(name, chosen, build, bytes_per_weight=4)
    return build()


def _checked(name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a public model, refusing those that it does not have."""
    choices = _CHOICES[name.partition(":")[0]]
    for key, value in args.items():
        if key not in (*choices, *_NUMBERS):
            expected = ", ".join([*choices, *_NUMBERS])
            raise ModelError(f"{name}: unknown argument {key!r}, expected one of {expected}")
        if key in choices and value not in choices[key]:
            expected = ", ".join(map(str, choices[key]))
            raise ModelError(f"{name}: {key}={value}, expected one of {expected}")
    return dict(args)


def sizes_of(weights: Mapping[str, Tensor]) -> Sizes:
    """Return the sizes of a network from its weights, as :func:`adapted` names them."""
    # A file may have them in any order.
    atoms = _tables(weights, r"(?:^|\.)(?:x_embedding|atom_embedding_list\.)(\d+)\.weight$")
    bonds = _tables(
        weights, r"\.0\.(?:edge_embedding|bond_encoder\.bond_embedding_list\.)(\d+)\.weight$"
    )
    layers = {m[1] for m in (re.search(r"(?:gnns|convs)\.(\d+)\.", name) for name in weights) if m}
    readout = weights.get(f"{_READOUT}weight")
    return Sizes(
        atoms=tuple(len(table) for table in atoms),
        bonds=tuple(len(table) for table in bonds),
        num_layer=len(layers),
        emb_dim=atoms[0].shape[1],
        num_tasks=None if readout is None else readout.shape[0],
    )


def _tables(weights: Mapping[str, Tensor], pattern: str) -> list[Tensor]:
    """Return the weights whose names match, ordered by the number in the name."""
    found = [(re.search(pattern, name), value) for name, value in weights.items()]
    numbered = {int(match[1]): value for match, value in found if match}
    return [numbered[number] for number in sorted(numbered)]


# --- the weights of a file


def family_of(weights: Mapping[str, Tensor]) -> str | None:
    """Return the public model that weights of these names and shapes belong to; else None.

    GCN and GraphSAGE of pretrain-gnns look alike: they are taken for GCN, unless the inputs of all
    batch norms had unit length, as those of GraphSAGE do.
    """
    names = {name.rpartition("gnns.0.")[2] for name in weights if "gnns.0." in name}
    ogb = {name.rpartition("convs.0.")[2] for name in weights if "convs.0." in name}
    if "bond_encoder.bond_embedding_list.0.weight" in ogb:
        virtual = any("virtualnode_embedding." in name for name in weights)
        kind = "gcn" if "root_emb.weight" in ogb else "gin" if "eps" in ogb else None
        return None if kind is None else f"ogb:{kind}{'-virtual' if virtual else ''}"
    if "edge_embedding1.weight" not in names:
        return None
    bonds = next(v for k, v in weights.items() if k.endswith("gnns.0.edge_embedding1.weight"))
    if "mlp.0.weight" in names:
        molclr = bonds.shape[0] == _DEFAULTS["molclr"].bonds[0]
        return "molclr:gin" if molclr else "pretrain-gnns:gin"
    if "att" in names:
        return "pretrain-gnns:gat"
    if "weight" in names:
        return "molclr:gcn"
    if "linear.weight" not in names:
        return None
    return "pretrain-gnns:sage" if _unit_length(weights) else "pretrain-gnns:gcn"


def _unit_length(weights: Mapping[str, Tensor]) -> bool:
    """Whether the inputs of all batch norms had unit length: their second moments sum to one."""
    lengths = [
        float((weights[name.replace("running_mean", "running_var")] + mean.square()).sum())
        for name, mean in weights.items()
        if re.search(r"(^|\.)batch_norms\.\d+\.running_mean$", name)
        and name.replace("running_mean", "running_var") in weights
    ]
    return bool(lengths) and all(abs(length - 1) < 0.05 for length in lengths)


def adapted(name: str, checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a file's weights under the names of this package's networks, and what is left out.

    An encoder may have any prefix (``gnn.``, ``molecule_model.``), with or without a readout.
    Projections, decoders and other parts that were only used in training are left out.

    Raises:
        CheckpointError: for the weights of another family, which is named.
    """
    weights = checkpoint.state_dict
    found = family_of(weights)
    # check_public tells these two apart.
    undecided = (found, name) == ("pretrain-gnns:gcn", "pretrain-gnns:sage")
    if found != name and not undecided:
        raise _other_family(name, found, checkpoint.path)
    prefixes = [
        key.removesuffix(first)
        for key in weights
        for first in _FIRST
        if f".{key}".endswith(f".{first}")
    ]
    if len(prefixes) != 1:
        raise CheckpointError(
            f"{checkpoint.path}: found {len(prefixes)} tables of atoms, expected the weights of "
            f"one {name}: choose with --state NAME"
        )
    (prefix,) = prefixes
    outer = prefix[: prefix.rstrip(".").rfind(".") + 1]  # "model.gnn." -> "model."
    encoder = [
        key for key in weights if key.startswith(prefix) and _ENCODER.match(key, len(prefix))
    ]
    readout = [key for key in weights if key.startswith(outer + _READOUT)]
    if name.startswith("molclr"):
        readout = []
    within = ("gnn_node." if name.startswith("ogb") else "gnn.") if readout else ""
    state_dict = {within + key.removeprefix(prefix): weights[key] for key in encoder}
    state_dict |= {key.removeprefix(outer): weights[key] for key in readout}
    left_out = dict.fromkeys(
        key.removeprefix(outer).partition(".")[0]
        for key in weights
        if key not in {*encoder, *readout}
    )
    return replace(checkpoint, state_dict=state_dict, stripped=()), tuple(left_out)


def _other_family(name: str, found: str | None, path: Path) -> CheckpointError:
    if found is None:
        return CheckpointError(
            f"{path}: found none of the weights of {name}, expected such a file; histograph "
            "recipes lists where they are, and another model is named --model file.py:Name"
        )
    return CheckpointError(
        f"{path}: found the weights of {found}, expected those of {name}: type --model {found}"
    )


# --- what the weights compute

#: Two networks whose weights have the same names and shapes.
_TWINS: Final = {
    "pretrain-gnns:gcn": "pretrain-gnns:sage",
    "pretrain-gnns:sage": "pretrain-gnns:gcn",
}

#: Batch norms that are compared: the first ones depend the least on anything else that differs.
_NORMS: Final = 2
#: A family is refused if the inputs of its batch norms differ from what was recorded by more than
#: this (the logarithm of a ratio of variances), and another's by less than half as much. For the
#: public files, wrong families differ by 13 and more, the right ones by 0.6 at most.
_DIFFERS: Final = 1.0
#: Molecules to run, at most.
_MOLECULES: Final = 64


def check_public(spec: ModelSpec, model: nn.Module, dataset: GraphDataset) -> None:
    """Refuse data with other features, and weights that compute as another network's do."""
    name, args = spec.spec, spec.args
    _check_features(name, model, dataset)
    others: list[tuple[str, str, dict[str, Any]]] = []
    if name in _TWINS:
        others.append((_TWINS[name], f"--model {_TWINS[name]}", {}))
    if name.startswith("ogb:"):
        residual = not args.get("residual", False)
        others.append(
            (name, f"--model-args residual={str(residual).lower()}", {"residual": residual})
        )
    sample = dataset.graphs[:: max(len(dataset) // _MOLECULES, 1)][:_MOLECULES]
    here = _misfit(model, sample)
    if not others or here is None or here < _DIFFERS:
        return
    weights = model.state_dict()
    for other, option, changed in others:
        twin = build_model(other, {**args, **changed}, state_dict=weights)
        twin.load_state_dict(weights)
        there = _misfit(twin.eval(), sample)
        if there is not None and there < here / 2:
            like = other if other != name else f"{name} with {option.rpartition(' ')[2]}"
            raise CheckpointError(
                f"{spec.checkpoint}: found the weights of {like}, expected those of {name}: its "
                f"batch norms recorded variances {math.exp(here):.1g} times off: type {option}"
            )


@torch.inference_mode()
def _misfit(model: nn.Module, graphs: Sequence[Data]) -> float | None:
    """Return how much the inputs of the first batch norms differ from their running statistics.

    None for a network whose batch norms have recorded nothing.
    """
    norms = [
        module
        for name, module in model.named_modules()
        if re.search(r"(^|\.)batch_norms\.\d+$", name)
    ][:_NORMS]
    if any(
        norm.num_batches_tracked is not None and norm.num_batches_tracked == 0 for norm in norms
    ):
        return None
    found: list[float] = []

    def compare(norm: nn.BatchNorm1d, inputs: tuple[Tensor, ...]) -> None:
        (h,) = inputs  # [N, width]
        assert norm.running_var is not None  # it was loaded
        ratio = (h.var(dim=0) + norm.eps) / (norm.running_var + norm.eps)  # [width]
        found.append(abs(float(ratio.log().median())))

    hooks = [norm.register_forward_pre_hook(compare) for norm in norms]
    try:
        call_model(model, make_batch(graphs))
    finally:
        for hook in hooks:
            hook.remove()
    return max(found)


def _check_features(name: str, model: nn.Module, dataset: GraphDataset) -> None:
    """Refuse data whose features are not indices into the embeddings of a public model."""
    sizes = sizes_of(model.state_dict())
    for graph, label in zip(dataset.graphs, dataset.ids, strict=True):
        for what, tables, features in (
            ("node", sizes.atoms, graph.x),
            ("edge", sizes.bonds, graph.get("edge_attr")),
        ):
            problem = _feature_problem(features, tables)
            if problem is not None:
                raise DataError(
                    f"{dataset.spec}: {label}: found {what} features {problem}, expected "
                    f"mol_features={RECIPES[name].features}, which {name} was trained on"
                )


def _feature_problem(features: Tensor | None, tables: Sequence[int]) -> str | None:
    if features is None:
        return "missing"
    if features.is_floating_point() or features.dim() != 2 or features.shape[1] != len(tables):
        return f"{list(features.shape)} {str(features.dtype).removeprefix('torch.')}"
    if not len(features):
        return None
    highest, lowest = features.amax(dim=0), int(features.min())  # [columns]
    for column, (value, size) in enumerate(zip(highest.tolist(), tables, strict=True)):
        if value >= size or lowest < 0:
            return f"up to {value} in column {column}, whose table has {size} rows"
    return None
